"""``apq-tvm tune``: find and record what is faster than the defaults on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from apq_tvm.cli.bench import parse_counts, parse_shapes
from apq_tvm.cli.console import print_json, print_table, reports_errors, say, stderr
from apq_tvm.cli.options import Dim, Json, TensorType, parse_dims, parse_tensor_types
from apq_tvm.errors import BadInput

if TYPE_CHECKING:
    from apq_tvm.tune.budget import Planned
    from apq_tvm.tune.measure import Trial
    from apq_tvm.tune.ratios import Ratio
    from apq_tvm.tune.rules import Answer
    from apq_tvm.tune.session import Finding

ModelOption = Annotated[
    Path | None, typer.Argument(help="ONNX file; none with --shapes.", show_default=False)
]
Log = Annotated[
    Path | None,
    typer.Option(
        "--log", help="File of records to add to; by default the device's.", show_default=False
    ),
]

Rows = Annotated[
    str,
    typer.Option(
        "--m",
        help="Comma list: rows of activations to tune for; by default 1,4,16,128, of --rules 15 "
        "numbers up to 128.",
    ),
]
Rules = Annotated[
    bool,
    typer.Option(
        "--rules", help="For layers of any shape: which kernel for how many rows, its decisions."
    ),
]

Where = Annotated[
    str, typer.Option(help="Where candidates run: local, ssh://, adb:// or rpc:// and an address.")
]
Static = Annotated[
    bool,
    typer.Option(
        "--static", help="Without the device: judge code, where that is known to rank right."
    ),
]


class Live:
    """Bars of tasks on standard error: trials, the best against the default, time left."""

    def __init__(self, planned: Sequence[Planned]) -> None:
        columns = (
            TextColumn("{task.description:<40}"), BarColumn(bar_width=20), MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bars = RichProgress(*columns, console=stderr())
        total = sum(each.trials for each in planned)
        self._whole = self.bars.add_task("all tasks", total=total, best="")
        self._tasks: dict[str, TaskID] = {}

    def noise(self, ratio: Ratio) -> None:
        """A line: how much equal code differs."""
        say(
            f"noise: equal code differs by {abs(ratio.value - 1):.1%}; "
            f"95 % sure: {ratio.low:.3f} to {ratio.high:.3f}"
        )

    def begin(self, planned: Planned, known: int) -> None:
        """A bar of its own."""
        task = planned.task
        words = f"{task.name} M={task.m}"
        self._tasks[task.key] = self.bars.add_task(
            words, total=planned.trials, completed=known, best=""
        )
        self.bars.advance(self._whole, known)

    def tried(self, planned: Planned, trials: Sequence[Trial], best: float) -> None:
        """The bar goes on."""
        bar = self._tasks[planned.task.key]
        self.bars.update(bar, advance=len(trials), best=f"best {best:.2f}x")
        self.bars.advance(self._whole, len(trials))

    def end(self, finding: Finding) -> None:
        """The bar is gone; a line says what was found."""
        bar = self._tasks.pop(finding.planned.task.key, None)
        if bar is not None:
            self.bars.remove_task(bar)
        left = finding.planned.trials - len(finding.trials)
        if left > 0:
            self.bars.advance(self._whole, left)
        say(_line(finding))

    def remark(self, text: str) -> None:
        """A line."""
        say(f"remark: {text}")


def _line(finding: Finding) -> str:
    task = finding.planned.task
    before = "as before: " if finding.resumed else ""
    head = f"{task.name} M={task.m}: {len(finding.trials)} trials, {before}"
    if finding.record is not None:
        low, high = finding.record.interval
        return f"{head}{finding.record.ratio:.2f}x ({low:.2f} to {high:.2f}): {_found(finding)}"
    return f"{head}default ({finding.why})"


def _found(finding: Finding) -> str:
    """What the record decides otherwise: another kernel, answers; or why there is none."""
    record = finding.record
    if record is None:
        return finding.why
    other = [record.kernel] if record.kernel != finding.planned.task.default else []
    return ", ".join([*other, *(f"{name}={value}" for name, value in record.decisions.items())])


def _findings(session: Any, device: str, static: bool) -> Any:
    """What the tuner finds, with its progress shown."""
    from apq_tvm.tune.api import devices_of
    from apq_tvm.tune.static.session import tune_static

    if static and device != "local":
        raise BadInput("--static times nothing: leave --device out")
    devices = [] if static else devices_of(device, session.profile)
    if not static:
        session.check(devices)
    live = Live(session.planned)
    say(f"records go to {session.settings.log}")
    with live.bars:
        if static:
            return tune_static(session.planned, session.profile, session.settings, live)
        return session.run(live, devices)


@reports_errors
def tune_command(
    model: ModelOption = None,
    target: Annotated[str, typer.Option(help="Device, see: apq-tvm targets.")] = "host",
    scheme: Annotated[str, typer.Option(help="Of every layer, see: apq-tvm formats.")] = "W4A8g32",
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so long.", show_default=False)
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of all tasks together; by default 64 of each.", show_default=False
        ),
    ] = None,
    shapes: Annotated[
        str, typer.Option(help="Comma list of NxK: only such layers; without a model, these.")
    ] = "",
    m: Rows = "",
    tensor_type: TensorType = None,
    dim: Dim = None,
    log: Log = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Default: all physical cores, of --rules 1.", show_default=False),
    ] = None,
    device: Where = "local",
    static: Static = False,
    rules: Rules = False,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    functions: Annotated[
        bool, typer.Option(help="A model's softmax, norms and other functions of floats too.")
    ] = True,
    html: Annotated[
        Path | None, typer.Option(help="Page with the curve of each task.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say tasks, sizes of spaces and time.")
    ] = False,
    json: Json = False,
) -> None:
    """Find decisions that are faster than the defaults, and record them.

    compile uses the records. Ctrl-C keeps everything; starting again goes on.
    """
    from apq_tvm.tune.api import Request, prepare
    from apq_tvm.tune.budget import seconds_of
    from apq_tvm.tune.tasks import DEFAULT_ROWS

    if rules:
        _refuse({
            "--minutes": minutes, "--trials": trials, "--tensor-type": tensor_type, "--dim": dim,
            "--static": static, "--html": html, "--dry-run": dry_run,
        })  # fmt: skip
        _print_rules(_rules(model, target, scheme, shapes, m, log, threads, device), json)
        return
    if html is not None:
        from apq_tvm.extras import require

        require("matplotlib")
    wanted = Request(
        model, target, scheme, parse_shapes(shapes) if shapes else [],
        parse_counts(m, "--m") if m else DEFAULT_ROWS, trials, minutes,
        parse_tensor_types(tensor_type or []), parse_dims(dim or []), log, threads, seed, functions,
    )  # fmt: skip
    session = prepare(wanted)
    if dry_run:
        _print_plan(session.planned, seconds_of(session.planned, minutes), json)
        return
    findings = _findings(session, device, static)
    if html is not None:
        from apq_tvm.tune.page import write_page

        write_page(html, findings, session.settings)
    if json:
        print_json([_words(finding) for finding in findings])
        return
    _print_findings(findings)


def _refuse(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise BadInput(f"--rules has no use for {name}: leave it out")


def _rules(
    model: Path | None, target: str, scheme: str, shapes: str, m: str, log: Path | None,
    threads: int | None, device: str,
) -> Sequence[Answer]:  # fmt: skip
    """Rules for the device, written beside its log."""
    from apq_tvm.tune.api import Request
    from apq_tvm.tune.rules.session import tune_rules

    given = parse_shapes(shapes) if shapes else []
    rows = parse_counts(m, "--m") if m else ()
    request = Request(
        model, target, scheme, given, rows, None, None, {}, None, log, threads, seed=0
    )
    with stderr().status("kernels in turns") as status:

        def told(text: str) -> None:
            if text.startswith("remark: "):
                say(text)
            else:
                status.update(text)

        found, written = tune_rules(request, device, told)
    for path in written:
        say(f"rules written to {path}")
    return found


def _print_rules(answers: Sequence[Answer], json: bool) -> None:
    if json:
        print_json([
            {
                "scheme": answer.scheme, "width": answer.width, "shares": answer.shares,
                "rules": [
                    {"log": rule.log, "gain": round(rule.gain, 3), **rule.words}
                    for rule in answer.rules
                ],
            }
            for answer in answers
        ])  # fmt: skip
        return
    for answer in answers:
        counts = sorted({m for shares in answer.shares.values() for m in shares})
        cells = [
            (kernel, *(f"{shares[m]:.2f}" if m in shares else "" for m in counts))
            for kernel, shares in answer.shares.items()
        ]
        bits = f" at {answer.width} bits" if answer.width else ""
        title = f"{answer.scheme}{bits}: of the fastest kernel's speed, by rows of x"
        print_table(title, ("kernel", *map(str, counts)), cells, right=tuple(map(str, counts)))
    rows = [
        (rule.kernel, rule.log, f"{rule.gain:.2f}", _answers(rule.words))
        for answer in answers
        for rule in answer.rules
    ]
    if rows:
        title = "what this device wants otherwise"
        print_table(title, ("kernel", "rules", "gain", "answers"), rows, right=("gain",))
    else:
        print("the device's rules stay")


def _answers(words: Mapping[str, Any]) -> str:
    names = ("least", "least_whole", "most")
    told = {name: words[name] for name in names if name in words} | dict(words.get("first", {}))
    return ", ".join(f"{name}={value}" for name, value in told.items())


def _print_plan(planned: Sequence[Planned], seconds: float, json: bool) -> None:
    rows = [
        {
            "task": each.task.name,
            "m": each.task.m,
            "rows": list(each.task.rows),
            "layers": len(each.task.layers),
            "points": len(each.space.points),
            "trials": each.trials,
        }
        for each in planned
    ]
    if json:
        print_json({"dry_run": True, "tasks": rows, "seconds": round(seconds)})
        return
    columns = ("task", "M", "layers", "points", "trials")
    table = [(r["task"], r["m"], r["layers"], r["points"], r["trials"]) for r in rows]
    print_table(f"{len(rows)} tasks", columns, table, right=columns[1:])
    print(f"about {seconds / 60:.1f} minutes; nothing was timed")


def _words(finding: Finding) -> dict[str, Any]:
    task, record = finding.planned.task, finding.record
    return {
        "task": task.name,
        "m": task.m,
        "trials": len(finding.trials),
        "ratio": round(record.ratio, 4) if record else 1.0,
        "interval": list(record.interval) if record else None,
        "kernel": record.kernel if record else "",
        "decisions": dict(record.decisions) if record else {},
        "why": finding.why,
    }


def _print_findings(findings: Sequence[Finding]) -> None:
    columns = ("task", "M", "trials", "ratio", "decisions, or why there is no record")
    rows = [
        (
            f.planned.task.name,
            f.planned.task.m,
            len(f.trials),
            f"{f.record.ratio:.2f}" if f.record else "1.00",
            _found(f),
        )
        for f in findings
    ]
    print_table("time of the default over the found one's", columns, rows, right=columns[1:4])

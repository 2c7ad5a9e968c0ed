"""``apq-tvm logs``: files of the tuner's records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm.cli.console import print_json, print_table, reports_errors, say
from apq_tvm.cli.options import Dim, Json, parse_dims

logs_app = typer.Typer(
    help="Merge, prune, check and show files of the tuner's records.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Files = Annotated[list[Path], typer.Argument(help="Files of records.", show_default=False)]
File = Annotated[Path, typer.Argument(help="File of records.", show_default=False)]
Target = Annotated[
    str, typer.Option(help="Device; by default that of the file's folder, or this machine.")
]


@logs_app.command("merge", epilog="Example: apq-tvm logs merge a.json b.json -o both.json")
@reports_errors
def merge_command(
    files: Files,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Write the best record of each question that the files answer."""
    from apq_tvm.tune.logs import merge

    made = merge(files, output)
    for remark in made.remarks:
        say(f"remark: {remark}")
    if json:
        print_json({"records": len(made.records), "remarks": list(made.remarks)})
    say(f"{output}: {len(made.records)} records")


@logs_app.command("prune", epilog="Example: apq-tvm logs prune mine.json --target znver5")
@reports_errors
def prune_command(file: File, target: Target = "", json: Json = False) -> None:
    """Drop records of schedules that are others today."""
    from apq_tvm.tune.logs import check_file, device_of, prune

    dropped = prune(check_file(file), target or device_of(file))
    for entry in dropped:
        say(f"dropped {entry.record.kernel} {entry.record.n}x{entry.record.k}: {entry.why}")
    if json:
        print_json({"dropped": [{**_words(e.record), "why": e.why} for e in dropped]})
    say(f"{file}: {len(dropped)} records dropped")


@logs_app.command("show", epilog="Example: apq-tvm logs show tuning_logs/znver5/records.json")
@reports_errors
def show_command(files: Files, json: Json = False) -> None:
    """List records."""
    from apq_tvm.tune.logs import read_all

    found = read_all(files)
    for remark in found.remarks:
        say(f"remark: {remark}")
    if json:
        print_json([_words(record) for record in found.records])
        return
    columns = (
        "NxK or function",
        "scheme",
        "rows",
        "threads",
        "kernel",
        "decisions",
        "ratio",
        "how",
    )
    rows = [
        (
            f"{r.n}x{r.k}" if r.n else r.kernel,
            r.scheme,
            f"{r.rows[0]}..{r.rows[1] if r.rows[1] >= 0 else ''}",
            r.threads,
            r.kernel,
            ", ".join(f"{name}={value}" for name, value in r.decisions.items()),
            f"{r.ratio:.2f} ({r.interval[0]:.2f} to {r.interval[1]:.2f})",
            r.how,
        )
        for r in found.records
    ]
    print_table(f"{len(rows)} records", columns, rows)


def _words(record: Any) -> Any:
    import json

    return json.loads(record.line())


@logs_app.command("verify", epilog="Example: apq-tvm logs verify mine.json")
@reports_errors
def verify_command(
    file: File,
    target: Target = "",
    device: Annotated[str, typer.Option(help="Where candidates run.")] = "local",
    model: Annotated[
        Path | None,
        typer.Option(help="ONNX file that records of functions are of.", show_default=False),
    ] = None,
    scheme: Annotated[str, typer.Option(help="Of the model's layers, as tuned.")] = "W4A8g32",
    dim: Dim = None,
    json: Json = False,
) -> None:
    """Check that records are still right, and still faster.

    Which function a record is of only a model tells; those of layers need none. Ends with 1 if one
    is wrong, stale, or slower than its default for sure.
    """
    from apq_tvm.schedules.devices import find_profile
    from apq_tvm.tune.api import devices_of
    from apq_tvm.tune.logs import check_file, device_of, read_all
    from apq_tvm.tune.scratch import scratch_folder
    from apq_tvm.tune.verify import functions_of, verify

    profile = find_profile(target or device_of(file))
    found = read_all([check_file(file)])
    for remark in found.remarks:
        say(f"remark: {remark}")
    sizes = parse_dims(dim or [])
    functions = functions_of(model, profile.name, scheme, sizes) if model is not None else []
    verdicts = []
    with scratch_folder() as folder:
        (where, *_) = devices_of(device, profile)
        for verdict in verify(found.records, profile, where, folder, functions):
            verdicts.append(verdict)
            if not json:
                print(_verdict_line(verdict))
    if json:
        print_json([
            {
                **{**_words(v.record), "good": v.good, "checked": v.checked, "why": v.why},
                "now": v.ratio and v.ratio.value,
            }
            for v in verdicts
        ])  # fmt: skip
    good, checked = sum(v.good for v in verdicts), sum(v.checked for v in verdicts)
    left = f"; {len(verdicts) - checked} were not checked" if checked < len(verdicts) else ""
    say(f"{good} of {checked} records are good{left}")
    if good < checked:
        say("apq-tvm logs prune drops those of other schedules; tune again for the others")
        raise typer.Exit(1)


@logs_app.command("import", epilog="Example: apq-tvm logs import h200_bundle --log h200.json")
@reports_errors
def import_command(
    bundle: Annotated[
        Path, typer.Argument(help="Folder of bench gpu --candidates.", show_default=False)
    ],
    log: Annotated[Path, typer.Option(help="File of records to add to.", show_default=False)],
    results: Annotated[
        Path | None,
        typer.Option(help="By default results.json in the bundle.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Record what a bundle found faster for sure on a GPU, if its results are right."""
    from apq_tvm.tune.gpu.results import import_results

    made = import_results(bundle, log, results)
    if json:
        print_json([
            {"case": e.case, "record": e.record and _words(e.record), "why": list(e.why)}
            for e in made
        ])  # fmt: skip
    for each in made if not json else ():
        print(f"{each.case}: {each.record.tells() if each.record else 'default'}")
        for why in each.why:
            print(f"  {why}")
    say(f"{log}: {sum(each.record is not None for each in made)} records of {len(made)} cases")


def _verdict_line(verdict: Any) -> str:
    record, ratio = verdict.record, verdict.ratio
    now = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-"
    layer = f"{record.n}x{record.k} {record.scheme} M={record.rows[0]}.. " if record.n else ""
    state = "bad " if verdict.bad else "good" if verdict.good else "left"
    return f"{state} {layer}{record.kernel}: now {now} {verdict.why}".rstrip()

"""``apq-tvm bench rank``: do static figures rank candidates as times do, on this machine?"""

from __future__ import annotations

import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apq_tvm.cli.bench import parse_counts, parse_shapes
from apq_tvm.cli.console import Bars, print_json, print_table, reports_errors, show
from apq_tvm.cli.devices import Device
from apq_tvm.cli.options import Dim, Json, parse_dims
from apq_tvm.cli.static import Mca
from apq_tvm.errors import BadInput

if TYPE_CHECKING:
    from apq_tvm.tune.functions.graph import AnyTask
    from apq_tvm.types import DeviceProfile, DimSizes


def mount(bench: typer.Typer) -> None:
    """Add the command to ``apq-tvm bench``."""
    bench.command(
        "rank",
        epilog="Example: apq-tvm bench rank --shape 1024x1024 --m 1,16 --scheme W4A8g32,nl4",
    )(rank)


@reports_errors
def rank(
    shape: Annotated[str, typer.Option(help="Comma list of NxK, outputs by inputs.")] = "1024x1024",
    m: Annotated[str, typer.Option("--m", help="Comma list of rows of activations.")] = "1,16",
    scheme: Annotated[str, typer.Option(help="Comma list of schemes.")] = "W4A8g32",
    target: Annotated[str, typer.Option(help="Device to compile for.")] = "host",
    device: Device = "local",
    candidates: Annotated[int, typer.Option(min=5, help="Of each kernel, at most.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the choice of candidates.")] = 0,
    mca: Mca = "",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Functions of this ONNX file (softmax, norms, attention) instead of layers.",
            show_default=False,
        ),
    ] = None,
    dim: Dim = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", dir_okay=False, show_default=False,
            help="static.json of the device's tuning log to write or add to.",
        ),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Compare static figures of candidates with their times: rank correlations by family.

    Static ranking is used for families above 0.6 alone, by what is in the device's tuning log.
    """
    from apq_tvm.schedules.devices import find_profile
    from apq_tvm.tune.devices import open_devices
    from apq_tvm.tune.static.compare import agreements, compare, verdict, write_log

    profile = find_profile(target)
    if profile.gpu is not None:
        raise BadInput(f"{target} is a GPU: its kernels are timed by bench gpu")
    if model is None:
        of = f"--shape {shape} --m {m} --scheme {scheme}"
        tasks = _tasks(profile, target, shape, m, scheme)
    else:
        of = f"--model {model.name}"
        tasks = _functions(model, target, scheme, parse_dims(dim or []))
    (place, *_) = opened = open_devices(device, profile)
    try:
        if not place.speed:
            raise BadInput(f"{place.name} is emulated: its times say nothing")
        groups = compare(tasks, place, most=candidates, seed=seed, mca=mca, progress=Bars())
        machine = place.describe()
    finally:
        for each in opened:
            each.close()
    families = agreements(groups)
    if output is not None:
        where = f"{machine}, {date.today().isoformat()}: bench rank {of}"
        write_log(output, where, families)
    report = {
        "target": profile.name,
        "machine": machine,
        "families": {
            name: {
                "spearman": found.spearman,
                "kendall": found.kendall,
                "points": found.points,
                "tasks": found.tasks,
                "verdict": verdict(found),
            }
            for name, found in families.items()
        },
        "groups": [group.described() for group in groups],
    }
    if json:
        print_json(report)
        return
    _show(report)


def _functions(model: Path, target: str, scheme: str, dims: DimSizes) -> list[AnyTask]:
    """What is to be tuned of a model but for its layers; it has the first of the schemes."""
    from apq_tvm.tune.verify import functions_of

    found = functions_of(model, target, scheme.split(",")[0].strip(), dims)
    if not found:
        raise BadInput(f"{model} has no function that is tuned")
    return found


def _tasks(profile: DeviceProfile, target: str, shape: str, m: str, scheme: str) -> list[AnyTask]:
    """What is to be tuned of layers of these shapes and schemes."""
    import numpy as np

    from apq_tvm import pipeline
    from apq_tvm.bench.linear import write_model
    from apq_tvm.tune.tasks import extract

    rows = parse_counts(m, "--m")
    tasks: dict[str, AnyTask] = {}
    for n, k in parse_shapes(shape):
        for word in scheme.split(","):
            with tempfile.TemporaryDirectory(prefix="apq-rank-") as folder:
                model = Path(folder) / "linear.onnx"
                weight = np.random.default_rng(n + k).standard_normal((n, k)).astype(np.float32)
                write_model(model, weight)
                plan = pipeline.plan(model, target=target, scheme=word.strip(), search=False)
            tasks |= {task.key: task for task in extract(plan, rows)}
    return list(tasks.values())


def _show(report: dict[str, Any]) -> None:
    columns = ("task", "kernel", "candidates", "spread", "Spearman", "Kendall", "its pick", "")
    print_table(
        f"{report['target']} on {report['machine']}: static figures beside times; its pick: the "
        "best time over that of the candidate with the least figure",
        columns,
        (
            (
                group["task"],
                group["kernel"],
                str(group["points"]),
                f"{group['spread']:.2f}",
                *_numbers(group, ("spearman", "kendall", "picked")),
                group["why"],
            )
            for group in report["groups"]
        ),
        right=columns[2:7],
    )
    shown = (
        "family",
        "candidates",
        "kernels and shapes",
        "Spearman",
        "Kendall",
        "static ranking",
    )
    print_table(
        "families",
        shown,
        (
            (
                name,
                str(found["points"]),
                str(found["tasks"]),
                *_numbers(found, ("spearman", "kendall")),
                found["verdict"],
            )
            for name, found in report["families"].items()
        ),
        right=shown[1:5],
    )
    if not report["families"]:
        show("no group of candidates says anything")


def _numbers(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("" if row[name] is None else f"{row[name]:.2f}" for name in names)

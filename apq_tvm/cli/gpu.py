"""``apq-tvm bench gpu``: measure kernels on a machine that has a GPU, and nothing of ours."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from apq_tvm.cli.bench import parse_counts, parse_shapes
from apq_tvm.cli.console import (
    Bars,
    megabytes,
    print_json,
    print_table,
    reports_errors,
    say,
)
from apq_tvm.cli.options import Force, Json

SHAPES = "4096x4096,11008x4096,28672x8192"
SCHEMES = "W4A8g128,W4A8g32,W8A8g128,W8A8,W2A8g128,W2A8,W1A4"


def mount(bench: typer.Typer) -> None:
    """Add the command to ``apq-tvm bench``."""
    bench.command("gpu", epilog="Example: apq-tvm bench gpu --prepare h200_bundle --target h200")(
        gpu
    )


@reports_errors
def gpu(
    prepare: Annotated[
        Path, typer.Option(help="Folder to write.", file_okay=False, show_default=False)
    ],
    target: Annotated[str, typer.Option(help="The GPU.")] = "h200",
    shape: Annotated[str, typer.Option(help="Comma list of NxK, outputs by inputs.")] = SHAPES,
    m: Annotated[str, typer.Option("--m", help="Comma list of rows of activations.")] = "1,8,32",
    scheme: Annotated[str, typer.Option(help="Comma list of schemes.")] = SCHEMES,
    candidates: Annotated[
        int,
        typer.Option(min=0, help="Of each case, decided otherwise: for apq-tvm logs import."),
    ] = 0,
    device: Annotated[
        str, typer.Option(help="Run it there too: local, or ssh://[user@]host[:port].")
    ] = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write a folder that checks and times layers where there is a GPU: python DIR/run.py.

    It needs numpy and a driver there, and torch for the rival, cuBLAS's product in float16.
    """
    from apq_tvm.bench.gpu.bundle import prepare as prepare_bundle
    from apq_tvm.bench.linear import LinearCase
    from apq_tvm.tune.gpu.candidates import searched

    search = partial(searched, most=candidates) if candidates else None
    cases = [
        LinearCase(n, k, rows, word.strip(), threads=1)
        for n, k in parse_shapes(shape)
        for word in scheme.split(",")
        for rows in parse_counts(m, "--m")
    ]
    if device:
        from apq_tvm.tune.devices.bundle import gpu_device

        gpu_device(device)
    made = prepare_bundle(
        cases, prepare, target=target, force=force, candidates=search, progress=Bars()
    )
    if device:
        from apq_tvm.tune.devices.bundle import run_bundle

        made |= {"results": run_bundle(prepare, device, on_line=say)}
    if json:
        print_json(made)
        return
    columns = ("NxK", "M", "scheme", "kernel", "least us")
    print_table(
        f"{made['target']}: {megabytes(made['bytes'])}; the time is judged by machine code",
        columns,
        (
            (
                case["shape"],
                str(case["m"]),
                case["scheme"],
                case["kernel"],
                "" if case["static_us"] is None else f"{case['static_us']:.1f}",
            )
            for case in made["cases"]
        ),
        right=("M", "least us"),
    )
    if device:
        print(f"measured on {device}: {prepare}/results.json")
    else:
        print(f"where there is a GPU: python {prepare}/run.py, or --device ssh://host")

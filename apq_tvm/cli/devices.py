"""``apq-tvm bench module``: time a compiled module here or on a device far away."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from apq_tvm.cli.bench import Batch, Dims, Inputs, Seconds, Seq, parse_dims
from apq_tvm.cli.console import Bars, print_json, print_table, reports_errors
from apq_tvm.cli.options import Json, Module

Device = Annotated[
    str,
    typer.Option(
        help="Comma list of local, ssh://[user@]host[:port], adb://serial, rpc://tracker:port/key, "
        "qemu://cpu."
    ),
]
Compiler = Annotated[str, typer.Option("--cc", help="C compiler for the device.")]
Sysroot = Annotated[str, typer.Option(help="Folder of its headers and libraries.")]


def mount(bench: typer.Typer) -> None:
    """Add the command to ``apq-tvm bench``."""
    bench.command(
        "module", epilog="Example: apq-tvm bench module minilm_arm --device ssh://pi@board"
    )(module_command)


@reports_errors
def module_command(
    module: Module,
    device: Device = "local",
    batch: Batch = 1,
    seq: Seq = 128,
    dims: Dims = "",
    inputs: Inputs = None,
    threads: Annotated[
        int, typer.Option(min=0, help="0: what the module starts with, all physical cores.")
    ] = 0,
    bits: Annotated[int, typer.Option(min=0, help="Width chosen at run time; 0: no choice.")] = 0,
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="Empty the caches before each run.")
    ] = False,
    seconds: Seconds = 4.0,
    cc: Compiler = "",
    sysroot: Sysroot = "",
    json: Json = False,
) -> None:
    """Time a compiled module on devices: this machine, or others that it was compiled for.

    Nothing has to be installed there: a static program, the weights and the inputs are copied over,
    and removed again. Several devices run at the same time. An emulator's times are not shown.
    """
    from apq_tvm.tune.devices.module_bench import Asked, bench_module

    report = bench_module(
        module,
        device,
        batch=batch,
        seq=seq,
        dims=parse_dims(dims),
        inputs=inputs,
        asked=Asked(threads, seconds, cold, bits),
        cc=cc,
        sysroot=sysroot,
        progress=Bars(),
    )
    if json:
        print_json(report)
        return
    sizes = ", ".join(f"{name}={size}" for name, size in report["dims"].items())
    columns = ("device", "machine", "cores", "threads", "us", "noise", "")
    print_table(
        f"{module}, {report['target']}, {sizes or 'fixed shapes'}: minima; caches "
        f"{'emptied' if cold else 'warm'}",
        columns,
        (_row(row) for row in report["devices"]),
        right=columns[2:6],
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    """A device's line."""
    note = row["error"]
    if row["emulated"] and not note:
        note = "emulated: it runs; times say nothing"
    if any(not output["finite"] for output in row["outputs"]):
        note = f"{note} outputs are not finite".strip()
    times = ("", "") if row["us"] is None else (f"{row['us']:.0f}", f"{row['noise']:.0%}")
    return (row["device"], row["machine"], str(row["cores"]), str(row["threads"]), *times, note)

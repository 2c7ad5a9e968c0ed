"""``apq-tvm bench static`` and ``static-model``: judge code for a device that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm.cli.bench import (
    Batch,
    Dims,
    Inputs,
    Seq,
    parse_counts,
    parse_dims,
    parse_shapes,
)
from apq_tvm.cli.compile import LayoutOption
from apq_tvm.cli.console import Bars, print_json, print_table, reports_errors
from apq_tvm.cli.options import Json, Module
from apq_tvm.errors import BadInput

Mca = Annotated[str, typer.Option(help="llvm-mca 22, if not installed by make arm-tools.")]


def mount(bench: typer.Typer) -> None:
    """Add the commands to ``apq-tvm bench``."""
    bench.command(
        "static",
        epilog="Example: apq-tvm bench static --target graviton3 --shape 4096x4096 --m 1,128 "
        "--scheme W4A8g32 --against libggml-cpu-armv8.6_1.so",
    )(static)
    bench.command(
        "static-model", epilog="Example: apq-tvm bench static-model minilm_arm --seq 128"
    )(static_model)


@reports_errors
def static(
    target: Annotated[str, typer.Option(help="64-bit Arm device, or GPU.", show_default=False)],
    shape: Annotated[str, typer.Option(help="Comma list of NxK, outputs by inputs.")] = "4096x4096",
    m: Annotated[str, typer.Option("--m", help="Comma list of rows of activations.")] = "1",
    scheme: Annotated[str, typer.Option(help="Comma list of schemes.")] = "W4A8g32",
    layout: LayoutOption = None,
    against: Annotated[
        str, typer.Option(help="Comma list of FILE[:symbol], aarch64 libraries of ggml's CPU code.")
    ] = "",
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for the judged assembly.", file_okay=False, show_default=False),
    ] = None,
    mca: Mca = "",
    json: Json = False,
) -> None:
    """Count instructions and cycles of kernels for Arm or a GPU, without either.

    Arm: instructions of a whole call under qemu; cycles by llvm-mca of every piece of code times
    how often it was executed. GPUs: machine code, what is resident and in flight, what limits it,
    and what a simulated launch asks of memory.
    """
    from apq_tvm.bench.arm.static import bench_static
    from apq_tvm.bench.gpu.static import bench_gpu_static
    from apq_tvm.bench.linear import LinearCase
    from apq_tvm.schedules.devices import find_profile

    cases = [
        LinearCase(n, k, rows, word.strip(), threads=1)
        for n, k in parse_shapes(shape)
        for word in scheme.split(",")
        for rows in parse_counts(m, "--m")
    ]
    if find_profile(target).gpu is not None:
        for word, given in (("--layout", layout), ("--against", against), ("--mca", mca)):
            if given:
                raise BadInput(f"{word} is for Arm; {target} is a GPU")
        _show_gpu(bench_gpu_static(cases, target=target, keep=keep, progress=Bars()), json)
        return
    rivals = [part for part in against.split(",") if part]
    rows = bench_static(
        cases,
        target=target,
        layout=layout or "",
        against=rivals,
        keep=keep,
        mca=mca,
        progress=Bars(),
    )
    if json:
        print_json(rows)
        return
    columns = ("NxK", "M", "scheme", "kernel", "instructions", "cycles", "MACs/cycle", "of peak",
               "hot loop", "of cycles", "preparation", "ours/it", "error")  # fmt: skip
    print_table(
        f"{rows[0]['target']}: calls under qemu; llvm-mca 22's model of {rows[0]['model']}",
        columns,
        (_static_row(row) for row in rows),
        right=tuple(c for c in columns if c not in ("NxK", "scheme", "kernel")),
    )


@reports_errors
def static_model(
    module: Module,
    batch: Batch = 1,
    seq: Seq = 128,
    dims: Dims = "",
    inputs: Inputs = None,
    bits: Annotated[int, typer.Option(min=0, help="Width chosen at run time; 0: no choice.")] = 0,
    mca: Mca = "",
    json: Json = False,
) -> None:
    """Count instructions and cycles of a whole module for Arm, without Arm.

    It runs under qemu on one thread; kernel by kernel, the most expensive first.
    """
    from apq_tvm.bench.arm.module import bench_static_module

    report = bench_static_module(
        module, batch=batch, seq=seq, dims=parse_dims(dims), inputs=inputs, bits=bits, mca=mca,
        progress=Bars(),
    )  # fmt: skip
    if json:
        print_json(report)
        return
    sizes = ", ".join(f"{name}={size}" for name, size in report["dims"].items())
    columns = ("kernel", "instructions", "cycles", "share")
    total = {"kernel": "all", "share": 1.0} | {key: report[key] for key in columns[1:3]}
    print_table(
        f"{report['target']}, {sizes or 'fixed shapes'}: one run under qemu; llvm-mca 22's model "
        f"of {report['model']}",
        columns,
        (
            (row["kernel"], str(row["instructions"]), f"{row['cycles']:.0f}", f"{row['share']:.1%}")
            for row in (total, *report["kernels"])
        ),
        right=columns[1:],
    )


def _show_gpu(rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(rows)
        return
    from apq_tvm.bench.gpu.counts import why_not

    columns = ("NxK", "M", "scheme", "kernel", "native", "instr/weight", "registers", "spills",
               "warps/SM", "in flight", "wanted", "us", "limit", "DRAM", "sectors", "waves",
               "counted")  # fmt: skip
    print_table(
        f"{rows[0]['target']}: machine code; bytes in flight of a multiprocessor; the least time; "
        "what is asked of memory, over the ideal",
        columns,
        (_gpu_row(row) for row in rows),
        right=tuple(c for c in columns if c not in ("NxK", "scheme", "kernel", "native", "limit")),
    )
    if reason := why_not():
        typer.echo(f"what is asked of memory was not counted: {reason}")


def _gpu_row(row: dict[str, Any]) -> tuple[str, ...]:
    each, flying, rows = row["instructions_per_weight"], row["bytes_in_flight"], row["simulated_m"]
    return (
        row["shape"],
        str(row["m"]),
        row["scheme"],
        row["kernel"],
        {None: "", True: "yes", False: "no"}[row["native"]],
        "" if each is None else f"{each:.3f}" + ("" if row["loop_instructions"] else " (all)"),
        str(row["registers"]),
        str(row["spills"]),
        f"{row['warps_per_sm']:.1f}",
        "" if flying is None else f"{flying:.0f}",
        f"{row['bytes_wanted']:.0f}",
        f"{row['static_us']:.1f}",
        row["limit"],
        _over(row["dram_bytes"], row["ideal_dram_bytes"]),
        _over(row["sectors"], row["ideal_sectors"]),
        _over(row["shared_waves"], row["ideal_waves"]),
        "" if rows is None else row["simulated"] + ("" if rows == row["m"] else f" M={rows}"),
    )


def _over(count: int | None, ideal: int | None) -> str:
    return f"{count / ideal:.3f}" if count and ideal else ""


def _static_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["shape"],
        str(row["m"]),
        row["scheme"],
        row["kernel"],
        str(row["instructions"]),
        f"{row['cycles']:.0f}",
        f"{row['macs_per_cycle']:.1f}",
        f"{row['peak_share']:.1%} {row['peak_instruction']}",
        f"{row['loop_instructions']} in {row['loop_cycles']:g}: {row['loop_peak_share']:.1%}",
        f"{row['loop_share']:.0%}",
        str(row["prepare_instructions"]),
        f"{row['instructions_ratio']:.2f}, {row['cycles_ratio']:.2f}" if row["object"] else "",
        f"{row['error']:.4f}",
    )

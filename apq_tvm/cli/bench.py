"""``apq-tvm bench``: time a layer or a model beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm.cli.console import Bars, megabytes, print_json, print_table, reports_errors
from apq_tvm.cli.options import Json, Module
from apq_tvm.errors import BadInput

bench_app = typer.Typer(
    help="Time layers and models beside rivals; judge kernels for Arm and GPUs without either.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: apq-tvm bench model minilm_w4 --against model.onnx",
)

Batch = Annotated[int, typer.Option(min=1, help="Size of a batch dimension.")]
Seq = Annotated[int, typer.Option(min=1, help="Size of a sequence dimension.")]
Dims = Annotated[str, typer.Option(help="Comma list of NAME=SIZE for other symbolic dimensions.")]
Inputs = Annotated[
    Path | None, typer.Option(help="npz of inputs instead of made-up ones.", show_default=False)
]
Seconds = Annotated[float, typer.Option(min=0.0, help="Time to spend on each comparison.")]


def parse_counts(text: str, option: str) -> list[int]:
    """Read a comma list of positive integers.

    Raises
    ------
    BadInput
        A part is no positive integer; the message names the option.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise BadInput(f"{option} {text!r} is not a comma list of positive integers, such as 1,4")
    return counts


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """Read a comma list of NxK, output channels by input channels.

    Raises
    ------
    BadInput
        A part is not two positive integers with an x between them.
    """
    shapes = []
    for part in text.split(","):
        sizes = part.strip().lower().split("x")
        if len(sizes) != 2 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            raise BadInput(f"--shape {part!r} is not NxK (outputs by inputs), such as 4096x4096")
        shapes.append((int(sizes[0]), int(sizes[1])))
    return shapes


def parse_dims(text: str) -> dict[str, int]:
    """Read a comma list of NAME=SIZE.

    Raises
    ------
    BadInput
        A part is not a name, ``=`` and a positive integer.
    """
    dims = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, size = part.rpartition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise BadInput(f"--dims {part!r} is not NAME=SIZE, such as batch_size=8")
        dims[name] = int(size)
    return dims


@bench_app.command(
    "linear",
    epilog="Example: apq-tvm bench linear --shape 4096x4096,11008x4096 --m 1,4,128 "
    "--scheme W4A8g32 --threads 1,2 --against onnxruntime",
)
@reports_errors
def linear(
    shape: Annotated[str, typer.Option(help="Comma list of NxK, outputs by inputs.")] = "4096x4096",
    m: Annotated[str, typer.Option("--m", help="Comma list of rows of activations.")] = "1",
    scheme: Annotated[str, typer.Option(help="Comma list of schemes.")] = "W4A8g32",
    threads: Annotated[str, typer.Option(help="Comma list of thread counts.")] = "1",
    against: Annotated[
        str, typer.Option(help="Comma list: onnxruntime, onnxruntime-all, ort-w4-b32 and others.")
    ] = "onnxruntime",
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="Weights out of cache, as in a real model.")
    ] = True,
    target: Annotated[str, typer.Option(help="Device to compile for.")] = "host",
    device: Annotated[
        str,
        typer.Option(help="Where to run, as in bench module; alone, without rivals."),
    ] = "",
    seconds: Seconds = 4.0,
    json: Json = False,
) -> None:
    """Time one linear layer beside rivals.

    Ours and ONNX Runtime's take turns in one process; minima of many repeats.
    """
    from apq_tvm.bench.linear import LinearCase, bench_linear

    cases = [
        LinearCase(n, k, rows, word.strip(), count, cold)
        for n, k in parse_shapes(shape)
        for word in scheme.split(",")
        for count in parse_counts(threads, "--threads")
        for rows in parse_counts(m, "--m")
    ]
    if device:
        from apq_tvm.cli.layers import layers_on_devices

        layers_on_devices(cases, device, target, seconds, json)
        return
    rows = bench_linear(cases, against, target=target, budget_s=seconds, progress=Bars())
    if json:
        print_json(rows)
        return
    columns = ("NxK", "M", "threads", "scheme", "us", "GMAC/s", "of limit", "error", "rival",
               "rival us", "rival error", "ratio", "noise")  # fmt: skip
    print_table(
        f"{'weights out of cache' if cold else 'weights in cache'}; minima; "
        "error: mean, relative to the result's root mean square",
        columns,
        (_linear_row(row) for row in rows),
        right=tuple(c for c in columns if c not in ("NxK", "scheme", "rival")),
    )


def _linear_row(row: dict[str, Any]) -> tuple[str, ...]:
    saturates = " saturates" if row["rival_saturates"] else ""
    return (
        row["shape"],
        str(row["m"]),
        str(row["threads"]),
        row["scheme"],
        f"{row['us']:.1f}",
        f"{row['gmacs']:.1f}",
        f"{row['limit_share']:.0%} {row['limit']}",
        f"{row['error']:.4f}",
        row["rival"].removeprefix("onnxruntime "),
        f"{row['rival_us']:.1f}",
        f"{row['rival_error']:.4f}{saturates}",
        f"{row['ratio']:.2f}",
        f"{row['noise']:.0%}",
    )


@bench_app.command(
    "model",
    epilog="Example: apq-tvm bench model minilm_w4 --against model.onnx --batch 8 --seq 64 "
    "--threads 2",
)
@reports_errors
def model(
    module: Module,
    against: Annotated[
        Path,
        typer.Option(help="The float ONNX model, or another compiled module.", show_default=False),
    ],
    batch: Batch = 1,
    seq: Seq = 128,
    dims: Dims = "",
    inputs: Inputs = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: all physical cores.", show_default=False)
    ] = None,
    bits: Annotated[
        str, typer.Option(help="Comma list of widths to time too, chosen at run time.")
    ] = "",
    seconds: Seconds = 8.0,
    json: Json = False,
) -> None:
    """Time a whole module beside rivals.

    ONNX Runtime runs the float model and its own dynamic int8 quantization of it, OpenVINO (if
    installed) the float model, in turns with the module in one process; minima of many repeats.
    Another module runs likewise: how much faster is one that was compiled by records?
    """
    from apq_tvm.bench.model import bench_model

    report = bench_model(
        module,
        against,
        batch=batch,
        seq=seq,
        dims=parse_dims(dims),
        inputs=inputs,
        threads=threads,
        bits=parse_counts(bits, "--bits") if bits else (),
        budget_s=seconds,
        progress=Bars(),
    )
    if json:
        print_json(report)
        return
    us = report["us"]
    sizes = ", ".join(f"{name}={size}" for name, size in report["dims"].items())
    rows = [(str(module), f"{us:.0f}", "1.00", f"{report['noise']:.0%}")]
    rows += [
        (f"  at {width} bits", f"{time:.0f}", f"{time / us:.2f}", "")
        for width, time in report["bits"].items()
    ]
    rows += [
        (name, f"{time:.0f}", f"{time / us:.2f}", f"{report['rival_noise'][name]:.0%}")
        for name, time in report["rivals"].items()
    ]
    columns = ("what", "us", "times ours", "noise")
    title = f"{sizes or 'fixed shapes'}; {report['threads']} threads; minima"
    print_table(title, columns, rows, right=columns[1:])
    print(f"ratio to the fastest rival: {report['ratio']:.2f}")
    for reason in report["refused"].values():
        print(reason)
    memory = report["memory"]
    print(
        f"peak memory of a run over import: {megabytes(memory['peak_rss_bytes'])}; "
        f"weights {megabytes(memory['weight_bytes'])}, working memory {memory['overhead']:.2f} "
        f"times the {megabytes(memory['live'])} that are alive at once"
    )

"""The command ``apq-tvm``: thin commands over the Python API.

Results go to standard output, everything else to standard error. ``--json`` makes the result one
JSON document. Heavy imports happen inside the commands, so that ``--help`` is instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm import __version__
from apq_tvm.cli.bench import bench_app
from apq_tvm.cli.calibrate import calibrate_command
from apq_tvm.cli.codebooks import codebooks_command
from apq_tvm.cli.compile import compile_command, print_kernels
from apq_tvm.cli.console import (
    describe_shape,
    megabytes,
    print_json,
    print_table,
    reports_errors,
    show,
)
from apq_tvm.cli.devices import mount as mount_devices
from apq_tvm.cli.eval import mount
from apq_tvm.cli.generate import mount as mount_generate
from apq_tvm.cli.gpu import mount as mount_gpu
from apq_tvm.cli.logs import logs_app
from apq_tvm.cli.options import Json, Module
from apq_tvm.cli.profile import mount as mount_profile
from apq_tvm.cli.rank import mount as mount_rank
from apq_tvm.cli.static import mount as mount_static
from apq_tvm.cli.tune import tune_command
from apq_tvm.module import damaged
from apq_tvm.signals import unwind_on_signals

app = typer.Typer(
    name="apq-tvm",
    help="Compile ONNX models into small quantized modules for one device.",
    epilog="Example: apq-tvm compile model.onnx -o minilm_w4 --scheme W4A8g32",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
mount_static(bench_app)
mount_gpu(bench_app)
mount_devices(bench_app)
mount_rank(bench_app)
mount_profile(bench_app)
mount_generate(bench_app)
app.add_typer(bench_app, name="bench")
app.command(
    "compile",
    epilog="Example: apq-tvm compile model.onnx -o minilm_w4 --target host --scheme W4A8g32 "
    "--tensor-type 'embeddings=W8A8'",
)(compile_command)
app.command(
    "calibrate",
    epilog="Example: apq-tvm calibrate model.onnx --inputs data.npz -o calib.safetensors",
)(calibrate_command)
app.command("codebooks", epilog="Example: apq-tvm codebooks model.onnx -o books.safetensors")(
    codebooks_command
)
mount(app)
app.add_typer(logs_app, name="logs")
app.command(
    "tune", epilog="Example: apq-tvm tune model.onnx --scheme W4A8g32 --m 1,128 --minutes 20"
)(tune_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"apq-tvm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile ONNX models into small quantized modules for one device."""


@app.command(epilog="Example: apq-tvm inspect minilm_w4")
@reports_errors
def inspect(module: Module, json: Json = False) -> None:
    """Show what a module consists of.

    Layers, kernels and why faster ones were turned down, bytes and bits per weight.
    """
    from apq_tvm import inspect as inspector

    report = inspector.inspect(module)
    if json:
        print_json(report)
        return
    with damaged(module):
        _show_module(module, report)


def _show_module(module: Path, report: Mapping[str, Any]) -> None:
    """What `inspect` found, as tables."""
    from apq_tvm import inspect as inspector

    layers = report["layers"]
    show(f"{module}: target {report['target']}")
    show(f"inputs:  {describe_shape(report['inputs'])}")
    show(f"outputs: {describe_shape(report['outputs'])}")
    for source, count in inspector.code_sources(layers).items():
        show(f"codes:   {count} of {len(layers)} layers have the {source}")
    show("")
    print_table("layers", inspector.LAYER_COLUMNS, inspector.layer_rows(layers))
    print_kernels(report)
    rejected = inspector.by_reason(r for layer in layers for r in layer["rejected"])
    if rejected:
        lines = ((inspector.shorten(names), reason) for reason, names in rejected.items())
        print_table("turned down (all names: --json)", ("kernels", "reason"), lines)
    rows = inspector.schedule_rows(report["functions"])
    if rows:
        print_table("other functions", ("function", "scheduled by"), rows)
    print_table("files", ("file", "bytes"), report["files"].items(), right=("bytes",))
    print(
        f"{inspector.bits_line(report)} in {len(layers)} layers, "
        f"package {megabytes(report['package_bytes'])}"
    )


@app.command(epilog="Example: apq-tvm targets --json")
@reports_errors
def targets(json: Json = False) -> None:
    """List the devices to compile for."""
    from apq_tvm.cli.listing import list_targets

    report = list_targets()
    if json:
        print_json(report)
        return
    columns = ("target", "cores", "vector bits", "L1 kB", "L2 kB", "features")
    print_table(
        f"host is {report['host']}",
        columns,
        (
            (
                t["name"],
                t["cores"],
                t["vector_bytes"] * 8,
                t["l1_bytes"] // 1024,
                t["l2_bytes"] // 1024,
                "any of " + ", ".join(t["variants"]) if t["variants"] else " ".join(t["features"]),
            )
            for t in report["targets"]
        ),
        right=columns[1:5],
    )


@app.command(epilog="Example: apq-tvm formats")
@reports_errors
def formats(json: Json = False) -> None:
    """List weight formats and scheme strings."""
    from apq_tvm.cli.listing import list_formats

    report = list_formats()
    if json:
        print_json(report)
        return
    groups = report["group_sizes"]
    print_table(
        "bits per weight, scales and zero points included, by group size",
        ("format", "zero points", *(f"g{g}" for g in groups)),
        (
            (f["name"], "yes" if f["zero_points"] else "no", *f["bits_per_weight"].values())
            for f in report["formats"]
        ),
        right=tuple(f"g{g}" for g in groups),
    )
    families = report["families"]
    print_table(
        "families; float keeps a layer as it is",
        ("spelling and meaning", "for example"),
        ((f["grammar"], ", ".join(f["examples"])) for f in families),
    )


@app.command(epilog="Example: apq-tvm explain minilm_w4 --layer 'attention.*query'")
@reports_errors
def explain(
    module: Module,
    layer: Annotated[
        str | None, typer.Option(help="Regular expression on layer names.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Say why every layer got its kernels.

    And why others were turned down.
    """
    from apq_tvm.explain import explain as explain_module
    from apq_tvm.explain import explanation_lines

    report = explain_module(module, layer)
    if json:
        print_json(report)
        return
    show("\n".join(explanation_lines(report)))


def main() -> None:
    """Entry point of the ``apq-tvm`` command."""
    unwind_on_signals()
    app()

"""The command ``apq-tvm``: thin commands over the Python API.

Results go to standard output, everything else to standard error. ``--json`` makes the result one
JSON document. Heavy imports happen inside the commands, so that ``--help`` is instant.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm import __version__
from apq_tvm.cli_bench import bench_app
from apq_tvm.cli_calibrate import calibrate_command
from apq_tvm.cli_codebooks import codebooks_command
from apq_tvm.cli_eval import mount
from apq_tvm.console import (
    Bars,
    describe_shape,
    megabytes,
    print_json,
    print_table,
    reports_errors,
    stderr,
)
from apq_tvm.errors import BadScheme

app = typer.Typer(
    name="apq-tvm",
    help="Compile ONNX models into small quantized modules for one device.",
    epilog="Example: apq-tvm compile model.onnx -o minilm_w4 --scheme W4A8g32",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")
app.command(
    "calibrate",
    epilog="Example: apq-tvm calibrate model.onnx --inputs data.npz -o calib.safetensors",
)(calibrate_command)
app.command("codebooks", epilog="Example: apq-tvm codebooks model.onnx -o books.safetensors")(
    codebooks_command
)
mount(app)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Module = Annotated[Path, typer.Argument(help="Folder of a compiled module.", show_default=False)]


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


def parse_tensor_types(words: list[str]) -> dict[str, str]:
    """Read repeated ``--tensor-type REGEX=SCHEME``; the scheme stands after the last ``=``.

    Raises
    ------
    BadScheme
        A word has no ``=`` or nothing on one side of it.
    """
    types = {}
    for word in words:
        pattern, equals, scheme = word.rpartition("=")
        if not equals or not pattern or not scheme:
            raise BadScheme(
                f"--tensor-type {word!r} is not REGEX=SCHEME, such as 'attention.*=W8A8' "
                "or 'classifier=float'"
            )
        types[pattern] = scheme
    return types


@app.command(
    epilog="Example: apq-tvm compile model.onnx -o minilm_w4 --target host --scheme W4A8g32 "
    "--tensor-type 'embeddings=W8A8'"
)
@reports_errors
def compile(
    model: Annotated[Path, typer.Argument(help="ONNX file.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)
    ] = None,
    target: Annotated[str, typer.Option(help="Device, see: apq-tvm targets.")] = "host",
    scheme: Annotated[str, typer.Option(help="Of every layer, see: apq-tvm formats.")] = "W4A8g32",
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=SCHEME", help="Scheme of some layers; may be repeated."),
    ] = None,
    search: Annotated[
        bool, typer.Option(help="Search scales for least error, or only round from the maximum.")
    ] = True,
    calibration: Annotated[
        Path | None,
        typer.Option(help="File of apq-tvm calibrate: importance of weights.", show_default=False),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="rtn, gptq, awq, smoothquant, awq+gptq, smoothquant+gptq or learned; see "
            "--calibration."
        ),
    ] = "rtn",
    target_bpw: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Choose every layer's scheme: bits per weight.", show_default=False
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(metavar="SCHEME", help="Choice for --target-bpw; may be repeated."),
    ] = None,
    codebooks: Annotated[
        Path | None,
        typer.Option(help="File of apq-tvm codebooks, for cb2 to cb4.", show_default=False),
    ] = None,
    triple: Annotated[
        str | None,
        typer.Option(
            help="System to compile for, such as aarch64-linux-android24.", show_default=False
        ),
    ] = None,
    cc: Annotated[
        str | None, typer.Option(help="C compiler for the target.", show_default=False)
    ] = None,
    sysroot: Annotated[
        str | None,
        typer.Option(help="Folder of the target's headers and libraries.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Choose formats and kernels, write nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile an ONNX model into a module folder.

    The folder is a Python package and an embeddable C library in one.
    """
    from apq_tvm import pipeline
    from apq_tvm.quantizers.guided import Guidance

    types = parse_tensor_types(tensor_type or [])
    guidance = Guidance(calibration, method, target_bpw, tuple(candidate or ()), codebooks)
    if dry_run:
        plan = pipeline.plan(
            model,
            target=target,
            scheme=scheme,
            tensor_types=types,
            search=search,
            guidance=guidance,
            triple=triple or "",
            progress=Bars(),
        )
        _report_plan(plan, json)
        return
    if output is None:
        raise typer.BadParameter("say where to write", param_hint="--output")
    started = time.perf_counter()
    result = pipeline.compile(
        model,
        output,
        target=target,
        scheme=scheme,
        tensor_types=types,
        force=force,
        search=search,
        guidance=guidance,
        triple=triple or "",
        cc=cc or "",
        sysroot=sysroot or "",
        progress=Bars(),
    )
    from apq_tvm.inspect import inspect as describe

    report = describe(result.path)
    if json:
        print_json(report)
        return
    share = report["package_bytes"] / max(model.stat().st_size, 1)
    stderr().print(
        f"{result.path}: {megabytes(report['package_bytes'])} ({share:.0%} of the ONNX file), "
        f"{report['bits_per_weight']} bits per weight, "
        f"{time.perf_counter() - started:.1f} s",
        markup=False,
    )


def _report_plan(plan: Any, json: bool) -> None:
    """Print what ``--dry-run`` found: the layers as the manifest would list them."""
    from apq_tvm.inspect import LAYER_COLUMNS, bits_per_weight, layer_rows
    from apq_tvm.manifest import describe_layers, describe_variants

    layers = describe_layers(plan)
    report = {
        "dry_run": True,
        "target": plan.profile.name,
        "bits_per_weight": bits_per_weight(layers),
        "layers": layers,
        **describe_variants(plan),
    }
    if json:
        print_json(report)
        return
    print_table(f"plan for {plan.profile.name}", LAYER_COLUMNS, layer_rows(layers))
    _print_kernels(report)
    print(f"{report['bits_per_weight']} bits per weight; nothing was written")


def _print_kernels(report: Mapping[str, Any]) -> None:
    """One table, or one per device where the library chooses between several."""
    from apq_tvm.inspect import devices, kernel_rows

    for target, layers in devices(report):
        title = f"kernels on {target}" if "variants" in report else "kernels"
        print_table(title, ("", "rows and kernel"), kernel_rows(layers))


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
    layers = report["layers"]
    print(f"{module}: target {report['target']}")
    print(f"inputs:  {describe_shape(report['inputs'])}")
    print(f"outputs: {describe_shape(report['outputs'])}\n")
    print_table("layers", inspector.LAYER_COLUMNS, inspector.layer_rows(layers))
    _print_kernels(report)
    rejected = inspector.by_reason(r for layer in layers for r in layer["rejected"])
    if rejected:
        lines = ((inspector.shorten(names), reason) for reason, names in rejected.items())
        print_table("turned down (all names: --json)", ("kernels", "reason"), lines)
    rows = inspector.schedule_rows(report["functions"])
    if rows:
        print_table("other functions", ("function", "scheduled by"), rows)
    print_table("files", ("file", "bytes"), report["files"].items(), right=("bytes",))
    print(
        f"{report['bits_per_weight']} bits per weight in {len(layers)} layers, "
        f"package {megabytes(report['package_bytes'])}"
    )


@app.command(epilog="Example: apq-tvm targets --json")
@reports_errors
def targets(json: Json = False) -> None:
    """List the devices to compile for."""
    from apq_tvm.listing import list_targets

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
    from apq_tvm.listing import list_formats

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
    print("\n".join(explanation_lines(report)))


def main() -> None:
    """Entry point of the ``apq-tvm`` command."""
    app()

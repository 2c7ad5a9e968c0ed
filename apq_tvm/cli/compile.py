"""``apq-tvm compile``: an ONNX model becomes a module folder, or only a plan of one."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm.cli.console import Bars, megabytes, print_json, print_table, reports_errors, say
from apq_tvm.cli.measured import check_measurable, measure, measured_line, say_remarks
from apq_tvm.cli.options import (
    Candidate,
    Codes,
    Dim,
    Force,
    Json,
    Model,
    Sequential,
    TargetBpw,
    TensorType,
    parse_dims,
    parse_tensor_types,
)

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)
]
Target = Annotated[str, typer.Option(help="Device, see: apq-tvm targets.")]
SchemeOption = Annotated[str, typer.Option(help="Of every layer, see: apq-tvm formats.")]
Search = Annotated[
    bool, typer.Option(help="Search scales for least error, or only round from the maximum.")
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="File of apq-tvm calibrate: importance of weights.", show_default=False),
]
MethodOption = Annotated[
    str,
    typer.Option(
        help="rtn, gptq, awq, smoothquant, awq+gptq, smoothquant+gptq or learned; see "
        "--calibration."
    ),
]
Codebooks = Annotated[
    Path | None,
    typer.Option(help="File of apq-tvm codebooks, for cb2 to cb4.", show_default=False),
]
Triple = Annotated[
    str | None,
    typer.Option(
        help="System to compile for, such as aarch64-linux-android24.", show_default=False
    ),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(
        help="Of integer weights on 64-bit Arm: 4x4, 4x8 or 8x8; by default as measured.",
        show_default=False,
    ),
]
CacheOption = Annotated[
    str, typer.Option("--kv", help="Of a decoder's keys and values: f32, f16, i8, i4.")
]
Compiler = Annotated[
    str | None, typer.Option(help="C compiler for the target.", show_default=False)
]
Sysroot = Annotated[
    str | None,
    typer.Option(help="Folder of the target's headers and libraries.", show_default=False),
]
LogOption = Annotated[
    Path | None,
    typer.Option(
        "--log", help="Records of apq-tvm tune, before those of the device.", show_default=False
    ),
]
NoLog = Annotated[bool, typer.Option("--no-log", help="Without the device's records of the tuner.")]
InputsOption = Annotated[
    Path | None,
    typer.Option(
        help="npz of inputs: measure how close the module comes to the float model.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Choose formats and kernels, write nothing.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say how long each stage took, and its memory.")
]


@reports_errors
def compile_command(
    model: Model,
    output: Output = None,
    target: Target = "host",
    scheme: SchemeOption = "W4A8g32",
    tensor_type: TensorType = None,
    dim: Dim = None,
    search: Search = True,
    calibration: CalibrationOption = None,
    method: MethodOption = "rtn",
    sequential: Sequential = None,
    target_bpw: TargetBpw = None,
    candidate: Candidate = None,
    codebooks: Codebooks = None,
    codes: Codes = None,
    triple: Triple = None,
    layout: LayoutOption = None,
    kv: CacheOption = "f32",
    cc: Compiler = None,
    sysroot: Sysroot = None,
    inputs: InputsOption = None,
    log: LogOption = None,
    no_log: NoLog = False,
    force: Force = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Compile an ONNX model into a module folder.

    The folder is a Python package and an embeddable C library in one.
    """
    from apq_tvm import pipeline
    from apq_tvm.quantizers.guided import Guidance

    types, dims = parse_tensor_types(tensor_type or []), parse_dims(dim or [])
    guidance = Guidance(
        calibration, method, target_bpw, tuple(candidate or ()), codebooks, codes, sequential
    )
    planned: dict[str, Any] = {
        **{"target": target, "scheme": scheme, "tensor_types": types, "dims": dims},
        **{"search": search, "guidance": guidance, "kv": kv},
        **{"triple": triple or "", "layout": layout or ""},
        **{"log": log, "shipped_logs": not no_log, "progress": Bars()},
    }
    if dry_run:
        if inputs is not None:
            raise typer.BadParameter(
                "measures a module, and --dry-run makes none", param_hint="--inputs"
            )
        _report_plan(pipeline.plan(model, **planned), json, codes)
        return
    if output is None:
        raise typer.BadParameter("say where to write", param_hint="--output")
    if inputs is not None:
        check_measurable(inputs, target, triple or "")
    started = time.perf_counter()
    result = pipeline.compile(
        model, output, force=force, cc=cc or "", sysroot=sysroot or "", **planned
    )
    if verbose:
        _say_timings(result.manifest["timings"])
    _report_module(result, model, inputs, codes, json, time.perf_counter() - started)


def _report_module(
    result: Any, model: Path, inputs: Path | None, codes: Path | None, json: bool, seconds: float
) -> None:
    """Print what came of it: one line, what should be known of layers, what was measured."""
    from apq_tvm.inspect import bits_line
    from apq_tvm.inspect import inspect as describe
    from apq_tvm.onnx_import.external import stored_bytes

    report = describe(result.path)
    layers = report["layers"]
    if inputs is not None:
        report["measured"] = measure(result.path, model, inputs, layers)
    if json:
        print_json(report)
        return
    say_remarks(layers, codes)
    for remark in report.get("tuning", {}).get("remarks", ()):
        say(f"remark: {remark}")
    share = report["package_bytes"] / max(stored_bytes(model), 1)
    say(
        f"{result.path}: {megabytes(report['package_bytes'])} ({share:.0%} of the ONNX model), "
        f"{bits_line(report)}, {seconds:.1f} s"
    )
    if inputs is not None:
        say(measured_line(report["measured"]))


def _say_timings(timings: Mapping[str, float]) -> None:
    """A line per stage, those of `emit` indented, and the most memory this process had."""
    for stage, seconds in timings.items():
        whole, _, step = stage.partition(".")
        say(f"{'  ' + step if step else whole:<12}{seconds:8.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    say(f"{'memory':<12}{peak / 1024:8.0f} MB at most")


def _report_plan(plan: Any, json: bool, codes: Path | None) -> None:
    """Print what ``--dry-run`` found: the layers as the manifest would list them."""
    from apq_tvm.inspect import LAYER_COLUMNS, bits_line, layer_rows, stored_bits
    from apq_tvm.manifest import describe_layers, describe_stored, describe_variants

    layers, stored = describe_layers(plan), describe_stored(plan.quantized)
    report = {
        "dry_run": True,
        "target": plan.profile.name,
        **stored_bits({"stored": stored}),
        "stored": stored,
        "layers": layers,
        **describe_variants(plan),
    }
    if json:
        print_json(report)
        return
    print_table(f"plan for {plan.profile.name}", LAYER_COLUMNS, layer_rows(layers))
    print_kernels(report)
    say_remarks(layers, codes)
    print(f"{bits_line(report)}; nothing was written")


def print_kernels(report: Mapping[str, Any]) -> None:
    """One table, or one per device where the library chooses between several."""
    from apq_tvm.inspect import devices, kernel_rows

    for target, layers in devices(report):
        title = f"kernels on {target}" if "variants" in report else "kernels"
        print_table(title, ("", "rows and kernel"), kernel_rows(layers))

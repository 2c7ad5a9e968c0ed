"""``apq-tvm calibrate``: statistics of a model's layers on data, and what is learned from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from apq_tvm.cli.console import Bars, print_json, reports_errors, say
from apq_tvm.cli.options import (
    Candidate,
    Dim,
    Force,
    Inputs,
    Json,
    Model,
    OutputFile,
    TargetBpw,
    TensorType,
    parse_dims,
    parse_tensor_types,
)

Nsamples = Annotated[
    int | None,
    typer.Option(min=1, help="Batch entries to use; by default 128, or all there are."),
]
Hessian = Annotated[bool, typer.Option(help="Keep E[x xT] of every layer, for --method gptq.")]
Fisher = Annotated[
    bool, typer.Option("--fisher", help="Keep Fisher information of the next-token loss.")
]
Weigh = Annotated[bool, typer.Option(help="Weigh rows by how much the result depends on them.")]
Learn = Annotated[
    str | None,
    typer.Option(
        help="Learn codes for --scheme: abq, finetune or train block by block, or of the whole "
        "model towards the float model's result: distill its scales, qat its codes as well.",
        show_default=False,
    ),
]
LearnedScheme = Annotated[str | None, typer.Option(help="What --learn learns.", show_default=False)]
Method = Annotated[
    str,
    typer.Option(help="What learning starts from: rtn or gptq; distill and qat: any of compile's."),
]
Known = Annotated[
    Path | None,
    typer.Option(
        "--statistics",
        help="A calibration file of this model: --learn measures nothing anew.",
        show_default=False,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Passes over the data; by default 2, 4 of qat, 8 of train, and of abq 10 or as many "
        "as make 300 steps per block. Fewer are faster and worse.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(min=1e-6, help="Rate of scales of distill and qat; by default 0.001, relative."),
]
Caches = Annotated[
    str,
    typer.Option("--kv", help="i8, i4: balance queries and keys for sessions with such caches."),
]
Rows = Annotated[int, typer.Option(min=1, help="Batch entries per call, and per step of --learn.")]


def _check_learning(learn: str | None, scheme: str | None, known: Path | None, kv: str) -> None:
    if (learn is None) != (scheme is None):
        raise typer.BadParameter("--learn and --scheme go together", param_hint="--learn")
    if known is not None and learn is None:
        raise typer.BadParameter("--statistics goes with --learn", param_hint="--statistics")
    if known is not None and kv != "f32":
        raise typer.BadParameter(
            "the file of --statistics says what is balanced", param_hint="--kv"
        )


@reports_errors
def calibrate_command(
    model: Model,
    inputs: Inputs,
    output: OutputFile,
    nsamples: Nsamples = None,
    hessian: Hessian = True,
    fisher: Fisher = False,
    weigh: Weigh = True,
    learn: Learn = None,
    scheme: LearnedScheme = None,
    tensor_type: TensorType = None,
    dim: Dim = None,
    method: Method = "rtn",
    target_bpw: TargetBpw = None,
    candidate: Candidate = None,
    known: Known = None,
    epochs: Epochs = None,
    rate: Rate = None,
    rows: Rows = 4,
    kv: Caches = "f32",
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure what a model's layers read.

    The file serves compile --calibration. An interrupted run goes on where it stopped.
    """
    from apq_tvm.calibrate import calibrate, check_output, known_statistics
    from apq_tvm.extras import require
    from apq_tvm.learn import learn_codes

    _check_learning(learn, scheme, known, kv)
    if target_bpw is not None and learn is None:
        raise typer.BadParameter("--target-bpw goes with --learn", param_hint="--target-bpw")
    if candidate and target_bpw is None:
        raise typer.BadParameter("--candidate goes with --target-bpw", param_hint="--candidate")
    dims = parse_dims(dim or [])
    check_output(output, force)
    require("torch")
    progress = Bars()
    # What learning starts from lies beside the output until learning is done.
    statistics = output if learn is None else output.with_name(f"{output.name}.statistics")
    report = (
        known_statistics(model, known, dims)
        if known is not None
        else calibrate(
            model, inputs, statistics, nsamples=nsamples, hessian=hessian, fisher=fisher,
            weigh=weigh, rows=rows, force=force, reuse=learn is not None, dims=dims, kv=kv,
            progress=progress,
        )
    )  # fmt: skip
    if learn is not None and scheme is not None:
        report |= learn_codes(
            model, inputs, known or statistics, output, kind=learn, scheme=scheme,
            tensor_types=parse_tensor_types(tensor_type or []), dims=dims, method=method,
            target_bpw=target_bpw, candidates=candidate or (), nsamples=nsamples, epochs=epochs,
            rate=rate, rows=rows, progress=progress,
        )  # fmt: skip
        if known is None:
            statistics.unlink()
    if json:
        print_json(report)
    else:
        _print_summary(output, report)


def _print_summary(output: Path, report: Mapping[str, Any]) -> None:
    if "learned" in report:
        where = " on data kept apart" if report["judged_apart"] else ""
        for block, (before, after) in report["kept_apart"].items():
            alpha = report["alphas"].get(block)
            balance = "" if alpha is None else f", balance from alpha {alpha:g}"
            say(f"{block}: loss{where} {before:.4f}, learned {after:.4f}{balance}")
        say(
            f"learned {report['learned']} layers as {report['scheme']} in "
            f"{report['learn_seconds']} s; use them with compile --method learned"
        )
    for attention, text in report.get("caches", {}).items():
        say(f"{attention}: {text}")
    say(
        f"{output}: {report['layers']} layers on {report['samples']} samples, {report['rows']} "
        f"rows; sensitivity: {report['sensitivity']}; {report['seconds']} s"
    )

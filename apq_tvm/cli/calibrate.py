"""``apq-tvm calibrate``: statistics of a model's layers on data, and what is learned from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apq_tvm.cli.console import Bars, print_json, reports_errors, say


@reports_errors
def calibrate_command(
    model: Annotated[Path, typer.Argument(help="ONNX file.", show_default=False)],
    inputs: Annotated[
        Path, typer.Option(help="npz of arrays by input name, batch first.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="safetensors file to write.", show_default=False)
    ],
    nsamples: Annotated[
        int | None,
        typer.Option(min=1, help="Batch entries to use; by default 128, or all there are."),
    ] = None,
    hessian: Annotated[
        bool, typer.Option(help="Keep E[x xT] of every layer, for --method gptq.")
    ] = True,
    fisher: Annotated[
        bool, typer.Option("--fisher", help="Keep Fisher information of the next-token loss.")
    ] = False,
    weigh: Annotated[
        bool, typer.Option(help="Weigh rows by how much the result depends on them.")
    ] = True,
    learn: Annotated[
        str | None,
        typer.Option(
            help="Learn codes for --scheme: abq or finetune block by block, or distill: tune "
            "scales of the whole model to the float model's result.",
            show_default=False,
        ),
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="What --learn learns.", show_default=False)
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=SCHEME", help="Scheme of some layers; may be repeated."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="What learning starts from: rtn or gptq; distill: any of compile's."),
    ] = "rtn",
    known: Annotated[
        Path | None,
        typer.Option(
            "--statistics",
            help="A calibration file of this model: --learn measures nothing anew.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Passes over the data; by default 2, or 10 of abq."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Learning rate of distill; by default 0.001, relative."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Batch entries per call, and per step of --learn.")
    ] = 4,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Measure what a model's layers read.

    The file serves compile --calibration. An interrupted run goes on where it stopped.
    """
    from apq_tvm.calibrate import calibrate, check_output, known_statistics
    from apq_tvm.cli.compile import parse_tensor_types
    from apq_tvm.extras import require
    from apq_tvm.learn import learn_codes

    if (learn is None) != (scheme is None):
        raise typer.BadParameter("--learn and --scheme go together", param_hint="--learn")
    if known is not None and learn is None:
        raise typer.BadParameter("--statistics goes with --learn", param_hint="--statistics")
    check_output(output, force)
    require("torch")
    progress = Bars()
    # What learning starts from lies beside the output until learning is done.
    statistics = output if learn is None else output.with_name(f"{output.name}.statistics")
    report = (
        known_statistics(model, known)
        if known is not None
        else calibrate(
            model,
            inputs,
            statistics,
            nsamples=nsamples,
            hessian=hessian,
            fisher=fisher,
            weigh=weigh,
            rows=rows,
            force=force,
            reuse=learn is not None,
            progress=progress,
        )
    )
    if learn is not None and scheme is not None:
        report |= learn_codes(
            model,
            inputs,
            known or statistics,
            output,
            kind=learn,
            scheme=scheme,
            tensor_types=parse_tensor_types(tensor_type or []),
            method=method,
            nsamples=nsamples,
            epochs=epochs,
            rate=rate,
            rows=rows,
            progress=progress,
        )
        if known is None:
            statistics.unlink()
    if json:
        print_json(report)
        return
    if learn is not None:
        say(
            f"learned {report['learned']} layers as {scheme} in {report['learn_seconds']} s; "
            "use them with compile --method learned"
        )
    say(
        f"{output}: {report['layers']} layers on {report['samples']} samples, {report['rows']} "
        f"rows; sensitivity: {report['sensitivity']}; {report['seconds']} s"
    )

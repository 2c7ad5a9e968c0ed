"""``apq-tvm eval`` and ``apq-tvm report``: accuracy of modules and of schemes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apq_tvm.cli.console import Bars, print_json, print_table, reports_errors, say
from apq_tvm.cli.options import (
    CalibrationFile,
    Codes,
    Dim,
    Force,
    Inputs,
    Json,
    Sequential,
    TensorType,
    parse_dims,
    parse_tensor_types,
)
from apq_tvm.errors import BadInput

if TYPE_CHECKING:
    from apq_tvm.evaluation.language import Language

Rows = Annotated[int, typer.Option(min=1, help="Batch entries per call.")]
Perplexity = Annotated[
    bool, typer.Option("--perplexity", help="Score logits: perplexity, KL to the float model.")
]
Logits = Annotated[
    str, typer.Option(metavar="NAME", help="Output with logits, if it is not plain.")
]
Tokens = Annotated[
    str, typer.Option(metavar="NAME", help="Input with token ids, if it is not plain.")
]
Window = Annotated[
    int, typer.Option(min=2, help="Tokens in a call; longer sequences are cut, not overlapped.")
]
MinTokens = Annotated[int, typer.Option(min=1, help="Fewer predicted tokens are refused.")]

LANGUAGE_COLUMNS = ("perplexity", "of float", "KL mean", "KL max", "same top token", "tokens")

_WITH_WHAT = (
    "Say --against MODEL.onnx for a compiled module, or --scheme SCHEME to try one on an ONNX file"
)


@reports_errors
def evaluate(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="MODULE|MODEL.onnx",
            help="Folder of a compiled module, or an ONNX file to try a scheme on.",
            show_default=False,
        ),
    ],
    inputs: Inputs,
    against: Annotated[
        Path | None, typer.Option(help="The float ONNX model of a module.", show_default=False)
    ] = None,
    scheme: Annotated[
        str, typer.Option(help="To try without compiling; anyprec3-8@4 is 4 of its bits.")
    ] = "",
    bits: Annotated[int, typer.Option(min=0, help="Width to run at, where there is a choice.")] = 0,
    perplexity: Perplexity = False,
    logits: Logits = "",
    tokens: Tokens = "",
    window: Window = 512,
    min_tokens: MinTokens = 1,
    method: Annotated[str, typer.Option(help="How codes are chosen, see: compile.")] = "rtn",
    sequential: Sequential = None,
    calibration: CalibrationFile = None,
    codes: Codes = None,
    tensor_type: TensorType = None,
    dim: Dim = None,
    rows: Rows = 32,
    kv: Annotated[
        str, typer.Option("--kv", help="With --scheme: caches of a session: f32, f16, i8, i4.")
    ] = "f32",
    json: Json = False,
) -> None:
    """Compare a module, or a scheme, with the float model.

    A module: ONNX Runtime runs the float model on the same inputs. An ONNX file with --scheme: the
    model is quantized and run in torch, nothing is compiled, and every layer's error is measured.
    Cosines are between rows of the outputs.
    """
    from apq_tvm import evaluate as evaluation

    language = _language(perplexity, logits, tokens, window, min_tokens)
    if scheme:
        for name, value in (("--against", against), ("a compiled module", what.is_dir())):
            if value:
                raise BadInput(f"--scheme is for an ONNX file; {name} does not go with it")
        report = evaluation.evaluate_scheme(
            what,
            f"{scheme}@{bits}" if bits else scheme,
            inputs,
            method=method,
            rows=rows,
            language=language,
            calibration=calibration,
            sequential=sequential,
            codes=codes,
            tensor_types=parse_tensor_types(tensor_type or []),
            dims=parse_dims(dim or []),
            kv=kv,
            progress=Bars(),
        )
    else:
        if against is None:
            raise BadInput(f"compare {what} with what? {_WITH_WHAT}")
        known = sequential is not None or calibration or method != "rtn"
        if known or codes or tensor_type or dim or kv != "f32":
            raise BadInput(
                "--method, --sequential, --calibration, --codes, --tensor-type, --dim and --kv go "
                "with --scheme only"
            )
        report = evaluation.evaluate(
            what, against, inputs, rows=rows, language=language, bits=bits, progress=Bars()
        )
    if json:
        print_json(report)
        return
    _print_report(report)


def _language(
    perplexity: bool, logits: str, tokens: str, window: int, min_tokens: int
) -> Language | None:
    """How to score logits, None if nobody asked."""
    from apq_tvm.evaluation.language import Language

    if not (perplexity or logits):
        return None
    return Language(tokens, logits, window, min_tokens)


def _stored(report: Mapping[str, Any]) -> str:
    """What is stored of any-precision layers beside what one width reads."""
    read, stored = report["linear_bits_per_weight"], report["linear_stored_bits_per_weight"]
    return "" if stored == read else f" of {stored:.4g} stored"


def _print_report(report: Mapping[str, Any]) -> None:
    """Tables of one evaluation."""
    if "scheme" in report:
        title = f"{report['scheme']} on {report['model']}"
        print(
            f"{title}: {report['bits_per_weight']:.4g} bits per weight, "
            f"{report['linear_bits_per_weight']:.4g} in linear layers"
            f"{_stored(report)}, "
            f"{report['embedding_bits_per_weight']:.4g} in embeddings (0: float)"
        )
        _print_layers(report["layers"])
    else:
        title = f"{report['module']} against {report['against']}"
    outputs = report["outputs"].items()
    floats = [_output_row(name, result) for name, result in outputs if "equal" not in result]
    if floats:
        columns = ("output", "cosine mean", "cosine min", "max abs error", "same top-1", "rows")
        print_table(title, columns, floats, columns[1:])
    integers = [
        (name, f"{result['equal']:.4%}", result["numbers"], f"{result['max_abs_error']:.3g}")
        for name, result in outputs
        if "equal" in result
    ]
    if integers:
        names = ("output", "equal", "numbers", "max abs error")
        print_table(
            "integer outputs" if floats else f"{title}: integers", names, integers, names[1:]
        )
    if report["language"]:
        score = report["language"]
        print_table(
            f"{score['logits']}: float perplexity {score['float_perplexity']:.4f}",
            LANGUAGE_COLUMNS,
            [language_row(score)],
            right=LANGUAGE_COLUMNS,
        )


def _output_row(name: str, result: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        name,
        f"{result['cosine_mean']:.6f}",
        f"{result['cosine_min']:.6f}",
        f"{result['max_abs_error']:.3g}",
        f"{result['same_top']:.1%}",
        result["rows"],
    )


def language_row(score: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of `LANGUAGE_COLUMNS`."""
    return (
        f"{score['perplexity']:.4f}",
        f"{score['ratio']:.4f}",
        f"{score['kl_mean']:.5f}",
        f"{score['kl_max']:.4f}",
        f"{score['top1']:.2%}",
        str(score["tokens"]),
    )


def _print_layers(layers: Sequence[Mapping[str, Any]]) -> None:
    if not layers:
        return
    columns = ("layer", "scheme", "N x K", "bits", "weight error", "output error")
    print_table(
        "layers: errors relative to the norm, outputs with the float model's activations",
        columns,
        (
            (
                layer["name"],
                layer["scheme"],
                "x".join(map(str, layer["shape"])),
                f"{layer['bits_per_weight']:.3f}",
                f"{layer['weight_error']:.5f}",
                "" if layer["output_error"] is None else f"{layer['output_error']:.5f}",
            )
            for layer in layers
        ),
        right=columns[2:],
    )


@reports_errors
def report(
    model: Annotated[Path, typer.Argument(help="The float ONNX model.", show_default=False)],
    inputs: Inputs,
    schemes: Annotated[
        str,
        typer.Option(
            help="Comma list; anyprec3-8@4 is 4 of its bits, W3A8:gptq chooses by a method.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML file to write.", show_default=False)
    ],
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures too.", show_default=False),
    ] = None,
    perplexity: Perplexity = False,
    logits: Logits = "",
    tokens: Tokens = "",
    window: Window = 512,
    min_tokens: MinTokens = 1,
    calibration: CalibrationFile = None,
    tensor_type: TensorType = None,
    dim: Dim = None,
    modules: Annotated[
        str, typer.Option(help="Comma list of compiled modules of this model, to time.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of timed modules.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For all timing.")] = 8.0,
    rows: Rows = 32,
    force: Force = False,
) -> None:
    """Compare schemes in one HTML file: tables and plots.

    Every scheme is quantized and run in torch, without compiling. Finished schemes are kept beside
    the output until it is complete: the same command goes on where it was interrupted.
    """
    from apq_tvm.report import make_report

    document = make_report(
        model,
        inputs,
        [word.strip() for word in schemes.split(",") if word.strip()],
        output,
        json_output=json,
        language=_language(perplexity, logits, tokens, window, min_tokens),
        calibration=calibration,
        tensor_types=parse_tensor_types(tensor_type or []),
        dims=parse_dims(dim or []),
        modules=[Path(word.strip()) for word in modules.split(",") if word.strip()],
        threads=threads,
        seconds=seconds,
        rows=rows,
        force=force,
        progress=Bars(),
    )
    say(f"{output}: {len(document['schemes'])} schemes")
    for name, reason in document["failed"].items():
        say(f"left out {name}: {reason}")


def mount(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(
        "eval",
        epilog="Example: apq-tvm eval minilm_w4 --against model.onnx --inputs sentences.npz",
    )(evaluate)
    app.command(
        "report",
        epilog="Example: apq-tvm report model.onnx --inputs sentences.npz "
        "--schemes W8A8,W4A8g32,anyprec3-8@4 -o report.html --json report.json",
    )(report)

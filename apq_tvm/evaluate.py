"""How close a quantized model comes to its float model on the same inputs.

`evaluate` runs a compiled module beside the ONNX file in ONNX Runtime; `evaluate_scheme` needs no
compiled module: it quantizes the model and runs it in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apq_tvm.evaluation.agreement import Agreement, IntegerAgreement, row_cosine, rows_of
from apq_tvm.evaluation.compare import Comparison, read_calls
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.runners import call_module, call_session, open_session, specs_of
from apq_tvm.extras import require
from apq_tvm.module import load_module
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.read import Batch, check_batch, read_inputs, split
from apq_tvm.types import AnyPath, DimSizes

__all__ = [
    "Agreement",
    "Batch",
    "IntegerAgreement",
    "Language",
    "call_module",
    "check_batch",
    "evaluate",
    "evaluate_scheme",
    "open_session",
    "read_inputs",
    "row_cosine",
    "rows_of",
    "specs_of",
    "split",
]


def evaluate(
    module: AnyPath,
    against: AnyPath,
    inputs: AnyPath,
    *,
    rows: int = 32,
    language: Language | None = None,
    bits: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare a compiled module with its float ONNX model.

    Parameters
    ----------
    module : str or path
        Folder of the compiled module.
    against : str or path
        The float ONNX file.
    inputs : str or path
        npz of inputs (`read_inputs`).
    rows : int
        Batch entries per call; a larger batch is cut. Language models get windows of tokens.
    language : Language, optional
        Score one output as logits: perplexity and KL divergence.
    bits : int
        Width the module runs at, where it was compiled for a range; 0 for its own choice.
    progress : Progress or None
        Told of every call.

    Returns
    -------
    dict
        ``outputs``: per output what `Agreement.summary` gives, or `IntegerAgreement.summary` of
        integers; cosines are between rows of ours and of ONNX Runtime, over unmasked tokens where
        the model has an attention mask.
        ``language``: what `LanguageScore.summary` gives, or None; the logits are not among the
        outputs then.

    Raises
    ------
    BadInput
        Anything given does not fit.
    MissingPackage
        onnxruntime is not installed.
    """
    require("onnxruntime")
    progress = progress or Silent()
    package = load_module(module)
    session = open_session(against)
    calls = read_calls(inputs, specs_of(session), rows, language)
    comparison = Comparison(calls)
    with progress.stage("evaluate", len(calls.batches)):
        for call in calls.batches:
            progress.advance()
            ours = call_module(package, call, bits)
            comparison.add(call, call_session(session, call), ours)
    return {
        "module": str(module),
        "against": str(against),
        "inputs": str(inputs),
        "calls": len(calls.batches),
        **comparison.summary(),
    }


def evaluate_scheme(
    model: AnyPath,
    scheme: str,
    inputs: AnyPath,
    *,
    method: str = "rtn",
    rows: int = 32,
    language: Language | None = None,
    calibration: AnyPath | None = None,
    sequential: bool | None = None,
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
    codes: AnyPath | None = None,
    layers: bool = True,
    kv: str = "f32",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare a scheme with the float model, without compiling.

    Parameters
    ----------
    model : str or path
        The float ONNX file.
    scheme : str
        ``W4A8g32``, or any-precision at some of its bits: ``anyprec3-8@4``.
    inputs : str or path
        npz of inputs (`read_inputs`).
    method : str
        How codes are chosen (`apq_tvm.quantizers.calibrated.METHODS`).
    rows, language, progress
        As for `evaluate`.
    calibration : str or path, optional
        File of ``apq-tvm calibrate``.
    sequential : bool or None
        As of `apq_tvm.Guidance`.
    tensor_types, dims
        As `apq_tvm.compile` takes them.
    codes : str or path, optional
        As of `apq_tvm.Guidance`; the float model is then what the codes mean.
    layers : bool
        Measure the errors of every layer too.
    kv : str
        What a session's caches hold, ``"f32"``, ``"f16"``, ``"i8"`` or ``"i4"``: attention reads
        them so.

    Returns
    -------
    dict
        ``model``, ``inputs`` and what `SchemeEvaluator.evaluate` gives.

    Raises
    ------
    ApqError
        Anything given does not fit, or torch is not installed.
    """
    from apq_tvm.codes import keep_codes
    from apq_tvm.evaluation.schemes import SchemeEvaluator
    from apq_tvm.onnx_import import import_onnx

    require("torch")
    progress = progress or Silent()
    with progress.stage("import"):
        imported = import_onnx(model, dims)
    if codes is not None:
        imported = keep_codes(imported, codes, progress).model
    with SchemeEvaluator(
        imported,
        inputs,
        rows=rows,
        language=language,
        calibration=calibration,
        sequential=sequential,
        tensor_types=tensor_types,
        layers=layers,
        vocabulary=True,
        kv=kv,
        keep=False,
        progress=progress,
    ) as evaluator:
        return {"model": str(model), "inputs": str(inputs), **evaluator.evaluate(scheme, method)}

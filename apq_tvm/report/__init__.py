"""``apq-tvm report``: schemes side by side in one HTML file, as tables and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apq_tvm import __version__
from apq_tvm.errors import ApqError, BadInput, OutputExists, OutputFailed
from apq_tvm.evaluation.language import Language
from apq_tvm.evaluation.results import Results, run_key, write_text
from apq_tvm.evaluation.schemes import SchemeEvaluator
from apq_tvm.extras import require
from apq_tvm.formats.scheme import parse_at
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.calibrated import METHODS
from apq_tvm.quantizers.inputs.read import Batch
from apq_tvm.types import AnyPath, DimSizes, ImportedModel

__all__ = ["make_report"]


def make_report(
    model: AnyPath,
    inputs: AnyPath,
    schemes: Sequence[str],
    output: AnyPath,
    *,
    json_output: AnyPath | None = None,
    language: Language | None = None,
    calibration: AnyPath | None = None,
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
    modules: Sequence[AnyPath] = (),
    threads: int | None = None,
    seconds: float = 8.0,
    rows: int = 32,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure schemes on a model and write the report.

    Parameters
    ----------
    model : str or path
        The float ONNX file.
    inputs : str or path
        npz of inputs.
    schemes : sequence of str
        ``SCHEME[@BITS][:METHOD]``.
    output : str or path
        The HTML file. Until it is complete, ``<output>.partial.json`` holds the finished schemes,
        from which the same call goes on.
    json_output : str or path, optional
        Gets the figures.
    language : Language, optional
        Score one output as logits.
    calibration : str or path, optional
        File of ``apq-tvm calibrate``.
    tensor_types : mapping of str to str, optional
        As `apq_tvm.compile` takes it.
    modules : sequence of str or path
        Compiled modules of this model, to time on the first call of the inputs.
    threads, seconds
        Of the timing.
    rows : int
        Batch entries per call.
    force : bool
        Replace existing outputs.
    progress : Progress, optional

    Returns
    -------
    dict
        ``version, model, sha256, inputs, calibration, schemes`` (what `SchemeEvaluator.evaluate`
        gives, in that order), ``products`` (float, and why), ``failed`` (by scheme), ``timings``.

    Raises
    ------
    OutputExists
        An output is there and `force` is not set.
    ApqError
        A scheme cannot be read, or none could be measured; anything given does not fit; torch or
        matplotlib is not installed.
    """
    from apq_tvm.report.timing import time_modules

    progress, output = progress or Silent(), Path(output)
    outputs = [output] if json_output is None else [output, Path(json_output)]
    check_outputs(outputs, force)
    require("matplotlib", "torch")
    asked = read_schemes(schemes)
    options: dict[str, Any] = {"rows": rows, "language": language}
    options["calibration"] = Path(calibration) if calibration else None
    options["tensor_types"] = dict(tensor_types or {})
    partial = output.with_name(f"{output.name}.partial.json")
    found, call = _measured((model, dims), Path(inputs), asked, options, partial, progress)
    found["timings"] = time_modules(modules, found["sha256"], call, threads, seconds, progress)
    with progress.stage("write"):
        write_report(found, *outputs)
    partial.unlink(missing_ok=True)
    return found


def _measured(
    source: tuple[AnyPath, DimSizes | None],
    inputs: Path,
    asked: Mapping[str, tuple[str, str]],
    options: Mapping[str, Any],
    partial: Path,
    progress: Progress,
) -> tuple[dict[str, Any], Batch]:
    """The document without timings, and the first call of the inputs."""
    from apq_tvm.manifest import describe_products
    from apq_tvm.onnx_import import import_onnx

    with progress.stage("import"):
        imported = import_onnx(*source)
    kept = open_results(partial, imported, inputs, options)
    options = {"vocabulary": True, **options}
    with SchemeEvaluator(imported, inputs, **options, progress=progress) as evaluator:
        done, failed = measure(evaluator, asked, kept)
        first_call = evaluator.calls.batches[0]
    document = {
        "version": __version__,
        "model": str(source[0]),
        "sha256": imported.sha256,
        "inputs": str(inputs),
        "calibration": str(options["calibration"]) if options["calibration"] else None,
        "schemes": done,
        "products": describe_products(imported),
        "failed": failed,
    }
    return document, first_call


def write_report(
    document: Mapping[str, Any], output: Path, json_output: Path | None = None
) -> None:
    """The page, and the figures of it."""
    from apq_tvm.report.page import page

    html = page(document)
    if json_output:
        write_text(json_output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_text(output, html)


def open_results(
    path: Path, model: ImportedModel, inputs: Path, options: Mapping[str, Any]
) -> Results:
    """What an interrupted run with the same model, inputs and options left at `path`."""
    # Of a path, such as the calibration's, `run_key` digests the content.
    language = options["language"]
    key = run_key(
        model.sha256,
        inputs,
        version=__version__,
        **{**options, "language": vars(language) if language else None},
    )
    return Results(path, key)


def measure(
    evaluator: SchemeEvaluator, asked: Mapping[str, tuple[str, str]], kept: Results
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure schemes that `kept` does not have yet.

    Parameters
    ----------
    evaluator : SchemeEvaluator
    asked : mapping of str to (str, str)
        Name → scheme and method.
    kept : Results
        Gets every result at once.

    Returns
    -------
    list of dict
        Results in the order asked for.
    dict of str to str
        Why a scheme could not be measured, by name.

    Raises
    ------
    BadInput
        None could be.
    """
    failed: dict[str, str] = {}
    for name, (scheme, method) in asked.items():
        if kept.get(name) is None:
            try:
                kept.put(name, evaluator.evaluate(scheme, method))
            except ApqError as error:
                failed[name] = str(error)
    done = [dict(result) for name in asked if (result := kept.get(name)) is not None]
    if not done:
        name, reason = next(iter(failed.items()))
        raise BadInput(f"no scheme could be measured; {name}: {reason}")
    return done, failed


def check_outputs(outputs: Sequence[Path], force: bool) -> None:
    """Refuse outputs before the work, not after it.

    Raises
    ------
    OutputExists
        One is there and `force` is not set.
    OutputFailed
        A folder is not there, or an output is a folder.
    """
    for path in outputs:
        if path.is_dir() or not path.parent.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise OutputFailed(f"{path} cannot be written: {reason}")
        if path.exists() and not force:
            raise OutputExists(f"{path} exists; use --force to replace it")


def read_schemes(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Scheme and method of every name; each once.

    Raises
    ------
    ApqError
        There is none, or `read_scheme` refuses one.
    """
    if not names:
        raise BadInput("name one scheme at least, for example --schemes W8A8,W4A8g32")
    return {name: read_scheme(name) for name in dict.fromkeys(names)}


def read_scheme(name: str) -> tuple[str, str]:
    """Take ``SCHEME[@BITS][:METHOD]`` apart.

    Raises
    ------
    ApqError
        The scheme or its bits do not exist, or the method.
    """
    scheme, _, method = name.partition(":")
    method = method or "rtn"
    parsed, _ = parse_at(scheme)
    if parsed is None:
        raise BadInput(f"{name!r} quantizes nothing: the float model is what schemes are beside")
    if method not in METHODS:
        raise BadInput(f"{name!r}: method {method!r}; one of {', '.join(METHODS)} is possible")
    return scheme, method

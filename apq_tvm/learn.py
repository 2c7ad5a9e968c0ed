"""``apq-tvm calibrate --learn``: codes and scales learned, kept in the calibration file."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apq_tvm.errors import BadInput
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.calls import read_calls
from apq_tvm.types import AnyPath, DimSizes

if TYPE_CHECKING:
    from apq_tvm.quantizers.learn.learned import Learned
    from apq_tvm.quantizers.learn.learning_run import Run
    from apq_tvm.types import Calibration, ImportedModel

EPOCHS = {"abq": 10, "finetune": 2, "train": 8, "distill": 2, "qat": 4}
"""Passes over the inputs (per block) unless told otherwise; ABQ-LLM takes 20."""

ABQ_STEPS = 300
"""Steps per block that ``"abq"`` takes at least, unless told otherwise: of few inputs it makes more
passes. ABQ-LLM takes 2560."""


def learn_codes(
    model: AnyPath,
    inputs: AnyPath,
    statistics: AnyPath,
    output: AnyPath,
    *,
    kind: str,
    scheme: str,
    tensor_types: Mapping[str, str] | None = None,
    dims: DimSizes | None = None,
    method: str = "rtn",
    target_bpw: float | None = None,
    candidates: Sequence[str] = (),
    nsamples: int | None = None,
    epochs: int | None = None,
    rate: float | None = None,
    rows: int = 4,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Learn codes for a scheme and write a calibration file that holds them.

    Parameters
    ----------
    model, inputs : str or path
        As for `apq_tvm.calibrate.calibrate`.
    statistics : str or path
        A calibration file of the model.
    output : str or path
        The file to write: what `statistics` holds, and what was learned. An unfinished run leaves
        ``<output>.learning`` beside it, from which the same call goes on with the next block.
    kind : str
        ``"abq"``, ``"finetune"`` or ``"train"``, block by block, ``"distill"`` or ``"qat"``, end to
        end.
    scheme : str
    tensor_types : mapping of str to str, optional
        As for `apq_tvm.compile`.
    method : str
        How the codes are chosen that learning starts from: end to end from any, also from what
        `statistics` holds that was learned; block by block from rtn and gptq. With gptq
        they are chosen anew, block by block, ``"abq"``'s behind the balance of least loss.
    target_bpw : float, optional
    candidates : sequence of str
        A scheme for every layer, as `apq_tvm.quantizers.guided.Guidance` has it; `compile` with
        the same `scheme` takes those that were learned.
    nsamples : int, optional
        As for `calibrate`.
    rows : int
        Batch entries per step of learning.
    epochs : int, optional
        Passes over the inputs; `default_epochs` if not said.
    rate : float, optional
        Learning rate of scales end to end (`apq_tvm.quantizers.learn.distill.RATE`).
    progress : Progress, optional

    Returns
    -------
    dict
        ``output``, ``learned`` (layers), ``kind``, ``scheme``, ``epochs``, ``resumed_blocks``,
        ``learn_seconds``; but of ``"finetune"`` ``kept_apart``: by block, or of the ``model``, the
        loss before and after, on data that was not learned from where ``judged_apart``; and of
        ``"abq"`` ``alphas``, what the balance vectors started from.

    Raises
    ------
    ApqError
        See `apq_tvm.quantizers.learn.blockwise.learn`; the scales of `method` cannot be kept; torch
        is not installed.
    """
    started = time.perf_counter()
    check_start(kind, method, rate)
    types, choice = dict(tensor_types or {}), (target_bpw, tuple(candidates))
    asked = _Asked(kind, scheme, types, choice, method, nsamples, epochs, rows, rate, dims)
    paths = (Path(model), Path(inputs), Path(statistics), Path(output))
    run, resumed = _learn(*paths, asked, progress or Silent())
    return {
        "output": str(output), "learned": len(run.learned.tensors), "kind": kind, "scheme": scheme,
        "resumed_blocks": resumed, "epochs": run.epochs, "kept_apart": run.losses,
        "judged_apart": run.judged_apart, "alphas": run.alphas,
        "learn_seconds": round(time.perf_counter() - started, 3),
    }  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """Options of `learn_codes`, defaults filled in."""

    kind: str
    scheme: str
    tensor_types: Mapping[str, str]
    choice: tuple[float | None, tuple[str, ...]]
    method: str
    nsamples: int | None
    epochs: int | None
    rows: int
    rate: float | None
    dims: DimSizes | None


def _learn(
    model: Path, inputs: Path, statistics: Path, output: Path, asked: _Asked, progress: Progress
) -> tuple[Run, int]:
    """Learn and save; the run, and how many blocks an interrupted one had done."""
    from apq_tvm.formats import parse_scheme
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.quantizers import quantize
    from apq_tvm.quantizers.inputs.cache_balance import PREFIX, balanced
    from apq_tvm.quantizers.inputs.cache_centres import PREFIX as CENTRES
    from apq_tvm.quantizers.inputs.calibration_file import CalibrationFile, load, save
    from apq_tvm.quantizers.inputs.sequential import sequential_calls
    from apq_tvm.quantizers.learn.blockwise import learn
    from apq_tvm.quantizers.learn.learned import Learned, from_arrays, to_arrays
    from apq_tvm.quantizers.learn.learning_run import END_TO_END, Run

    imported = import_onnx(model, asked.dims)
    file = load(statistics, imported)
    imported, _ = balanced(imported, file.extra)
    calls, count = read_calls(imported, inputs, asked.nsamples, asked.rows)
    if asked.epochs is None:
        asked = replace(asked, epochs=default_epochs(asked.kind, len(calls)))
    assert asked.epochs is not None
    fed = asked.kind in END_TO_END and asked.method.endswith("gptq")
    known = from_arrays(file.extra, file.notes) if asked.method == "learned" else None
    first = _first(imported, asked, file.calibration, known, progress)
    quantized = quantize(
        imported,
        asked.scheme,
        {**first, **asked.tensor_types},
        progress=progress,
        calibration=file.calibration,
        method=asked.method,
        learned=known,
        calls=sequential_calls(imported, statistics, file, None, progress) if fed else None,
    )
    about = {
        "sha256": imported.sha256,
        "inputs": hashlib.sha256(inputs.read_bytes()).hexdigest(),
        "options": list(vars(replace(asked, nsamples=count)).values()),
    }
    partial = output.with_name(f"{output.name}.learning")
    learned, done = read_learning(partial, about)
    run = Run(
        imported,
        quantized,
        calls,
        file.calibration,
        asked.kind,
        asked.epochs,
        learned or Learned(asked.kind, scheme=str(parse_scheme(asked.scheme))),
        done,
        asked.rate,
        feeds_back=asked.method == "gptq",
    )
    result = learn(run, lambda now: write_learning(partial, about, now), progress)
    arrays, metadata = to_arrays(result)
    kept = (PREFIX, CENTRES)
    arrays |= {key: array for key, array in file.extra.items() if key.startswith(kept)}
    save(output, CalibrationFile(file.calibration, arrays, {**dict(file.notes), **metadata}))
    partial.unlink(missing_ok=True)
    return run, done


def _first(
    model: ImportedModel,
    asked: _Asked,
    calibration: Calibration,
    known: Learned | None,
    progress: Progress,
) -> dict[str, str]:
    """Schemes of layers before the user's rules: those of a budget, or of vocabularies and of what
    was learned before."""
    from apq_tvm.formats import parse_scheme
    from apq_tvm.quantizers.guided import Guidance, plan_budget
    from apq_tvm.quantizers.vocabulary import default_types

    target, candidates = asked.choice
    guidance = Guidance(target_bpw=target, candidates=candidates)
    if target is None:
        first, learned = default_types(model, parse_scheme(asked.scheme), known)
        return first | learned
    given = (model, asked.scheme, asked.tensor_types, guidance, calibration, progress)
    return plan_budget(*given).tensor_types()


def default_epochs(kind: str, calls: int) -> int:
    """Passes over so many calls unless told otherwise."""
    from apq_tvm.quantizers.learn.learning_run import split

    epochs = EPOCHS.get(kind, 1)
    if kind == "abq":
        return max(epochs, -(-ABQ_STEPS // len(split(calls)[0])))
    return epochs


def check_start(kind: str, method: str, rate: float | None) -> None:
    """Refuse what learning cannot start from.

    Raises
    ------
    BadInput
        The scales of `method` cannot be kept; `rate` is of another kind of learning.
    """
    from apq_tvm.quantizers.learn.learning_run import END_TO_END, KINDS

    if kind not in KINDS or kind in END_TO_END:
        return
    if method not in ("rtn", "gptq"):
        raise BadInput(
            f"--learn {kind} starts from --method rtn or gptq, not {method}, whose scales it would "
            "lose; use --learn distill"
        )
    if rate is not None:
        raise BadInput(
            f"--rate is of --learn distill and qat, not {kind}, which has rates of its own"
        )


def write_learning(path: Path, about: Mapping[str, Any], run: Run) -> None:
    """Save the blocks that are done."""
    from apq_tvm.quantizers.inputs.calibration_file import write_arrays
    from apq_tvm.quantizers.learn.learned import to_arrays

    arrays, metadata = to_arrays(run.learned)
    write_arrays(path, arrays, {**metadata, "run": json.dumps(about), "done": str(run.done)})


def read_learning(path: Path, about: Mapping[str, Any]) -> tuple[Learned | None, int]:
    """The blocks an interrupted run had done; none if there was none.

    Raises
    ------
    BadInput
        The file is of another run or damaged.
    """
    from apq_tvm.quantizers.inputs.calibration_file import read_arrays
    from apq_tvm.quantizers.learn.learned import from_arrays

    if not path.exists():
        return None, 0
    arrays, metadata = read_arrays(path)
    if metadata.get("run") != json.dumps(about):
        raise BadInput(
            f"{path} is of an unfinished run with another model, other inputs or options; finish "
            "that one, or delete the file"
        )
    return from_arrays(arrays, metadata), int(metadata.get("done", "0"))

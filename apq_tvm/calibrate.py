"""``apq-tvm calibrate``: a model and inputs become a calibration file; resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apq_tvm.errors import BadInput, OutputExists
from apq_tvm.extras import require
from apq_tvm.formats.caches import CODED
from apq_tvm.progress import Progress, Silent
from apq_tvm.quantizers.inputs.calls import read_calls
from apq_tvm.quantizers.inputs.read import Batch
from apq_tvm.signals import deferred
from apq_tvm.types import AnyPath, Array, DimSizes, ImportedModel

if TYPE_CHECKING:
    from apq_tvm.quantizers.inputs.calibration_file import CalibrationFile
    from apq_tvm.quantizers.inputs.row_sums import State

BALANCE_TOKENS = 2048
"""Of queries and keys, to balance them by."""

SAVE_SECONDS = 60.0
"""Between two saves of an unfinished run; Ctrl-C saves as well."""


def calibrate(
    model: AnyPath,
    inputs: AnyPath,
    output: AnyPath,
    *,
    nsamples: int | None = None,
    hessian: bool = True,
    fisher: bool = False,
    weigh: bool = True,
    rows: int = 4,
    force: bool = False,
    reuse: bool = False,
    dims: DimSizes | None = None,
    kv: str = "f32",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Collect statistics of a model's linear layers on inputs.

    Parameters
    ----------
    model, inputs : str or path
        ONNX file; npz of arrays by input name, batch first (`apq_tvm.evaluate.read_inputs`).
    output : str or path
        The safetensors file to write. An unfinished run leaves ``<output>.partial`` beside it, from
        which the same command goes on.
    nsamples : int, optional
        Batch entries to use; `NSAMPLES`, or all there are, if not said.
    hessian, fisher : bool
        Keep E[x xᵀ], which error feedback needs; Fisher information of the next-token loss.
    weigh : bool
        Weigh rows of input by how much the model's result depends on them; takes gradients.
    rows : int
        Batch entries per call of the model.
    force, reuse : bool
        Replace an existing output, or take one of the same model, inputs and options for it.
    kv : {"f32", "f16", "i8", "i4"}
        Of a session's caches; for codes queries and keys are balanced where that lowers the error
        of scores (`apq_tvm.evaluation.cache_balance`).
    dims, progress
        As `apq_tvm.compile` takes them.

    Returns
    -------
    dict
        ``output``, ``layers``, ``samples``, ``rows``, ``sensitivity``, ``seconds``, ``resumed``;
        of caches of codes ``caches``, by attention what was chosen.

    Raises
    ------
    ApqError
        The inputs do not fit the model, are too few or not finite; torch is not installed; the
        output exists or cannot be written.
    """
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.quantizers.inputs.calibration_file import CalibrationFile, load, save
    from apq_tvm.quantizers.inputs.sequential import DATA
    from apq_tvm.quantizers.inputs.statistics import finish

    started, output = time.perf_counter(), Path(output)
    check_output(output, force or reuse)
    require("torch")
    with (progress := progress or Silent()).stage("import"):
        imported = import_onnx(model, dims)
    rows = 1 if fisher else rows  # squares of gradients are summed over sequences, one by one
    calls, count = read_calls(imported, inputs, nsamples, rows)
    digest = hashlib.sha256(Path(inputs).read_bytes()).hexdigest()
    run = {"sha256": imported.sha256, "inputs": digest, "samples": count, "rows": rows}
    run |= {"hessian": hessian, "fisher": fisher, "weigh": weigh, "importance": "by sample"}
    run |= {} if kv == "f32" else {"kv": kv}
    if reuse and output.exists():
        known = load(output, imported)
        if known.notes.get("run") == json.dumps(run):
            return _report(output, known, started, 0)
    partial = output.with_name(f"{output.name}.partial")
    state, resumed = _collect(imported, calls, partial, run, progress)
    extra, caches = _caches(imported, calls, kv, progress)
    notes = {"run": json.dumps(run), DATA: os.path.relpath(inputs, output.parent), **caches}
    save(output, file := CalibrationFile(finish(imported, state), extra, notes))
    partial.unlink(missing_ok=True)
    return _report(output, file, started, resumed)


def _caches(
    model: ImportedModel, calls: Sequence[Batch], kv: str, progress: Progress
) -> tuple[dict[str, Array], dict[str, str]]:
    """Factors that balance queries and keys, and a note of what was chosen; of caches of codes."""
    from apq_tvm.sessions import cache_type

    kept = cache_type(kv)
    if kept not in CODED:
        return {}, {}
    from apq_tvm.evaluation.cache_balance import find_balance

    some, tokens = list[Batch](), 0
    for call in calls:  # queries and keys of all layers at once would be large
        some.append(call)
        tokens += max((a.size for a in call.values() if a.ndim == 2), default=0)
        if tokens >= BALANCE_TOKENS:
            break
    factors, notes = find_balance(model, some, progress, kept)
    return factors, {"caches": json.dumps(notes)}


def _collect(
    model: ImportedModel,
    calls: Sequence[Batch],
    partial: Path,
    run: Mapping[str, Any],
    progress: Progress,
) -> tuple[State, int]:
    """Sums over all calls, and how many of these an interrupted run had done."""
    from apq_tvm.quantizers.inputs.statistics import collect

    state = read_state(partial, run)
    resumed = state.calls
    with saved_on_exit(partial, run) as checkpoint:
        collect(
            model,
            calls,
            hessian=run["hessian"],
            fisher=run["fisher"],
            weigh=run["weigh"],
            state=state,
            checkpoint=checkpoint,
            progress=progress,
        )
    return state, resumed


def _report(output: AnyPath, file: CalibrationFile, started: float, resumed: int) -> dict[str, Any]:
    layers = file.calibration.layers
    caches = {"caches": json.loads(file.notes["caches"])} if "caches" in file.notes else {}
    return {
        **caches,
        "output": str(output),
        "layers": len(layers),
        "samples": json.loads(file.notes.get("run", "{}")).get("samples", 0),
        "rows": max(stats.samples for stats in layers.values()),
        "sensitivity": file.calibration.sensitivity,
        "resumed": resumed,
        "seconds": round(time.perf_counter() - started, 3),
    }


def known_statistics(
    model: AnyPath, statistics: AnyPath, dims: DimSizes | None = None
) -> dict[str, Any]:
    """What `calibrate` reports, of a finished calibration file.

    Raises
    ------
    BadInput
        It is damaged or of another model.
    """
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.quantizers.inputs.calibration_file import load

    file = load(statistics, import_onnx(model, dims))
    return _report(statistics, file, time.perf_counter(), 0)


def check_output(output: AnyPath, force: bool) -> None:
    """Refuse to replace a file unasked.

    Raises
    ------
    OutputExists
        It is there.
    """
    if Path(output).exists() and not force:
        raise OutputExists(f"{output} exists; use --force to replace it")


@contextmanager
def saved_on_exit(partial: Path, run: Mapping[str, Any]) -> Iterator[Callable[[State], None]]:
    """Give a checkpoint that saves now and then, and when a signal asks to stop.

    Sums are whole only between two calls of the model, so that the first Ctrl-C waits for the
    checkpoint; a second one stops at once, and what was saved before stays.
    """
    saved = time.monotonic()
    with deferred() as signalled:

        def checkpoint(now: State) -> None:
            nonlocal saved
            if signalled.asked or time.monotonic() - saved > SAVE_SECONDS:
                write_state(partial, run, now)
                saved = time.monotonic()
            if signalled.asked:
                signalled.stop()

        yield checkpoint


def write_state(path: Path, run: Mapping[str, Any], state: State) -> None:
    """Save an unfinished run."""
    from apq_tvm.quantizers.inputs.calibration_file import write_arrays

    arrays: dict[str, Array] = {f"fisher.{node}": f for node, f in state.fisher.items()}
    for value, sums in state.sums.items():
        arrays[f"square.{value}"] = sums.square
        arrays[f"total.{value}"] = sums.total
        arrays[f"absmax.{value}"] = sums.absmax
        arrays[f"rows.{value}"] = np.array(sums.rows)
        arrays[f"weight.{value}"] = np.array(sums.weight)
        if sums.hessian is not None:
            arrays[f"hessian.{value}"] = sums.hessian
    arrays |= {f"pulls.{node}": rows for node, rows in state.pulls.items()}
    arrays |= {f"table.{node}": np.array(power) for node, power in state.tables.items()}
    arrays["calls"] = np.array(state.calls)
    write_arrays(path, arrays, {"run": json.dumps(run)})


def read_state(path: Path, run: Mapping[str, Any]) -> State:
    """Where an interrupted run of the same model, inputs and options stood; a fresh start if none.

    Raises
    ------
    BadInput
        The file is of another run or damaged.
    """
    from apq_tvm.quantizers.inputs.calibration_file import read_arrays
    from apq_tvm.quantizers.inputs.row_sums import State, Sums

    if not path.exists():
        return State()
    arrays, metadata = read_arrays(path)
    if metadata.get("run") != json.dumps(run):
        raise BadInput(
            f"{path} is of an unfinished run with another model, other inputs or options; finish "
            "that one, or delete the file"
        )
    try:
        names = [key.removeprefix("rows.") for key in arrays if key.startswith("rows.")]
        sums = {
            name: Sums(
                arrays[f"square.{name}"],
                arrays[f"total.{name}"],
                arrays[f"absmax.{name}"],
                int(arrays[f"rows.{name}"]),
                float(arrays[f"weight.{name}"]),
                arrays.get(f"hessian.{name}"),
            )
            for name in names
        }
        fisher = {k.removeprefix("fisher."): a for k, a in arrays.items() if k[:7] == "fisher."}
        pulls = {k.removeprefix("pulls."): a for k, a in arrays.items() if k[:6] == "pulls."}
        tables = {
            k.removeprefix("table."): float(a) for k, a in arrays.items() if k[:6] == "table."
        }
        return State(int(arrays["calls"]), sums, fisher, pulls, tables)
    except KeyError as error:
        raise BadInput(f"{path} is damaged: {error} is missing; delete it") from error

"""How close a compiled module comes to its float model, run by ONNX Runtime on the same inputs."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadInput
from apq_tvm.module import load_module
from apq_tvm.progress import Progress, Silent
from apq_tvm.types import Array, TensorSpec

Batch = dict[str, Array]

MASK_NAME = re.compile(r"(^|_|\.)attention_mask$|^mask$|(^|_)attn_mask$")
CALL_NAME = re.compile(r"^(?P<name>.+)__(?P<call>\d+)$")


@dataclass
class Agreement:
    """Running comparison of one output, row by row, in float64.

    Parameters
    ----------
    name : str
        Of the output.
    """

    name: str
    rows: int = 0
    cosine_sum: float = 0.0
    cosine_min: float = 1.0
    max_abs_error: float = 0.0

    def add(self, ours: Array, reference: Array, mask: Array | None) -> None:
        """Compare two arrays of one call; a row is a vector along the last axis.

        Parameters
        ----------
        ours, reference : ndarray
            One output of one call.
        mask : [batch, sequence] or None
            Token-level outputs are compared where it is not 0.

        Raises
        ------
        BadInput
            The shapes differ (the module was not compiled from this model), or one side is NaN or
            infinite where the other is not.
        """
        if ours.shape != reference.shape:
            raise BadInput(
                f"output {self.name!r} has shape {ours.shape} in the module but "
                f"{reference.shape} in the ONNX model: the module is of another model"
            )
        a, b = rows_of(ours, mask), rows_of(reference, mask)
        if not a.size:
            return
        with np.errstate(invalid="ignore"):
            error = np.where(a == b, 0.0, np.abs(a - b))
        if not np.isfinite(error).all():
            raise BadInput(
                f"output {self.name!r}: the module or the float model gives NaN or infinity where "
                "the other does not"
            )
        cosine = row_cosine(a, b)
        self.rows += len(cosine)
        self.cosine_sum += float(cosine.sum())
        self.cosine_min = min(self.cosine_min, float(cosine.min()))
        self.max_abs_error = max(self.max_abs_error, float(error.max()))

    def summary(self) -> dict[str, Any]:
        """Return ``cosine_mean``, ``cosine_min``, ``max_abs_error`` and ``rows``."""
        return {
            "cosine_mean": self.cosine_sum / self.rows if self.rows else 1.0,
            "cosine_min": self.cosine_min,
            "max_abs_error": self.max_abs_error,
            "rows": self.rows,
        }


def rows_of(values: Array, mask: Array | None) -> NDArray[np.float64]:
    """Flatten an output to the rows that are compared, float64 [rows, width].

    A token-level output, [batch, sequence, ...] where `mask` is [batch, sequence], keeps unmasked
    tokens only. One that holds a single number per token ([batch, sequence]) is one row per batch
    entry, with masked tokens set to 0. Without a batch axis everything is one row.
    """
    x = np.asarray(values).astype(np.float64)
    if mask is not None and x.ndim >= 2 and x.shape[:2] == mask.shape:
        keep = mask != 0
        if x.ndim == 2:
            return np.where(keep, x, 0.0)
        return np.asarray(x[keep]).reshape(-1, x.shape[-1])
    if x.ndim < 2:
        return x.reshape(1, -1)
    return x.reshape(-1, x.shape[-1])


def row_cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosine of rows, float64 [rows]: 1 where they are equal, 0 where one is 0 or holds a NaN."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = np.einsum("rk,rk->r", a, b)
    finite = np.isfinite(norms) & (norms > 0)
    cosine = np.divide(dots, norms, out=np.zeros_like(dots), where=finite)
    return np.where((a == b).all(axis=1), 1.0, np.clip(cosine, -1.0, 1.0))


def read_inputs(path: Path, inputs: Sequence[TensorSpec]) -> list[Batch]:
    """Read an npz of inputs into one dict per call.

    Parameters
    ----------
    path : Path
        Arrays by input name, the leading dimension batched. ``name__0``, ``name__1``, ... hold
        several calls of different shapes.
    inputs : sequence of TensorSpec
        What the model takes.

    Returns
    -------
    list of dict
        Arrays by input name, checked against `inputs`.

    Raises
    ------
    BadInput
        The file is no npz; a name is unknown or missing; a dtype or shape does not fit.
    """
    try:
        with zipfile.ZipFile(path):  # np.load reads other kinds of files too
            pass
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path} is not an npz of plain arrays: {error}") from error
    names = {spec.name for spec in inputs}
    calls: dict[int, Batch] = {}
    for key, array in arrays.items():
        match = CALL_NAME.match(key)
        if key in names:
            calls.setdefault(0, {})[key] = array
        elif match and match["name"] in names:
            calls.setdefault(int(match["call"]), {})[match["name"]] = array
        else:
            known = ", ".join(sorted(names))
            raise BadInput(f"{path}: {key!r} is no input of the model; it takes {known}")
    if not calls:
        raise BadInput(f"{path} holds no arrays")
    for call, batch in sorted(calls.items()):
        check_batch(batch, inputs, f"{path}, call {call}" if len(calls) > 1 else str(path))
    return [batch for _, batch in sorted(calls.items())]


def check_batch(batch: Mapping[str, Array], inputs: Sequence[TensorSpec], where: str) -> None:
    """Check one call's arrays against the signature.

    Raises
    ------
    BadInput
        An input is missing, or its dtype, rank or a dimension does not fit; the message names it.
    """
    dims: dict[str, tuple[int, str]] = {}
    for spec in inputs:
        if spec.name not in batch:
            raise BadInput(f"{where}: input {spec.name!r} is missing")
        array = batch[spec.name]
        if array.dtype != np.dtype(spec.dtype):
            raise BadInput(
                f"{where}: {spec.name!r} is {array.dtype}, the model takes {spec.dtype}; "
                f"save it with .astype(np.{spec.dtype})"
            )
        if array.ndim != len(spec.shape):
            raise BadInput(
                f"{where}: {spec.name!r} has shape {array.shape}, "
                f"the model takes {len(spec.shape)} dimensions: {list(spec.shape)}"
            )
        for axis, (size, want) in enumerate(zip(array.shape, spec.shape, strict=True)):
            at = f"{spec.name!r} dimension {axis}"
            if isinstance(want, int) and size != want:
                raise BadInput(f"{where}: {at} is {size}, the model takes {want}")
            if isinstance(want, str):
                seen, first = dims.setdefault(want, (size, at))
                if seen != size:
                    raise BadInput(f"{where}: {at} is {size}, but {first} ({want}) is {seen}")


def split(batch: Batch, inputs: Sequence[TensorSpec], rows: int) -> Iterator[Batch]:
    """Cut one call into calls of at most `rows` along the leading dimension.

    Only where every input leads with the same symbolic dimension, which is then the batch; other
    calls are left whole.
    """
    leading = {spec.shape[0] if spec.shape else 0 for spec in inputs}
    (lead,) = leading if len(leading) == 1 else (0,)
    if not isinstance(lead, str):
        yield batch
        return
    count = len(batch[inputs[0].name])
    for start in range(0, max(count, 1), rows):
        yield {name: array[start : start + rows] for name, array in batch.items()}


def open_session(model: Path | bytes, threads: int | None = None) -> Any:
    """Open a model in ONNX Runtime on the CPU, without spinning threads.

    Parameters
    ----------
    model : Path or bytes
        ONNX file, or its content.
    threads : int or None
        Threads inside one operator; None leaves ONNX Runtime's own choice.

    Raises
    ------
    BadInput
        onnxruntime is not installed, or it cannot read the file.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise BadInput(
            "comparing with ONNX Runtime needs it installed: pip install 'apq-tvm[bench]'"
        ) from error
    if isinstance(model, Path) and not model.is_file():
        raise BadInput(f"{model}: no such file")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Its idle threads spin otherwise, and slow down whatever is measured after it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    source, label = (model, "the model") if isinstance(model, bytes) else (str(model), str(model))
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes have no public common base
        raise BadInput(f"ONNX Runtime cannot open {label}: {error}") from error


def specs_of(session: Any) -> tuple[TensorSpec, ...]:
    """The inputs of an ONNX Runtime session as `TensorSpec`."""
    names = {"float": "float32", "double": "float64"}
    specs = []
    for value in session.get_inputs():
        text = value.type.removeprefix("tensor(").removesuffix(")")
        # a dimension without a name equals no other
        shape = tuple(
            d if isinstance(d, int) or d else f"?{value.name}.{axis}"
            for axis, d in enumerate(value.shape)
        )
        specs.append(TensorSpec(value.name, names.get(text, text), shape))
    return tuple(specs)


def call_module(module: Any, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Run a compiled module on one call's arrays.

    Raises
    ------
    BadInput
        The module refuses the inputs; its own message is kept.
    """
    try:
        outputs: dict[str, Array] = module.run(dict(batch))
    except module.ModuleError as error:
        raise BadInput(f"the compiled module refuses the inputs: {error}") from error
    return outputs


def evaluate(
    module: Path, against: Path, inputs: Path, *, rows: int = 32, progress: Progress | None = None
) -> dict[str, Any]:
    """Compare a compiled module with its float ONNX model.

    Parameters
    ----------
    module : Path
        Folder of the compiled module.
    against : Path
        The float ONNX file.
    inputs : Path
        npz of inputs (`read_inputs`).
    rows : int
        Batch entries per call; a larger batch is cut.
    progress : Progress or None
        Told of every call.

    Returns
    -------
    dict
        ``outputs``: per output ``cosine_mean``, ``cosine_min``, ``max_abs_error`` and ``rows``;
        cosines are between rows of ours and of ONNX Runtime, over unmasked tokens where the model
        has an attention mask.

    Raises
    ------
    BadInput
        Anything given does not fit.
    """
    progress = progress or Silent()
    package = load_module(module)
    session = open_session(against)
    specs = specs_of(session)
    calls = [c for batch in read_inputs(inputs, specs) for c in split(batch, specs, rows)]
    mask_name = next((s.name for s in specs if MASK_NAME.search(s.name)), None)
    names = [value.name for value in session.get_outputs()]
    agreements = {name: Agreement(name) for name in names}
    with progress.stage("evaluate", len(calls)):
        for call in calls:
            progress.advance()
            ours = call_module(package, call)
            missing = [name for name in names if name not in ours]
            if missing:
                raise BadInput(f"{module} has no output {missing[0]!r}: it is of another model")
            reference = session.run(names, call)
            mask = call[mask_name] if mask_name else None
            for name, value in zip(names, reference, strict=True):
                agreements[name].add(ours[name], value, mask)
    return {
        "module": str(module),
        "against": str(against),
        "inputs": str(inputs),
        "calls": len(calls),
        "outputs": {name: agreements[name].summary() for name in names},
    }

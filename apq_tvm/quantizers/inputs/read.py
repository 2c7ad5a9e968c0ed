"""Inputs for models: read from npz, checked against a signature, cut into calls."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from apq_tvm.errors import BadInput
from apq_tvm.types import AnyPath, Array, TensorSpec

Batch = dict[str, Array]

MASK_NAME = re.compile(r"(^|_|\.)attention_mask$|^mask$|(^|_)attn_mask$")
TOKENS_NAME = re.compile(r"(^|_|\.)(input_ids|token_ids|tokens)$")
CALL_NAME = re.compile(r"^(?P<name>.+)__(?P<call>\d{1,9})$")


def read_inputs(path: AnyPath, inputs: Sequence[TensorSpec]) -> list[Batch]:
    """Read an npz of inputs into one dict per call.

    Parameters
    ----------
    path : str or path
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
        if Path(path).exists() and not Path(path).is_file():
            raise BadInput(f"{path} is no regular file")  # a device may never end
        with zipfile.ZipFile(path):  # np.load reads other kinds of files too
            pass
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except (OSError, ValueError, zipfile.BadZipFile, MemoryError) as error:
        raise BadInput(f"{path} is not an npz of plain arrays: {error}") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BadInput(f"{path} is not an npz of plain arrays: {name!r} is none")
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

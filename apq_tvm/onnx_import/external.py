"""Weights as numpy arrays; files beside the model are mapped, and nothing they say is trusted."""

from __future__ import annotations

import stat
from contextlib import suppress
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import numpy as np

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.checks.sizes import LARGEST_DIM, MOST_AXES
from apq_tvm.types import Array

if TYPE_CHECKING:
    import onnx


def stored_bytes(model: Path) -> int:
    """Bytes of an ONNX file that was imported, and of the files beside it that hold its weights."""
    import onnx

    files, proto = {model}, onnx.load(model, load_external_data=False)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            with suppress(ImportFailed):  # a weight that nothing reads
                files.add(_locate(tensor, model.parent, tensor.name)[0])
    return sum(file.stat().st_size for file in files)


def read_tensor(tensor: onnx.TensorProto, folder: Path, name: str) -> Array:
    """The contents of an initializer or tensor attribute.

    Parameters
    ----------
    tensor : onnx.TensorProto
    folder : Path
        Of the model; external data must lie in it.
    name : str
        For messages.

    Returns
    -------
    ndarray
        Mapped read-only if it is external.

    Raises
    ------
    ImportFailed
        The data is missing, truncated, of the wrong size, or outside `folder`.
    UnsupportedModel
        Strings.
    """
    from onnx import TensorProto, helper, numpy_helper

    if tensor.data_type == TensorProto.STRING:
        raise UnsupportedModel(f"weight {name!r} holds strings; only numbers can be compiled")
    if tensor.data_type not in set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}:
        raise ImportFailed(f"weight {name!r} has the unknown element type {tensor.data_type}")
    shape = tuple(tensor.dims)
    if not all(0 <= dim <= LARGEST_DIM for dim in shape) or len(shape) > MOST_AXES:
        raise ImportFailed(
            f"weight {name!r} has the impossible shape {list(shape[: MOST_AXES + 1])}; the most is "
            f"{MOST_AXES} axes of {LARGEST_DIM}"
        )
    if tensor.data_location != TensorProto.EXTERNAL:
        try:
            array: Array = numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as error:
            raise ImportFailed(f"weight {name!r} does not fill its shape: {error}") from error
        return array
    path, offset, length = _locate(tensor, folder, name)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    count = prod(shape)
    bits = _SUB_BYTE.get(TensorProto.DataType.Name(tensor.data_type), dtype.itemsize * 8)
    needed = (count * bits + 7) // 8
    if length not in (None, needed):
        raise ImportFailed(
            f"weight {name!r} of shape {list(shape)} needs {needed} bytes, but its entry in "
            f"{path.name!r} has {length}"
        )
    if offset < 0 or offset + needed > path.stat().st_size:
        raise ImportFailed(
            f"weight {name!r} needs bytes {offset} to {offset + needed} of {path.name!r}, which "
            f"has only {path.stat().st_size}: the file is truncated; download it again"
        )
    if count == 0:
        return np.zeros(shape, dtype)
    if bits < 8:
        raw = np.memmap(path, np.uint8, "r", offset, (needed,)).tobytes()
        filled = TensorProto(data_type=tensor.data_type, dims=shape, raw_data=raw)
        unpacked: Array = numpy_helper.to_array(filled)
        return unpacked
    try:
        return np.memmap(path, dtype, "r", offset, shape)
    except OSError as error:
        raise ImportFailed(
            f"weight {name!r}: {path.name!r} cannot be mapped: {error.strerror}"
        ) from error


_SUB_BYTE = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}


def _locate(tensor: onnx.TensorProto, folder: Path, name: str) -> tuple[Path, int, int | None]:
    """File, offset and length of external data, once they are known to be safe."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    parts = PurePosixPath(location).parts
    absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).anchor
    if not parts or absolute or ".." in parts or "\\" in location:
        raise ImportFailed(
            f"weight {name!r}: its external data {location!r} is not a file inside the model's "
            "folder; save the model again with its data beside it"
        )
    path = folder
    try:
        for part in parts:
            path = path / part
            if path.is_symlink():
                raise ImportFailed(
                    f"weight {name!r}: its external data {location!r} goes through the link "
                    f"{path}; copy the file itself into the model's folder"
                )
        regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise ImportFailed(
            f"weight {name!r}: its external data {str(path)!r} is missing "
            f"({getattr(error, 'strerror', error)}); it must lie beside the model"
        ) from error
    if not regular:
        raise ImportFailed(f"weight {name!r}: its external data {str(path)!r} is no regular file")
    try:
        length = int(entries["length"]) if "length" in entries else None
        return path, int(entries.get("offset", "0")), length
    except ValueError as error:
        raise ImportFailed(
            f"weight {name!r}: offset or length of its external data is no number"
        ) from error

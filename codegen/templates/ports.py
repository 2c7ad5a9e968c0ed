"""Inputs and outputs of a module: what its manifest says of them, and arrays for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, LoadError, RunError
from .tensors import DL_CODES, addresses_of

Array = NDArray[Any]

ALIGNMENT = 64  # lines of caches; what lies at no multiple of 16 is copied by the library


@dataclass(frozen=True)
class TensorInfo:
    """One input or output: ONNX name, numpy dtype name, shape (a str is a varying dimension)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


# ---- the manifest ----


def read_manifest(folder: Path) -> dict[str, Any]:
    """``manifest.json`` of a module's folder.

    Raises
    ------
    LoadError
        It cannot be read, or is none.
    """
    path = folder / "manifest.json"
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not _is_manifest(loaded):
        raise LoadError(f"{path} is not a compiled module's; copy or compile the module again")
    return loaded


def _is_manifest(loaded: Any) -> bool:
    """Whether all that a module takes from it is there and of the right kind."""
    try:
        ports = [*loaded["inputs"], *loaded["outputs"]]
        words = [loaded["library"][key] for key in ("name", "system", "machine", "libc")]
        words += [port[key] for port in ports for key in ("name", "dtype")]
        dims = [d for port in ports for d in (*port["shape"], len(port["shape"]))]
        bits = [b for least, most in loaded["precisions"].values() for b in (least, most)]
        types = [np.dtype(port["dtype"]).kind for port in ports]
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        return False
    return (
        all(isinstance(word, str) for word in words)
        and all(isinstance(dim, int | str) for dim in dims)
        and all(isinstance(number, int) for number in bits)
        and all(kind in DL_CODES for kind in types)
        and words[0].isidentifier()
    )


def tensor_infos(entries: Sequence[dict[str, Any]]) -> tuple[TensorInfo, ...]:
    """Inputs or outputs, as the manifest lists them."""
    return tuple(TensorInfo(e["name"], e["dtype"], tuple(e["shape"])) for e in entries)


# ---- arrays ----


def dtype_of(info: TensorInfo) -> np.dtype[Any]:
    """numpy's dtype of an input or output; bfloat16 is one of ml_dtypes."""
    if info.dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise InputError(
                f"'{info.name}' is of bfloat16, which numpy knows by the package ml_dtypes alone: "
                "install it"
            ) from error
        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return kind
    return np.dtype(info.dtype)


def as_array(info: TensorInfo, value: Any, kind: np.dtype[Any]) -> Array:
    """The value as an array of the right type, sharing its memory."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"input '{info.name}' is a {type(value).__name__} that numpy cannot read by "
                f"DLPack: {error}"
            ) from error
    else:
        raise InputError(
            f"input '{info.name}' is a {type(value).__name__}; wanted a numpy array or another "
            f"tensor with __dlpack__, of {info.dtype}"
        )
    if array.dtype != kind:  # also another byte order
        swapped = array.dtype.name == info.dtype
        raise InputError(
            f"input '{info.name}' has dtype {array.dtype.str if swapped else array.dtype}, wanted "
            f"{info.dtype}: nothing is cast silently, use .astype('{info.dtype}')"
        )
    if not array.flags.c_contiguous and any(s % array.itemsize for s in array.strides):
        array = array.copy()  # a field of packed records: DLPack strides count whole elements
    return array


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array, into which kernels may write as it is."""
    size = math.prod(shape) * dtype.itemsize
    try:
        block = np.empty(size + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError) as error:  # NumPy refuses more than it can count
        raise RunError(f"no memory for an output of {size} bytes") from error
    (start,) = addresses_of((block,))
    return np.ndarray(shape, dtype, block, -start % ALIGNMENT)

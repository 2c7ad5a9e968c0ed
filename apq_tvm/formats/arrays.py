"""What families ask of their arrays, and groups of weights along K."""

from __future__ import annotations

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.types import Array, QuantizedTensor


def group_count(k: int, size: int) -> int:
    """Groups of a row of `k` weights, the last one may be short; 1 for a `size` of -1."""
    return 1 if size == -1 else -(-k // size)


def spread(values: Array, k: int, size: int) -> Array:
    """Repeat per-group values [N, G] for every weight: [N, k]."""
    return np.repeat(values, k if size == -1 else size, axis=1)[:, :k]


def stored_bytes(tensor: QuantizedTensor) -> int:
    """Bytes of codes at their bits and of all other arrays as they are."""
    zeros = 0 if tensor.zeros is None else tensor.zeros.nbytes
    tables = sum(table.nbytes for table in tensor.tables.values())
    return (tensor.codes.size * tensor.scheme.bits + 7) // 8 + tensor.scales.nbytes + zeros + tables


def check_codes(tensor: QuantizedTensor, name: str, top: int | None = None) -> tuple[int, int]:
    """Refuse codes that are no uint8 matrix or exceed `top`, and odd zero points; gives (N, K).

    Parameters
    ----------
    tensor : QuantizedTensor
    name : str
        For errors.
    top : int, optional
        Largest code; what the scheme's bits hold by default.

    Raises
    ------
    BadScheme
    """
    codes, scheme = tensor.codes, tensor.scheme
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.size == 0:
        raise BadScheme(
            f"{name}: codes are {codes.dtype} {list(codes.shape)}; uint8 [N, K] with N, K >= 1 "
            "is needed"
        )
    top = (1 << scheme.bits) - 1 if top is None else top
    if int(codes.max()) > top:
        raise BadScheme(f"{name}: code {int(codes.max())} exceeds {top} of {scheme}")
    if (tensor.zeros is not None) != scheme.zero_points:
        has = "needs" if scheme.zero_points else "has no"
        raise BadScheme(f"{name}: scheme {scheme} {has} zero points")
    n, k = codes.shape
    return n, k


def check_array(
    name: str, array: Array | None, dtype: str, shape: tuple[int, ...], top: int | None = None
) -> None:
    """Refuse an array of another shape or type, with values above `top`, or not finite.

    Raises
    ------
    BadScheme
        With the array's name and what it must be.
    """
    if array is None or array.dtype != np.dtype(dtype) or array.shape != shape:
        have = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise BadScheme(f"{name} is {have}; {dtype} {list(shape)} is needed")
    if top is not None and int(array.max()) > top:
        raise BadScheme(f"{name} holds {int(array.max())}; at most {top} is possible")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadScheme(f"{name} holds a value that is not finite")


def check_tables(tensor: QuantizedTensor, name: str, *keys: str) -> None:
    """Refuse tables of other names than `keys`.

    Raises
    ------
    BadScheme
    """
    if set(tensor.tables) != set(keys):
        raise BadScheme(
            f"{name}: scheme {tensor.scheme} has tables {sorted(keys)}, not {sorted(tensor.tables)}"
        )

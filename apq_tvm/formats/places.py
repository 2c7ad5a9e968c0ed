"""Which entry of its float arrays each decoded weight reads.

Every family is linear in each of its float arrays, and a weight depends on one entry of each:
``w[n, k] = fixed[n, k] + Σ_i p_i[row_i[n], column_i[n, k]] * factor_i[n, k]``. A family names rows
and columns (`Family.places`); the factors come from its own ``dequantize``, so that fitting and
learning its arrays needs nothing that is written twice (`apq_tvm.quantizers.feedback.places`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import Array, QuantizedTensor


@dataclass(frozen=True)
class Place:
    """One float array and which entry each weight reads.

    Parameters
    ----------
    name : str
        ``"scales"`` or a table.
    rows : int [N]
        Not falling.
    columns : int [K] or [N, K]
        [K] does not fall.
    plane : int or None
        Index into a third axis.
    """

    name: str
    rows: NDArray[np.intp]
    columns: NDArray[Any]
    plane: int | None = None


def group_places(tensor: QuantizedTensor, name: str = "scales", size: int = 0) -> list[Place]:
    """An array [N, G] of one entry per row and group of `size`, the scheme's where it is 0."""
    n, k = tensor.codes.shape
    size = size or tensor.scheme.group_size
    return [Place(name, np.arange(n), np.arange(k) // (k if size == -1 else size))]


def array_of(tensor: QuantizedTensor, key: str) -> Array:
    """A tensor's array by the name of a `Place`."""
    return tensor.scales if key == "scales" else tensor.tables[key]


def filled(tensor: QuantizedTensor, arrays: Mapping[str, Array]) -> QuantizedTensor:
    """`tensor` with other arrays, rounded to the types that it has."""
    tables = {
        key: arrays[key].astype(old.dtype) if key in arrays else old
        for key, old in tensor.tables.items()
    }
    scales = arrays.get("scales", tensor.scales).astype(tensor.scales.dtype)
    return replace(tensor, scales=scales, tables=tables)

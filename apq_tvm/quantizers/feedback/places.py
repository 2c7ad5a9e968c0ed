"""Which entry of its float arrays each decoded weight reads, for every family.

Every family is linear in each of its float arrays, and a weight depends on one entry of each:
``w[n, k] = fixed[n, k] + Σ_i p_i[row_i[n], column_i[k]] * factor_i[n, k]``. The factors come from
the family's own ``dequantize``, with that array 1 and the others 0, so nothing of the formats is
written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats import anyprec, bcq, mixed, superblock
from apq_tvm.formats.families import dequantize
from apq_tvm.types import QuantizedTensor

F32 = NDArray[np.float32]
Index = NDArray[np.intp]


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
    rows: Index
    columns: Index
    plane: int | None = None


def places_of(tensor: QuantizedTensor) -> list[Place]:
    """Scales and offsets of a tensor, of any family.

    Codebooks of ``cb`` belong to the whole model and are int8, tables of ``anyprec`` to several
    widths at once: they are not among them.
    """
    return PLACES[tensor.scheme.family](tensor)


def centroid_places(tensor: QuantizedTensor) -> list[Place]:
    """Centroids of an any-precision tensor of one width."""
    n = len(tensor.codes)
    rows = np.arange(n) // anyprec.channels_of(tensor)
    return [Place(anyprec.table_name(tensor.scheme.bits), rows, tensor.codes.astype(np.intp))]


def array_of(tensor: QuantizedTensor, key: str) -> NDArray[Any]:
    """A tensor's array by the name of a `Place`."""
    return tensor.scales if key == "scales" else tensor.tables[key]


def filled(tensor: QuantizedTensor, arrays: Mapping[str, NDArray[Any]]) -> QuantizedTensor:
    """`tensor` with other arrays, rounded to the types that it has."""
    tables = {
        key: arrays[key].astype(old.dtype) if key in arrays else old
        for key, old in tensor.tables.items()
    }
    scales = arrays.get("scales", tensor.scales).astype(tensor.scales.dtype)
    return replace(tensor, scales=scales, tables=tables)


def factors(tensor: QuantizedTensor, places: list[Place]) -> tuple[F32, list[F32]]:
    """What a tensor decodes to with all placed arrays 0, and what 1 in each place adds.

    Returns
    -------
    float32 [N, K], list of float32 [N, K]
    """
    blank = {p.name: np.zeros(array_of(tensor, p.name).shape, np.float32) for p in places}
    fixed, found = dequantize(filled(tensor, blank)), []
    for place in places:
        ones = {key: value.copy() for key, value in blank.items()}
        at = (...,) if place.plane is None else (..., place.plane)
        ones[place.name][at] = 1
        found.append(dequantize(filled(tensor, ones)) - fixed)
    return fixed, found


def _groups(tensor: QuantizedTensor, name: str = "scales", size: int = 0) -> list[Place]:
    n, k = tensor.codes.shape
    width = size or (k if tensor.scheme.group_size == -1 else tensor.scheme.group_size)
    return [Place(name, np.arange(n), np.arange(k) // width)]


def _bcq(tensor: QuantizedTensor) -> list[Place]:
    planes = [replace(_groups(tensor)[0], plane=plane) for plane in range(tensor.scales.shape[2])]
    return [*planes, *_groups(tensor, bcq.OFFSETS)]


def _super(tensor: QuantizedTensor) -> list[Place]:
    size = superblock.GROUP * superblock.SUPER
    return [*_groups(tensor, "scales", size), *_groups(tensor, "min_scales", size)]


def _mixed(tensor: QuantizedTensor) -> list[Place]:
    n, k = tensor.codes.shape
    places = [Place("scales", np.arange(n), np.zeros(k, np.intp))]
    if not tensor.tables["super_scales"].size:
        return places
    narrow = np.cumsum(tensor.tables["wide"] == 0) - 1  # of a 2-bit group: its number among them
    columns = np.maximum(narrow, 0)[np.arange(k) // mixed.GROUP]
    return [*places, Place("super_scales", np.arange(n) // mixed.SUPER, columns)]


def _rows(tensor: QuantizedTensor) -> list[Place]:
    n, k = tensor.codes.shape
    return [Place("scales", np.arange(n), np.zeros(k, np.intp))]


PLACES: dict[str, Callable[[QuantizedTensor], list[Place]]] = {
    "int": _groups,
    "balance": _groups,
    "nl": _groups,
    "bcq": _bcq,
    "cb": lambda tensor: _groups(tensor, "scales", tensor.scheme.group_size * superblock.SUPER),
    "super": _super,
    "mixed": _mixed,
    "anyprec": _rows,
}
"""By family."""

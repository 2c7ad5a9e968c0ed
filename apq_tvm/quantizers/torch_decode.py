"""Decoding with gradients to the float arrays of every family, codes fixed.

Every family here is linear in each of its float arrays, and a weight depends on one entry of each:
``w[n, k] = fixed[n, k] + Σ_i p_i[row_i[n], column_i[k]] * factor_i[n, k]``. The factors come from
the family's own ``dequantize``, with that array 1 and the others 0, so nothing of the formats is
written twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats import bcq, mixed, superblock
from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.torch_ops import Tensor, torch
from apq_tvm.types import QuantizedTensor

Index = NDArray[np.intp]


@dataclass(frozen=True)
class Place:
    """One float array and which entry each weight reads.

    Parameters
    ----------
    name : str
        ``"scales"`` or a table.
    rows : int [N], columns : int [K]
    plane : int or None
        Index into a third axis.
    """

    name: str
    rows: Index
    columns: Index
    plane: int | None = None


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
    narrow = np.cumsum(tensor.tables["wide"] == 0) - 1  # of a 2-bit group: its number among them
    columns = np.maximum(narrow, 0)[np.arange(k) // mixed.GROUP]
    places = [Place("scales", np.arange(n), np.zeros(k, np.intp))]
    return [*places, Place("super_scales", np.arange(n) // 16, columns)]


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
"""Float arrays that are learned, by family. Codebooks of ``cb`` belong to the whole model and are
int8, tables of ``anyprec`` to several widths at once: they stay."""


class Decoder:
    """A tensor whose float arrays can be learned.

    Parameters
    ----------
    tensor : QuantizedTensor
    name : str
        Layer, for errors.

    Raises
    ------
    BadScheme
        If the family is not known here, or decodes otherwise than described above.
    """

    def __init__(self, tensor: QuantizedTensor, name: str) -> None:
        if tensor.scheme.family not in PLACES:
            raise BadScheme(f"layer {name!r}: --learn finetune does not know {tensor.scheme}")
        self.tensor = tensor
        self.places = PLACES[tensor.scheme.family](tensor)
        names = dict.fromkeys(place.name for place in self.places)
        self.start = {key: _array(tensor, key).astype(np.float32) for key in names}
        blank = {key: np.zeros_like(value) for key, value in self.start.items()}
        fixed = dequantize(_filled(tensor, blank))
        self.fixed = torch.from_numpy(fixed)
        self.factors = []
        for place in self.places:
            ones = {key: value.copy() for key, value in blank.items()}
            at = (...,) if place.plane is None else (..., place.plane)
            ones[place.name][at] = 1
            self.factors.append(torch.from_numpy(dequantize(_filled(tensor, ones)) - fixed))
        # Steps of one size suit all arrays: each is learned relative to its own mean size.
        self.units = {key: max(float(np.abs(v).mean()), 1e-8) for key, v in self.start.items()}
        self.steps = {
            key: torch.zeros(value.shape, requires_grad=True) for key, value in self.start.items()
        }
        with torch.no_grad():
            off = (self.weight() - torch.from_numpy(dequantize(tensor))).abs().max()
        if float(off) > 1e-3 * max(float(self.factors[0].abs().max()), 1e-3):
            raise BadScheme(f"layer {name!r}: {tensor.scheme} is not linear in its scales")

    def parameters(self) -> list[Tensor]:
        """What can be learned."""
        return list(self.steps.values())

    def weight(self, _: Tensor | None = None) -> Tensor:
        """Decoded weight [N, K]."""
        arrays = {key: self._value(key) for key in self.start}
        total = self.fixed
        for place, factor in zip(self.places, self.factors, strict=True):
            array = arrays[place.name]
            array = array if place.plane is None else array[..., place.plane]
            rows = array if len(array) == len(factor) else array[torch.from_numpy(place.rows)]
            total = total + rows[:, torch.from_numpy(place.columns)] * factor
        return total

    def finish(self, _: Tensor | None = None) -> QuantizedTensor:
        """The tensor with what was learned, in float16."""
        with torch.no_grad():
            arrays = {key: self._value(key).numpy() for key in self.start}
        return _filled(self.tensor, arrays)

    def _value(self, key: str) -> Tensor:
        start = torch.from_numpy(self.start[key])
        value = start + self.steps[key] * self.units[key]
        # What was not negative stays so: formats may rely on it.
        value = value.clamp_min(0) if bool((start >= 0).all()) else value
        return value + (value.half().float() - value).detach()


def _array(tensor: QuantizedTensor, key: str) -> NDArray[Any]:
    return tensor.scales if key == "scales" else tensor.tables[key]


def _filled(tensor: QuantizedTensor, arrays: dict[str, NDArray[Any]]) -> QuantizedTensor:
    tables = {
        key: arrays[key].astype(old.dtype) if key in arrays else old
        for key, old in tensor.tables.items()
    }
    return replace(tensor, scales=arrays["scales"].astype(tensor.scales.dtype), tables=tables)

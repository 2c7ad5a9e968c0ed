"""Decoding with gradients to the float arrays of every family, codes fixed.

A family names which entry each weight reads (`apq_tvm.formats.places`), and how it enters follows
from its own decoding (`apq_tvm.quantizers.feedback.places`): nothing of any format is written here.
Widths of an any-precision tensor each have arrays of their own, but for those that divide the cells
of one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.families import dequantize, family_of
from apq_tvm.formats.places import Place, array_of, filled
from apq_tvm.quantizers.feedback.places import factors, places_of
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import F32, Array, QuantizedTensor


class Decoder:
    """A tensor whose float arrays can be learned, at every width apart.

    Parameters
    ----------
    tensor : QuantizedTensor
        Its codes stay, and what widths share.
    name : str
        Layer, for errors.

    Raises
    ------
    BadScheme
        If the family names no float arrays, or decodes otherwise than their places say.
    """

    def __init__(self, tensor: QuantizedTensor, name: str) -> None:
        self.tensor = tensor
        self._arrays: dict[str, _Array] = {}
        narrow = family_of(tensor.scheme).one_width
        self.widths = {
            bits: _Width(narrow(tensor, bits) if bits else tensor, name, self._arrays)
            for bits in tensor.scheme.widths
        }

    def rebase(self, tensor: QuantizedTensor) -> None:
        """Decode other codes of the same scheme with what was learned so far."""
        self.tensor = tensor
        narrow = family_of(tensor.scheme).one_width
        for bits, width in self.widths.items():
            width.rebase(narrow(tensor, bits) if bits else tensor)

    def go_on(self, tensor: QuantizedTensor) -> None:
        """Be as `finish` gave a tensor, in as many steps from where this one starts."""
        self.rebase(tensor)
        with torch.no_grad():
            for name, array in self._arrays.items():
                value = torch.from_numpy(array_of(tensor, name).astype(np.float32))
                array.step.copy_((value - array.start) / array.unit)

    def parameters(self) -> list[Tensor]:
        """What can be learned, of all widths."""
        return [array.step for array in self._arrays.values()]

    def read_by(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """What can be learned, each behind the widths that read it."""
        for name, array in self._arrays.items():
            yield tuple(b for b, width in self.widths.items() if name in width.names), array.step

    def weight(self, bits: int = 0) -> Tensor:
        """Decoded weight [N, K] at a width, the widest if there is no such."""
        return self.widths[bits if bits in self.widths else max(self.widths)].weight()

    def finish(self, _: Tensor | None = None) -> QuantizedTensor:
        """The tensor with what was learned, in float16."""
        arrays: dict[str, Array] = {}
        with torch.no_grad():
            for width in self.widths.values():
                arrays |= {key: width.value(key).numpy() for key in width.names}
        return filled(self.tensor, arrays)


@dataclass(frozen=True)
class _Array:
    """A float array and its steps, of which a step of 1 is its mean size: steps of one size suit
    all arrays so."""

    start: Tensor
    unit: float
    step: Tensor

    @classmethod
    def of(cls, value: F32) -> _Array:
        unit = max(float(np.abs(value).mean()), 1e-8)
        return cls(torch.from_numpy(value), unit, torch.zeros(value.shape, requires_grad=True))


class _Width:
    """What one width reads, of arrays that it may share with others."""

    def __init__(self, tensor: QuantizedTensor, name: str, arrays: dict[str, _Array]) -> None:
        self.scheme, self.settled = tensor.scheme, family_of(tensor.scheme).settled
        self.arrays = arrays
        self.rebase(tensor)
        if not self.places:
            raise BadScheme(
                f"layer {name!r}: {tensor.scheme} has no float arrays that can be learned"
            )
        self.names = list(dict.fromkeys(place.name for place in self.places))
        for key in self.names:
            if key not in arrays:
                arrays[key] = _Array.of(array_of(tensor, key).astype(np.float32))
        with torch.no_grad():
            off = (self.weight() - torch.from_numpy(dequantize(tensor))).abs().max()
        if float(off) > 1e-3 * max(float(self.factors[0].abs().max()), 1e-3):
            raise BadScheme(f"layer {name!r}: {tensor.scheme} is not linear in its scales")

    def rebase(self, tensor: QuantizedTensor) -> None:
        """What the codes of a tensor read, and what that is multiplied by."""
        self.places = places_of(tensor)
        fixed, found = factors(tensor, self.places)
        self.fixed = torch.from_numpy(fixed) if fixed.any() else None
        self.factors = [torch.from_numpy(_by_row(factor)) for factor in found]

    def weight(self) -> Tensor:
        """Decoded weight [N, K]."""
        arrays = {key: self.value(key) for key in self.names}
        total = self.fixed
        for place, factor in zip(self.places, self.factors, strict=True):
            array = arrays[place.name]
            array = array if place.plane is None else array[..., place.plane]
            part = _read(array, place) * factor
            total = part if total is None else total + part
        assert total is not None
        return total

    def value(self, key: str) -> Tensor:
        """An array as it is stored, with gradients to its steps."""
        array = self.arrays[key]
        value = array.start + array.step * array.unit
        # What was not negative stays so: formats may rely on it.
        value = value.clamp_min(0) if bool((array.start >= 0).all()) else value
        stored = self.settled(value.detach().half().numpy(), self.scheme)
        return value + (torch.from_numpy(stored).float() - value).detach()


def _read(array: Tensor, place: Place) -> Tensor:
    """The entry of an array that each weight reads, [N, K] or what broadcasts to it."""
    if place.columns.ndim == 1:
        return _spread(_spread(array, place.columns, 1), place.rows, 0)
    index = torch.from_numpy(place.columns).long()
    return torch.gather(_spread(array, place.rows, 0).expand(len(index), -1), 1, index)


def _by_row(factor: F32) -> F32:
    """[N, 1] of a factor that is the same along rows: widths are many, and each has its own."""
    return factor[:, :1].copy() if bool((factor == factor[:, :1]).all()) else factor


def _spread(array: Tensor, index: Array, axis: int) -> Tensor:
    """``array`` at `index` along an axis; groups of one size by repeating, of which the gradient
    is a plain sum."""
    size, count = array.shape[axis], len(index)
    if size == 1:
        return array
    step = int(np.searchsorted(index, 1)) or 1
    if (index == np.arange(count) // step).all():
        repeated = array.repeat_interleave(step, axis) if step > 1 else array
        return repeated.narrow(axis, 0, count)
    return array.index_select(axis, torch.from_numpy(index))

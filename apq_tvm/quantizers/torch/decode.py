"""Decoding with gradients to the float arrays of every family, codes fixed.

`apq_tvm.quantizers.feedback.places` says which entry each weight reads, and how it enters. Tables
of any-precision weights, one per width, are a class of their own.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats import anyprec
from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.feedback.places import PLACES, Index, array_of, factors, filled, places_of
from apq_tvm.quantizers.torch.ops import Tensor, torch
from apq_tvm.types import QuantizedTensor


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
        If the family is not known, or decodes otherwise than `places` says.
    """

    def __init__(self, tensor: QuantizedTensor, name: str) -> None:
        if tensor.scheme.family not in PLACES:
            raise BadScheme(f"layer {name!r}: learning scales does not know {tensor.scheme}")
        self.tensor = tensor
        self.places = places_of(tensor)
        names = dict.fromkeys(place.name for place in self.places)
        self.start = {key: array_of(tensor, key).astype(np.float32) for key in names}
        fixed, found = factors(tensor, self.places)
        self.fixed = torch.from_numpy(fixed) if fixed.any() else None
        self.factors = [torch.from_numpy(factor) for factor in found]
        # Steps of one size suit all arrays: each is learned relative to its own mean size.
        self.units = {key: _unit(value) for key, value in self.start.items()}
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

    def weight(self, bits: int = 0) -> Tensor:
        """Decoded weight [N, K]."""
        arrays = {key: self._value(key) for key in self.start}
        total = self.fixed
        for place, factor in zip(self.places, self.factors, strict=True):
            array = arrays[place.name]
            array = array if place.plane is None else array[..., place.plane]
            part = _spread(_spread(array, place.columns, 1), place.rows, 0) * factor
            total = part if total is None else total + part
        return total

    def finish(self, _: Tensor | None = None) -> QuantizedTensor:
        """The tensor with what was learned, in float16."""
        with torch.no_grad():
            arrays = {key: self._value(key).numpy() for key in self.start}
        return filled(self.tensor, arrays)

    def _value(self, key: str) -> Tensor:
        start = torch.from_numpy(self.start[key])
        value = start + self.steps[key] * self.units[key]
        # What was not negative stays so: formats may rely on it.
        value = value.clamp_min(0) if bool((start >= 0).all()) else value
        return value + (value.half().float() - value).detach()


class TableDecoder:
    """An any-precision tensor whose centroids can be learned, at every width apart.

    Parameters
    ----------
    tensor : QuantizedTensor
        Codes and the rows' scales stay, so that widths still are prefixes of each other.
    """

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.tensor, self.bits = tensor, tensor.scheme.bits
        self.codes = torch.from_numpy(tensor.codes)
        self.scales = torch.from_numpy(tensor.scales.astype(np.float32))
        self.rows = np.arange(len(tensor.codes)) // anyprec.channels_of(tensor)
        self.start = {
            b: tensor.tables[anyprec.table_name(b)].astype(np.float32) for b in tensor.scheme.widths
        }
        self.steps = {b: torch.zeros(v.shape, requires_grad=True) for b, v in self.start.items()}

    def parameters(self) -> list[Tensor]:
        """What can be learned, of all widths."""
        return list(self.steps.values())

    def weight(self, bits: int = 0) -> Tensor:
        """Decoded weight [N, K] at a width, the widest if 0."""
        bits = bits or self.bits
        table = _spread(self._table(bits), self.rows, 0).expand(len(self.rows), -1)
        index = (self.codes >> (self.bits - bits)).long()
        return torch.gather(table, 1, index) * self.scales

    def finish(self, _: Tensor | None = None) -> QuantizedTensor:
        """The tensor with the centroids that were learned."""
        arrays = {}
        with torch.no_grad():
            for bits in self.start:
                table = self._table(bits).numpy().astype(np.float16)
                whole = self.tensor.scheme.integer_acts
                arrays[anyprec.table_name(bits)] = anyprec.snap(table) if whole else table
        return filled(self.tensor, arrays)

    def _table(self, bits: int) -> Tensor:
        """Centroids [T, 2^bits] as the file holds them."""
        start = torch.from_numpy(self.start[bits])
        value = start + self.steps[bits] * _unit(self.start[bits])
        held = value.detach().half().float()
        if self.tensor.scheme.integer_acts:
            step = (held.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
            held = (torch.round(held / step) * step).half().float()
        return value + (held - value).detach()


def decoder_of(tensor: QuantizedTensor, name: str) -> Decoder | TableDecoder:
    """What learns the float arrays of a tensor.

    Raises
    ------
    BadScheme
        See `Decoder`.
    """
    return TableDecoder(tensor) if tensor.scheme.min_bits else Decoder(tensor, name)


def _unit(value: np.ndarray) -> float:
    return max(float(np.abs(value).mean()), 1e-8)


def _spread(array: Tensor, index: Index, axis: int) -> Tensor:
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

"""Decoding with gradients to the float arrays of every family, codes fixed.

`apq_tvm.quantizers.places` says which entry each weight reads, and how it enters.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.families import dequantize
from apq_tvm.quantizers.places import PLACES, array_of, factors, filled, places_of
from apq_tvm.quantizers.torch_ops import Tensor, torch
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
            raise BadScheme(f"layer {name!r}: --learn finetune does not know {tensor.scheme}")
        self.tensor = tensor
        self.places = places_of(tensor)
        names = dict.fromkeys(place.name for place in self.places)
        self.start = {key: array_of(tensor, key).astype(np.float32) for key in names}
        fixed, found = factors(tensor, self.places)
        self.fixed = torch.from_numpy(fixed)
        self.factors = [torch.from_numpy(factor) for factor in found]
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
        return filled(self.tensor, arrays)

    def _value(self, key: str) -> Tensor:
        start = torch.from_numpy(self.start[key])
        value = start + self.steps[key] * self.units[key]
        # What was not negative stays so: formats may rely on it.
        value = value.clamp_min(0) if bool((start >= 0).all()) else value
        return value + (value.half().float() - value).detach()

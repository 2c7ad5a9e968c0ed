"""Scales, offsets and centroids of least output error, codes fixed.

A decoded matrix is linear in the float arrays of its format (`apq_tvm.quantizers.feedback.places`),
so that ``(w - ŵ) H (w - ŵ)ᵀ`` is a quadratic function of them, apart for every output channel, or
for every block of channels that share a row of an array. Conjugate gradients (Hestenes and Stiefel,
1952), preconditioned by the diagonal, go down it from the present values; a step costs one product
by H, whatever the format. What then gets worse by rounding to float16 stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.families import dequantize, family_of
from apq_tvm.formats.places import Place, array_of, filled
from apq_tvm.quantizers.feedback.places import factors, places_of
from apq_tvm.types import F32, QuantizedTensor

STEPS = 2
"""Of conjugate gradients: few, since scales and codes take turns (`gptq`)."""

TINY = np.float32(1e-30)


def refit(w: F32, tensor: QuantizedTensor, hessian: F32, steps: int = STEPS) -> QuantizedTensor:
    """Move a tensor's float arrays to where its codes lose least.

    Parameters
    ----------
    w : float32 [N, K]
        What `tensor` stands for.
    tensor : QuantizedTensor
        What its family's `places` names may move; of several widths only the widest.
    hessian : float32 [K, K]
        E[x xᵀ], damped or not.
    steps : int
        Of conjugate gradients.

    Returns
    -------
    QuantizedTensor
        Of the same codes; ``(w - ŵ) H (w - ŵ)ᵀ`` is for no output channel larger than before, or
        for no block of channels that share parameters.
    """
    places = places_of(tensor)
    lengths = dict.fromkeys(len(array_of(tensor, place.name)) for place in places)
    for length in lengths:  # arrays of other rows are fitted after one another
        some = [p for p in places if len(array_of(tensor, p.name)) == length]
        tensor = _Fit(w, tensor, hessian, some).run(steps)
    return tensor


def row_errors(delta: F32, hessian: F32) -> F32:
    """E|x δᵀ|² of every row of `delta` [N, K], float32 [N]."""
    return np.asarray(np.einsum("nk,nk->n", delta @ hessian, delta), np.float32)


@dataclass
class _Slot:
    """A place in the parameters [P, Q]: [K] columns of it, or [N, K] entries of it, flat."""

    columns: NDArray[np.intp]
    factor: F32
    flat: NDArray[np.intp] | None


class _Fit:
    """Arrays of one tensor that have the same rows, side by side as parameters [P, Q]."""

    def __init__(self, w: F32, tensor: QuantizedTensor, hessian: F32, places: list[Place]) -> None:
        self.w, self.tensor, self.hessian = w, tensor, hessian
        self.fixed, found = factors(tensor, places)
        self.rows = places[0].rows
        self.spans: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.slots, parts, at = [], [], 0
        for place, factor in zip(places, found, strict=True):
            array = array_of(tensor, place.name)
            if place.name not in self.spans:
                parts.append(array.reshape(len(array), -1).astype(np.float32))
                self.spans[place.name] = slice(at, at + parts[-1].shape[1]), array.shape
                at += parts[-1].shape[1]
            depth = 1 if place.plane is None else array.shape[2]
            first = self.spans[place.name][0].start + (place.plane or 0)
            columns = first + place.columns.astype(np.intp) * depth
            self.slots.append(_Slot(columns, factor, None))
        self.start = np.concatenate(parts, axis=1)
        for slot in self.slots:
            if slot.columns.ndim == 2:
                slot.flat = self.rows[:, None] * self.start.shape[1] + slot.columns
        self.apart = len(self.start) == len(w)  # every output channel for itself

    def run(self, steps: int) -> QuantizedTensor:
        """The tensor with what was found, block by block where it is better."""
        before: F32 = dequantize(self.tensor) - self.w
        product: F32 = before @ self.hessian
        found = self._descend(-self._back(product), steps)
        arrays, settled = {}, family_of(self.tensor.scheme).settled
        for key, (span, shape) in self.spans.items():
            old, new = array_of(self.tensor, key), found[:, span].reshape(shape)
            new = np.maximum(new, 0) if bool((old >= 0).all()) else new  # formats may rely on it
            with np.errstate(over="ignore"):
                new = new.astype(old.dtype)
            new = np.where(np.isfinite(new), new, old)
            arrays[key] = settled(new, self.tensor.scheme)
        after = dequantize(filled(self.tensor, arrays)) - self.w
        gain = np.einsum("nk,nk->n", before, product) - row_errors(after, self.hessian)
        better = self._per_block(gain[:, None])[:, 0] > 0
        for key, new in arrays.items():
            arrays[key] = array_of(self.tensor, key).copy()
            arrays[key][better] = new[better]
        return filled(self.tensor, arrays)

    def _descend(self, residual: F32, steps: int) -> F32:
        """Parameters after some steps from `start`, for a negative gradient [P, Q]."""
        scale: F32 = np.maximum(self._curvature(), TINY)
        x = self.start.copy()
        direction: F32 = residual / scale
        length = (residual * direction).sum(1)
        for _ in range(steps):
            curved = self._back(self._forth(direction) @ self.hessian)
            slope = (direction * curved).sum(1)
            step = np.divide(length, slope, out=np.zeros_like(length), where=slope > TINY)
            x += step[:, None] * direction
            residual = residual - step[:, None] * curved
            steepest: F32 = residual / scale
            now = (residual * steepest).sum(1)
            turn = np.divide(now, length, out=np.zeros_like(now), where=length > TINY)
            direction, length = steepest + turn[:, None] * direction, now
        return x

    def _forth(self, parameters: F32) -> F32:
        """What parameters [P, Q] add to the decoded weights, [N, K]."""
        total = np.zeros(self.w.shape, np.float32)
        for slot in self.slots:
            if slot.flat is not None:
                total += np.take(parameters.reshape(-1), slot.flat) * slot.factor
            else:
                wide = np.take(parameters, slot.columns, axis=1)
                total += (wide if self.apart else wide[self.rows]) * slot.factor
        return total

    def _back(self, values: F32) -> F32:
        """The transpose of `_forth`: values [N, K] summed into parameters [P, Q]."""
        return self._summed([values * slot.factor for slot in self.slots])

    def _curvature(self) -> F32:
        """The diagonal of the quadratic form but for the products between weights, [P, Q]."""
        diagonal = self.hessian.diagonal()
        return self._summed([slot.factor * slot.factor * diagonal for slot in self.slots])

    def _summed(self, products: list[F32]) -> F32:
        total: F32 = np.zeros_like(self.start)
        for slot, product in zip(self.slots, products, strict=True):
            if slot.flat is not None:
                sums = np.bincount(slot.flat.reshape(-1), product.reshape(-1), total.size)
                total += sums.reshape(total.shape)
                continue
            first = np.flatnonzero(np.diff(slot.columns, prepend=-1))
            parts: F32 = np.add.reduceat(product, first, axis=1)
            total[:, slot.columns[first]] += self._per_block(parts)
        return total

    def _per_block(self, values: F32) -> F32:
        """Rows [N, ...] summed over the channels that share parameters, [P, ...]."""
        if self.apart:
            return values
        first = np.flatnonzero(np.diff(self.rows, prepend=-1))
        return np.asarray(np.add.reduceat(values, first, axis=0), np.float32)

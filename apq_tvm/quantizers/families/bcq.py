"""Binary codes by alternating least squares: scales to the codes, then codes to the scales.

After Xu et al., "Alternating Multi-bit Quantization for Recurrent Neural Networks" (ICLR 2018),
which LUT-GEMM quantizes with (its reference 54), plus an offset per group and weights' importance.
For every group the squared error Σ_k h_k (w_k - Σ_i alpha_i b_ik - z)² is reduced in turns:

1. The codes are fixed: alpha and z solve q + 1 normal equations. The sums over a group depend on
   its weights only through the sums of h and h w per code, so a group costs two histograms and
   then 2^q rows instead of its weights.
2. alpha and z are fixed, rounded to float16: every weight takes the nearest of the 2^q sorted sums,
   by comparison with their midpoints, in a binary search where there are many.

Starts are the conversion of searched uniform rounding and the greedy codes (the sign of what is
left, plane by plane). Every round's float16 parameters are judged by their exact error, and the
best ever met is kept, so the result is never worse than any start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats import bcq
from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.integer import MAX_SCALE
from apq_tvm.quantizers.families import rtn
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, F64, LayerStats, QuantizedTensor, Scheme

Codes = NDArray[np.intp]

CHUNK = 1 << 16
"""Weights quantized at a time: work arrays stay in a second-level cache."""

ROUNDS = 12
"""Most rounds from each start."""

ROUNDS_WIDE = 2
"""The same above `COMPARED` bits: scales of so many planes gain next to nothing over uniform ones
(8 bits, groups of 128: the error stays at 3e-5 of the weights), and rounds cost more."""

ENOUGH = 2e-3
"""A group is done when a round takes less than this part off its error."""

COMPARED = 5
"""Up to so many bits weights are compared with every midpoint; a binary search needs fewer steps,
but each looks up a midpoint."""

RIDGE = 1e-9
"""Of the normal equations' trace, added to their diagonal to keep them solvable: codes that a group
does not use, or planes that are equal, leave directions undetermined."""

UNIMPORTANT = 1e-6
"""Least importance of a weight, as a part of its group's mean."""


def quantize_tensor(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one weight matrix.

    Parameters
    ----------
    w : float32 [N, K]
        Finite.
    scheme : Scheme
        Of the family ``bcq``.
    name : str
        For errors.
    context : QuantContext
        Without `search`, plain uniform rounding is converted. Statistics weigh the errors: Fisher
        information where it is known, else E[x^2] of the layer's inputs.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    BadScheme
        If a scale or offset overflows float16.
    """
    uniform = Scheme(scheme.bits, True, group_size=scheme.group_size)
    rounded = rtn.quantize_tensor(w, uniform, name, context.search)
    start = bcq.from_uniform(rounded, scheme.act_bits)
    if not context.search:
        return start
    n, k = w.shape
    groups, planes = group_count(k, scheme.group_size), _Planes.of(scheme.bits)
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, groups, scheme.bits), np.float16)
    offsets = np.empty((n, groups), np.float16)
    for rows, columns, first, width in _parts(n, k, scheme.group_size):
        count = (columns.stop - columns.start) // width
        span = (rows, slice(first, first + count))
        importance = _importance(context.stats, rows, columns, width)
        work = _Groups.of(w[rows, columns].reshape(-1, width), importance, planes)
        best = _search(work, [_joined(start, span), work.greedy()])
        if not np.isfinite(best).all():
            raise BadScheme(
                f"{name}: a scale of {scheme} exceeds {MAX_SCALE:.0f}, the largest float16: "
                "weights are too large; keep this tensor float (--tensor-type NAME=float)"
            )
        codes[rows, columns] = work.codes(best).reshape(rows.stop - rows.start, -1)
        scales[span] = best[:, :-1].reshape(-1, count, scheme.bits)
        offsets[span] = best[:, -1].reshape(-1, count)
    return QuantizedTensor(codes, scales, None, scheme, {bcq.OFFSETS: offsets})


def _parts(n: int, k: int, group_size: int) -> Iterator[tuple[slice, slice, int, int]]:
    """(rows, columns, first group, group width) of chunks; a short last group is its own chunk."""
    width = k if group_size == -1 else min(group_size, k)
    whole = k // width * width
    step = max(1, CHUNK // k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        yield rows, slice(0, whole), 0, width
        if whole < k:
            yield rows, slice(whole, k), whole // width, k - whole


def _importance(stats: LayerStats | None, rows: slice, columns: slice, width: int) -> F64 | None:
    """Importance of every weight [groups, width], of mean 1; None where all are equal."""
    if stats is None:
        return None
    if stats.fisher is not None:
        values = stats.fisher[rows, columns]
    else:
        values = np.broadcast_to(
            stats.mean_square[columns], (rows.stop - rows.start, columns.stop - columns.start)
        )
    values = values.reshape(-1, width).astype(np.float64)
    mean = values.mean(axis=1, keepdims=True)
    known = np.isfinite(mean) & (mean > 0)
    relative = np.divide(values, mean, out=np.ones_like(values), where=known)
    return np.asarray(relative + UNIMPORTANT)


def _joined(tensor: QuantizedTensor, span: tuple[slice, slice]) -> F64:
    """Parameters [groups, q + 1] of some rows and groups: scales, lowest first, and the offset."""
    parts = (tensor.scales[span], tensor.tables[bcq.OFFSETS][span][..., None])
    return np.concatenate(parts, axis=-1).astype(np.float64).reshape(-1, tensor.scheme.bits + 1)


def _search(work: _Groups, starts: list[F64]) -> F64:
    """Parameters of least error of every group, from several starts in turns."""
    best = starts[0].copy()
    least = np.full(len(best), np.inf)
    for start in starts:
        part, at, now = work, np.arange(len(best)), start
        last = np.full(len(best), np.inf)
        for _ in range(ROUNDS if work.bits <= COMPARED else ROUNDS_WIDE):
            fit = part.fit(now)
            better = np.asarray(fit.error < least[at])
            best[at[better]], least[at[better]] = now[better], fit.error[better]
            going = np.asarray((fit.error > 0) & (last - fit.error > ENOUGH * fit.error))
            if not going.any():
                break
            last, now, at = fit.error[going], _canonical(fit.solution[going]), at[going]
            if not going.all():
                part = part.take(going)
    return best


def _canonical(parameters: F64) -> F64:
    """Float16 values of parameters, scales positive and in ascending order.

    The sign and the order of scales only rename the codes.
    """
    ordered = np.concatenate((np.sort(np.abs(parameters[:, :-1])), parameters[:, -1:]), axis=1)
    with np.errstate(over="ignore"):
        return ordered.astype(np.float16).astype(np.float64)


@dataclass(frozen=True)
class _Fit:
    """Nearest codes under some parameters: their error, and the best parameters for them."""

    error: F64
    solution: F64


@dataclass(frozen=True)
class _Planes:
    """Signs of the planes (and 1 for the offset) in every code [2^q, q + 1], and their products."""

    signs: F64
    pairs: F64

    @classmethod
    def of(cls, bits: int) -> _Planes:
        codes = np.arange(1 << bits)
        signs = [(codes >> plane & 1) * 2.0 - 1 for plane in range(bits)]
        design = np.stack([*signs, np.ones(1 << bits)], axis=1)
        pairs = design[:, :, None] * design[:, None, :]
        return cls(design, pairs.reshape(len(design), -1))


@dataclass(frozen=True)
class _Groups:
    """Groups of weights [G, width] with their importance h, or None, and sums of h w and h w^2."""

    w: F32
    h: F64 | None
    hw: F64
    squares: F64
    planes: _Planes

    @classmethod
    def of(cls, w: F32, importance: F64 | None, planes: _Planes) -> _Groups:
        wide = w.astype(np.float64)
        hw = wide if importance is None else wide * importance
        return cls(w, importance, hw, (hw * wide).sum(axis=1), planes)

    def take(self, which: NDArray[np.bool_]) -> _Groups:
        """Some of the groups."""
        h = None if self.h is None else self.h[which]
        return _Groups(self.w[which], h, self.hw[which], self.squares[which], self.planes)

    @property
    def bits(self) -> int:
        """q."""
        return int(self.planes.signs.shape[1]) - 1

    def greedy(self) -> F64:
        """Parameters of the greedy codes: mean, then the mean size of what is left."""
        rest = self.w.astype(np.float64)
        parameters = np.empty((len(rest), self.bits + 1))
        parameters[:, -1:] = self._mean(rest)
        rest -= parameters[:, -1:]
        for plane in reversed(range(self.bits)):
            np.abs(rest, out=rest)  # its signs are the plane; what they were no longer matters
            scale = self._mean(rest)
            parameters[:, plane : plane + 1] = scale
            rest -= scale
        return _canonical(parameters)

    def _mean(self, values: F64) -> F64:
        if self.h is None:
            return np.asarray(values.mean(axis=1, keepdims=True))
        total = (values * self.h).sum(axis=1, keepdims=True)
        return np.asarray(total / self.h.sum(axis=1, keepdims=True))

    def _order(self, parameters: F64) -> tuple[F64, Codes]:
        """Sums of every group in ascending order [G, 2^q], and their codes."""
        sums = parameters @ self.planes.signs.T
        order = np.argsort(sums, axis=1, kind="stable")
        return np.take_along_axis(sums, order, axis=1), order

    def _nearest(self, sums: F64) -> NDArray[np.int64]:
        """Places [G, width] of the nearest of ascending sums."""
        middles = ((sums[:, 1:] + sums[:, :-1]) / 2).astype(np.float32)
        if self.bits <= COMPARED:
            above = np.zeros(self.w.shape, np.uint8)
            for column in range(middles.shape[1]):
                above += self.w > middles[:, column : column + 1]
            return above.astype(np.int64)
        ends = np.full((len(middles), 1), np.inf, np.float32)
        flat = np.concatenate((middles, ends), axis=1).ravel()
        first = (np.arange(len(middles)) << self.bits)[:, None]
        place = np.zeros(self.w.shape, np.int64) + first
        for bit in reversed(range(self.bits)):
            step = 1 << bit
            place += step * (self.w > flat[place + (step - 1)])
        return np.asarray(place - first)

    def codes(self, parameters: F64) -> NDArray[np.uint8]:
        """Nearest codes [G, width]."""
        sums, order = self._order(parameters)
        place = self._nearest(sums)
        return np.take_along_axis(order, place, axis=1).astype(np.uint8)

    def fit(self, parameters: F64) -> _Fit:
        """Take the nearest codes; their error and their best parameters (not rounded)."""
        finite = np.asarray(np.isfinite(parameters).all(axis=1))
        parameters = np.where(finite[:, None], parameters, 0.0)
        sums, order = self._order(parameters)
        place = self._nearest(sums)
        by_level = self.w.shape[1] >= sums.shape[1]
        equations = self._by_level if by_level else self._by_weight
        error, matrix, right = equations(sums, order, place)
        size = self.bits + 1
        ridge = RIDGE * np.trace(matrix, axis1=1, axis2=2)
        # Relative to where we are: what the codes leave undetermined stays as it is.
        left = right - (matrix @ parameters[:, :, None])[..., 0]
        matrix += ridge[:, None, None] * np.eye(size)
        solution = parameters + np.linalg.solve(matrix, left[:, :, None])[..., 0]
        return _Fit(np.where(finite, np.maximum(error, 0), np.inf), solution)

    def _by_level(self, sums: F64, order: Codes, place: Codes) -> tuple[F64, F64, F64]:
        """Error, matrix and right side of the normal equations, from histograms."""
        shape = groups, levels = sums.shape
        at = (place + (np.arange(groups) * levels)[:, None]).ravel()
        weights = None if self.h is None else self.h.ravel()
        counts = np.bincount(at, weights, groups * levels).reshape(shape).astype(np.float64)
        totals = np.bincount(at, self.hw.ravel(), groups * levels).reshape(shape)
        error = self.squares - 2 * (sums * totals).sum(1) + (sums * sums * counts).sum(1)
        by_code = np.empty_like(counts), np.empty_like(totals)
        np.put_along_axis(by_code[0], order, counts, axis=1)
        np.put_along_axis(by_code[1], order, totals, axis=1)
        size = self.bits + 1
        matrix = (by_code[0] @ self.planes.pairs).reshape(-1, size, size)
        return error, matrix, by_code[1] @ self.planes.signs

    def _by_weight(self, sums: F64, order: Codes, place: Codes) -> tuple[F64, F64, F64]:
        """The same weight by weight, where groups have fewer weights than sums."""
        rest = self.w - np.take_along_axis(sums, place, axis=1)
        signs = self.planes.signs[np.take_along_axis(order, place, axis=1)]  # [G, width, q + 1]
        weighted = signs if self.h is None else signs * self.h[..., None]
        squares = rest * rest if self.h is None else rest * rest * self.h
        right = (self.hw[:, None] @ signs)[:, 0]
        return squares.sum(axis=1), weighted.transpose(0, 2, 1) @ signs, right

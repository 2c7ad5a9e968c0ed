"""Uniform super-blocks: steps and minima by weighted least squares, then 4-bit parts of them.

1. Every group alone: a grid of steps, codes from the group's least weight (or 0, if that is less)
   up, and the step and minimum that least squares gives for those codes; the best stays.
2. The super-block's two scales make the largest step and the largest minimum 15.
3. A few rounds: the sub-scales and minima next to the wanted ones, the best pair of which stays;
   then both scales are refitted together (two unknowns) and rounded to float16.

llama.cpp's quantization of such blocks searches in this spirit (make_qkx2_quants, ggml-quants.c).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.superblock import GROUP, SUB_MAX, SUPER, supers
from apq_tvm.quantizers.families.codebook import round_scales
from apq_tvm.quantizers.families.codebook_groups import TINY, Chunk, chunks, importance
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, U8, Array, QuantizedTensor, Scheme

SHIFTS = (-0.6, -0.35, -0.1, 0.15, 0.4, 0.65)
"""Steps tried: the range of a group is so many codes longer than the largest code."""

ROUNDS = 3
"""Choices of sub-scales and minima, each followed by a refit of the scales but the last."""

NEAR = (0, -1, 1)
"""Sub-scales and minima tried, relative to the nearest one."""


def quantize_tensor(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one matrix.

    Raises
    ------
    UnsupportedModel
        If a weight is NaN or infinite.
    BadScheme
        If a scale overflows float16.
    """
    n, k = w.shape
    per_row = supers(k) * SUPER
    codes = np.empty((n, k), np.uint8)
    scales, min_scales = (np.empty((n, per_row // SUPER), np.float16) for _ in range(2))
    subs, mins = (np.empty((n, group_count(k, GROUP)), np.uint8) for _ in range(2))
    h = importance(context.stats, (n, k)) if context.search else None
    for chunk in chunks(w, h, GROUP, per_row, name):
        search = _Search(chunk, (1 << scheme.bits) - 1, name)
        search.run(context.search)
        at = chunk.rows
        codes[at] = chunk.put(search.codes(), k)
        scales[at], min_scales[at] = search.stored
        for target, found in ((subs, search.sub), (mins, search.least)):
            target[at] = found.reshape(chunk.count, per_row)[:, : target.shape[1]]
    tables: dict[str, Array] = {"min_scales": min_scales, "subs": subs, "mins": mins}
    return QuantizedTensor(codes, scales, None, scheme, tables)


@dataclass
class _Sums:
    """Weighted sums of every group: Σh, Σhw are of the weights, the others of the codes too."""

    c: F32
    cc: F32
    wc: F32

    @classmethod
    def zeros(cls, count: int) -> _Sums:
        return cls(*(np.zeros(count, np.float32) for _ in range(3)))

    def take(self, other: _Sums, where: NDArray[np.bool_]) -> None:
        for mine, new in ((self.c, other.c), (self.cc, other.cc), (self.wc, other.wc)):
            np.copyto(mine, new, where=where)


class _Search:
    """State of the super-blocks of one chunk; per-group arrays are [rows * G]."""

    def __init__(self, chunk: Chunk, top: int, name: str) -> None:
        self.chunk, self.top, self.name = chunk, np.float32(top), name
        self.groups = chunk.groups
        w, h = self.groups.w, self.groups.h
        ones = np.ones_like(w) if h is None else h
        self.h1 = ones.sum(axis=0)
        self.hw = np.einsum("kg,kg->g", ones, w)
        count = w.shape[1]
        self.sub, self.least = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        self.sums = _Sums.zeros(count)

    def run(self, search: bool) -> None:
        """Choose everything."""
        step, minimum = self._alone(SHIFTS if search else (0.0,))
        shape = (self.chunk.count, -1, SUPER)
        most = np.float32(SUB_MAX)
        self._set_scales(
            step.reshape(shape).max(axis=2) / most, minimum.reshape(shape).max(axis=2) / most
        )
        for round_ in range(ROUNDS if search else 1):
            if round_:
                self._refit()
                step, minimum = self._values()
            self._choose(step, minimum, NEAR if search else (0,))

    def codes(self) -> U8:
        """Codes [16, rows * G] of what was chosen."""
        self._encode(*self._values())
        return self.groups.decoded.astype(np.uint8)

    def _encode(self, step: F32, minimum: F32) -> None:
        """Nearest codes, into ``groups.decoded``."""
        codes = self.groups.decoded
        factor = np.float32(1) / np.where(step == 0, np.float32(np.inf), step)
        np.add(self.groups.w, minimum, out=codes)
        codes *= factor
        np.rint(codes, out=codes)
        np.clip(codes, 0, self.top, out=codes)

    def _try(self, step: F32, minimum: F32) -> _Sums:
        self._encode(step, minimum)
        work = self.groups
        wc, cc = work.products(work.w), work.products(work.decoded)
        if work.h is None:
            return _Sums(work.decoded.sum(axis=0), cc, wc)
        return _Sums(np.einsum("kg,kg->g", work.decoded, work.h), cc, wc)

    def _error(self, step: F32, minimum: F32, s: _Sums) -> F32:
        """Σ h (w - step c + minimum)², less Σ h w²."""
        line = step * (step * s.cc - 2 * s.wc - 2 * minimum * s.c)
        return np.asarray(line + minimum * (minimum * self.h1 + 2 * self.hw))

    def _alone(self, shifts: tuple[float, ...]) -> tuple[F32, F32]:
        """Best step and minimum of every group by itself."""
        low = np.minimum(self.groups.w.min(axis=0), np.float32(0))
        span = self.groups.w.max(axis=0) - low
        error = np.full_like(low, np.inf)
        step, minimum = np.zeros_like(low), np.zeros_like(low)
        for shift in shifts:
            trial = span / (self.top + np.float32(shift))
            s = self._try(trial, -low)
            fit, least = self._fit(s)
            found = self._error(fit, least, s)
            better = found < error
            np.copyto(error, found, where=better)
            np.copyto(step, fit, where=better)
            np.copyto(minimum, least, where=better)
        return step, minimum

    def _fit(self, s: _Sums) -> tuple[F32, F32]:
        """Step and minimum, neither negative, of least error for given codes."""
        det = s.cc * self.h1 - s.c * s.c
        inverse = np.where(det > 1e-6 * s.cc * self.h1, 1 / np.maximum(det, TINY), 0)
        step = (s.wc * self.h1 - s.c * self.hw) * inverse
        minimum = (s.c * s.wc - s.cc * self.hw) * inverse
        lone = (minimum <= 0) | (step <= 0)
        # Where one of them is 0: the other alone, whichever explains more of the weights.
        alone = np.maximum(s.wc, 0) / np.maximum(s.cc, TINY)
        constant = np.maximum(-self.hw, 0) / np.maximum(self.h1, TINY)
        level = lone & (constant * constant * self.h1 > alone * alone * s.cc)
        step = np.where(lone, np.where(level, 0, alone), step)
        minimum = np.where(lone, np.where(level, constant, 0), minimum)
        return step.astype(np.float32), minimum.astype(np.float32)

    def _set_scales(self, scale: F32, min_scale: F32) -> None:
        """Round the super-blocks' scales [rows, S] as they will be stored."""
        norm = self.chunk.norm
        self.stored = tuple(round_scales(s, norm, self.name) for s in (scale, min_scale))
        self.units = tuple((s.astype(np.float64) / norm).astype(np.float32) for s in self.stored)

    def _per_group(self, values: F32) -> F32:
        return np.repeat(values.ravel(), SUPER)

    def _values(self) -> tuple[F32, F32]:
        """Step and minimum of every group as stored."""
        unit, min_unit = map(self._per_group, self.units)
        return unit * self.sub.astype(np.float32), min_unit * self.least.astype(np.float32)

    def _choose(self, step: F32, minimum: F32, near: tuple[int, ...]) -> None:
        """Sub-scale and minimum of least error, next to the wanted ones, for every group."""
        unit, min_unit = map(self._per_group, self.units)
        nearest = np.rint(np.divide(step, unit, out=np.zeros_like(step), where=unit > 0))
        lowest = np.rint(np.divide(minimum, min_unit, out=np.zeros_like(step), where=min_unit > 0))
        best = np.full_like(step, np.inf)
        for shift in near:
            for drop in near:
                sub = np.clip(nearest + np.float32(shift), 0, SUB_MAX)
                least = np.clip(lowest + np.float32(drop), 0, SUB_MAX)
                s = self._try(sub * unit, least * min_unit)
                error = self._error(sub * unit, least * min_unit, s)
                better = error < best
                np.copyto(best, error, where=better)
                np.copyto(self.sub, sub.astype(np.uint8), where=better)
                np.copyto(self.least, least.astype(np.uint8), where=better)
                self.sums.take(s, better)

    def _refit(self) -> None:
        """Both scales of every super-block, by least squares for the codes chosen."""
        shape = (self.chunk.count, -1, SUPER)
        s, x, y = self.sums, self.sub.astype(np.float32), self.least.astype(np.float32)

        def total(values: F32) -> F32:
            return np.asarray(values.reshape(shape).sum(axis=2))

        xx, xy, yy = total(x * x * s.cc), total(x * y * s.c), total(y * y * self.h1)
        wx, wy = total(x * s.wc), total(y * self.hw)
        det = xx * yy - xy * xy
        usable = det > 1e-6 * xx * yy
        inverse = np.where(usable, 1 / np.maximum(det, TINY), 0)
        scale, min_scale = (wx * yy - wy * xy) * inverse, (wx * xy - wy * xx) * inverse
        usable &= (scale > 0) & (min_scale > 0)
        now, now_min = self.units
        self._set_scales(np.where(usable, scale, now), np.where(usable, min_scale, now_min))

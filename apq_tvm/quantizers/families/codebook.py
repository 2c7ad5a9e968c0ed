"""Fine-grained codebooks: codes, codebook and sub-scale of every group by least error.

Given the codebooks (`apq_tvm.quantizers.families.codebook_learn`), a super-block is quantized so:

1. every group alone: for each codebook and a grid of steps, the nearest centroids and the error
   that a least-squares refit of the step leaves; the best step is kept;
2. the super-block's scale makes the largest step sub-scale 15;
3. a few rounds: for every group the sub-scales around its step with every codebook, the best of
   which stays; then the scale is refitted to all choices by least squares and rounded to float16.

Errors are weighted by `codebook_groups.importance` (Algorithm 1 of Gope et al. matches codebooks by
their distribution, then by least error; sections 5.2, 5.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.codebook import MAX_CENTROID, UNIT, check_codebooks, codebook_count
from apq_tvm.formats.superblock import SUB_MAX, SUPER, supers
from apq_tvm.quantizers.families.codebook_groups import TINY, Chunk, Lookup, chunks, importance
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, QuantizedTensor, Scheme

RATIOS = (1.3, 1.12, 1.0, 0.9, 0.78, 0.65)
"""Steps tried first, relative to the one that puts a group's largest weight on the largest
centroid there may be."""

ROUNDS = 3
"""Choices of sub-scales and codebooks, each followed by a refit of the scale but the last."""

NEAR = (0, -1, 1)
"""Sub-scales tried, relative to the nearest one."""


def quantize_tensor(w: F32, scheme: Scheme, name: str, context: QuantContext) -> QuantizedTensor:
    """Quantize one matrix with the model's codebooks, ``context.shared`` int8 [C, 2^bits].

    Raises
    ------
    UnsupportedModel
        If a weight is NaN or infinite.
    BadScheme
        If a scale overflows float16, or the codebooks are none of the scheme's.
    """
    codebooks, size = context.shared, scheme.group_size
    check_codebooks(f"{name}: codebooks", codebooks, scheme.bits, codebook_count(scheme))
    n, k = w.shape
    tables = [Lookup.of(table) for table in codebooks]
    per_row = supers(k, size) * SUPER
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, per_row // SUPER), np.float16)
    subs, index = (np.empty((n, group_count(k, size)), np.uint8) for _ in range(2))
    h = importance(context.stats, (n, k)) if context.search else None
    for chunk in chunks(w, h, size, per_row, name):
        search = _Search(chunk, tables, name, MAX_CENTROID[scheme.bits])
        search.run(context.search)
        at = chunk.rows
        codes[at] = chunk.put(search.codes(), k)
        scales[at] = search.scale
        for target, found in ((subs, search.sub), (index, search.index)):
            target[at] = found.reshape(chunk.count, per_row)[:, : target.shape[1]]
    stored = {"subs": subs, "index": index, "codebooks": codebooks}
    return QuantizedTensor(codes, scales, None, scheme, stored)


def round_scales(scale: F32, norm: F32, name: str) -> NDArray[np.float16]:
    """Scales of weights divided by `norm`, as the format stores them.

    Raises
    ------
    BadScheme
        If one overflows float16.
    """
    with np.errstate(over="ignore"):
        stored = (scale.astype(np.float64) * norm).astype(np.float16)
    if not np.isfinite(stored).all():
        raise BadScheme(
            f"{name}: a scale exceeds 65504, the largest float16, because its weights are too "
            "large; keep this tensor float (--tensor-type NAME=float)"
        )
    return np.asarray(stored)


class _Search:
    """State of the super-blocks of one chunk; per-group arrays are [rows * G]."""

    def __init__(self, chunk: Chunk, tables: list[Lookup], name: str, largest: int) -> None:
        self.chunk, self.tables, self.name, self.largest = chunk, tables, name, largest
        self.groups = chunk.groups
        self.peak: F32 = np.abs(self.groups.w).max(axis=0)
        count = self.peak.shape[0]
        self.sub = np.zeros(count, np.uint8)
        self.index = np.zeros(count, np.uint8)
        self.wc, self.cc = np.zeros(count, np.float32), np.zeros(count, np.float32)

    def run(self, search: bool) -> None:
        """Choose everything."""
        step = self._alone(RATIOS if search else (1.0,))
        most = step.reshape(self.chunk.count, -1, SUPER).max(axis=2)  # [rows, S]
        self._set_scale(most / np.float32(SUB_MAX * UNIT))
        for round_ in range(ROUNDS if search else 1):
            if round_:
                self._refit()
                step = self._step()
            self._choose(step, NEAR if search else (0,))

    def codes(self) -> NDArray[np.uint8]:
        """Codes [size, rows * G] of what was chosen."""
        step = self._step()
        codes = np.zeros(self.groups.w.shape, np.uint8)
        for j, table in enumerate(self.tables):
            mine = self.index == j
            if mine.any():
                part = self.groups.of(np.ascontiguousarray(self.groups.w[:, mine]), None)
                codes[:, mine] = part.codes(step[mine], table)
        return codes

    def _alone(self, ratios: tuple[float, ...]) -> F32:
        """Best step of every group by itself."""
        best = np.zeros_like(self.peak)
        gain = np.zeros_like(self.peak)
        for table in self.tables:
            for ratio in ratios:
                step = self.peak * np.float32(ratio / self.largest)
                wc, cc = self.groups.sums(step, table)
                drop = wc * wc / np.maximum(cc, TINY)  # what the error is below Σ h w²
                better = (drop > gain) & (wc > 0)
                np.copyto(gain, drop, where=better)
                np.copyto(best, wc / np.maximum(cc, TINY), where=better)
        return best

    def _set_scale(self, scale: F32) -> None:
        """Round the super-blocks' scales [rows, S] as they will be stored."""
        self.scale = round_scales(scale, self.chunk.norm, self.name)
        self.unit = (self.scale.astype(np.float64) / self.chunk.norm * UNIT).astype(np.float32)

    def _per_group(self, values: F32) -> F32:
        return np.asarray(np.repeat(values.ravel(), SUPER))

    def _step(self) -> F32:
        return np.asarray(self._per_group(self.unit) * self.sub.astype(np.float32))

    def _choose(self, step: F32, near: tuple[int, ...]) -> None:
        """Sub-scale near `step` and codebook of least error for every group."""
        unit = self._per_group(self.unit)
        nearest = np.rint(np.divide(step, unit, out=np.zeros_like(step), where=unit > 0))
        best = np.zeros_like(step)  # the error, less Σ h w²: 0 is that of sub-scale 0
        self.sub[:] = 0
        self.index[:] = 0
        self.wc[:] = 0
        self.cc[:] = 0
        for shift in near:
            sub = np.clip(nearest + np.float32(shift), 0, SUB_MAX)
            trial = sub * unit
            for j, table in enumerate(self.tables):
                wc, cc = self.groups.sums(trial, table)
                error = trial * (trial * cc - 2 * wc)
                better = error < best
                np.copyto(best, error, where=better)
                np.copyto(self.wc, wc, where=better)
                np.copyto(self.cc, cc, where=better)
                np.copyto(self.sub, sub.astype(np.uint8), where=better)
                np.copyto(self.index, np.uint8(j), where=better)

    def _refit(self) -> None:
        """Scale of least error of every super-block, for the codes chosen."""
        sub = self.sub.astype(np.float32)
        shape = (self.chunk.count, -1, SUPER)
        top = (sub * self.wc).reshape(shape).sum(axis=2)
        bottom = (sub * sub * self.cc).reshape(shape).sum(axis=2)
        fit = top / np.maximum(bottom, TINY) / np.float32(UNIT)
        self._set_scale(np.where(fit > 0, fit, self.unit / np.float32(UNIT)))

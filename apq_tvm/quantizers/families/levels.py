"""Families whose codes stand for fixed values: the scale of least error for each group."""

from __future__ import annotations

import numpy as np

from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.families import family_of
from apq_tvm.formats.levels import Levels
from apq_tvm.quantizers.families.codebook import round_scales
from apq_tvm.quantizers.families.codebook_groups import TINY, Groups, Lookup, chunks, importance
from apq_tvm.quantizers.quantizer import QuantContext
from apq_tvm.types import F32, QuantizedTensor, Scheme

RATIOS = (1.25, 1.17, 1.1, 1.04, 1.0, 0.96, 0.91, 0.85, 0.78)
"""Steps tried, with both signs, relative to the one that puts a group's largest weight on the
table's largest value."""

REFITS = 2
"""Rounds of refit and rounding for the best step."""


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
    size = k if scheme.group_size == -1 else scheme.group_size
    per_row = group_count(k, size)
    levels = family_of(scheme).levels(scheme)
    assert levels is not None  # `registry.quantizer_of`
    table = Lookup.of(np.array(levels.values, np.int32))
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, per_row), np.float16)
    h = importance(context.stats, (n, k)) if context.search else None
    for chunk in chunks(w, h, size, per_row, name):
        work = chunk.groups
        step = search_steps(work, table) if context.search else _plain(work, levels)
        wide = step.reshape(chunk.count, per_row)
        scales[chunk.rows] = round_scales(wide / np.float32(levels.unit), chunk.norm, name)
        back = scales[chunk.rows].astype(np.float64) / chunk.norm * levels.unit
        codes[chunk.rows] = chunk.put(work.codes(back.astype(np.float32).ravel(), table), k)
    return QuantizedTensor(codes, scales, None, scheme)


def _plain(work: Groups, levels: Levels) -> F32:
    """Steps that put every group's largest weight on the value of largest magnitude."""
    return np.asarray(_extreme(work) / np.float32(levels.farthest))


def _extreme(work: Groups) -> F32:
    """The weight of largest magnitude of every group, with its sign."""
    at = np.abs(work.w).argmax(axis=0)
    return np.asarray(np.take_along_axis(work.w, at[None], axis=0)[0])


def search_steps(work: Groups, table: Lookup) -> F32:
    """Step of least error for every group, of either sign."""
    extreme = _extreme(work)
    best, gain = np.zeros_like(extreme), np.zeros_like(extreme)

    def attempt(step: F32) -> None:
        wc, cc = work.sums(step, table)
        drop = wc * wc / np.maximum(cc, TINY)
        better = drop > gain
        np.copyto(gain, drop, where=better)
        np.copyto(best, wc / np.maximum(cc, TINY), where=better)

    for ratio in RATIOS:
        for sign in (-1, 1):
            attempt(extreme * np.float32(sign * ratio / table.reach))
    for _ in range(REFITS):
        attempt(best.copy())
    return best

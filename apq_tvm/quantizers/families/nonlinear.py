"""Non-uniform 4-bit weights: the scale of least error for each group, and the table itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.nonlinear import MAX_VALUE, TABLE, UNIT
from apq_tvm.formats.superblock import groups
from apq_tvm.quantizers.families.codebook import round_scales
from apq_tvm.quantizers.families.codebook_groups import TINY, Groups, Lookup, chunks, importance
from apq_tvm.types import QuantizedTensor, Scheme

if TYPE_CHECKING:
    from apq_tvm.quantizers.registry import QuantContext

F32 = NDArray[np.float32]

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
    size = scheme.group_size
    per_row = groups(k, size)
    table = Lookup.of(np.array(TABLE, np.int8))
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, per_row), np.float16)
    h = importance(context.stats, (n, k)) if context.search else None
    for chunk in chunks(w, h, size, per_row, name):
        work = chunk.groups
        step = search_steps(work, table) if context.search else _plain(work)
        wide = step.reshape(chunk.count, per_row)
        scales[chunk.rows] = round_scales(wide / np.float32(UNIT), chunk.norm, name)
        back = scales[chunk.rows].astype(np.float64) / chunk.norm * UNIT
        codes[chunk.rows] = chunk.put(work.codes(back.astype(np.float32).ravel(), table), k)
    return QuantizedTensor(codes, scales, None, scheme)


def _plain(work: Groups) -> F32:
    """Steps that put every group's largest weight on the largest value, which is negative."""
    return np.asarray(_extreme(work) / np.float32(-MAX_VALUE))


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


def derive_table(samples: int = 20_000, rounds: int = 40) -> tuple[int, ...]:
    """How `TABLE` was made: Lloyd's alternation on normally distributed groups of 32.

    Every group takes the scale of least error for the present table, of either sign; every value
    moves to the mean, weighted by the squared scales, of what it stands for (Lloyd, "Least squares
    quantization in PCM", 1982, with scales). Values are kept on a grid 8 times finer than the one
    they are rounded to at the end; the side that reaches further is the negative one.
    """
    rng = np.random.default_rng(4)
    columns = rng.standard_normal((32, samples)).astype(np.float32)
    fine = MAX_VALUE * 8
    values = np.linspace(-1, 0.95, 16)
    work = Groups.of(columns, None)
    for _ in range(rounds):
        table = Lookup.of(np.rint(values * fine).astype(np.int32))
        step = search_steps(work, table)
        codes = work.codes(step, table).ravel()
        mass = np.bincount(codes, np.broadcast_to(step * step, columns.shape).ravel(), 16)
        total = np.bincount(codes, (columns * step).ravel(), 16)
        values = total / np.maximum(mass, TINY)
        values /= np.abs(values).max()
        if values.max() > -values.min():
            values = -values[::-1]
    return tuple(int(v) for v in np.rint(values * MAX_VALUE))

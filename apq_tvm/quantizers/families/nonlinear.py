"""Where the table of non-uniform 4-bit weights comes from."""

from __future__ import annotations

import numpy as np

from apq_tvm.formats.nonlinear import MAX_VALUE
from apq_tvm.quantizers.families.codebook_groups import TINY, Groups, Lookup
from apq_tvm.quantizers.families.levels import search_steps


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

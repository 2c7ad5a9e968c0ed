"""The bits of any-precision above the fifth, where cells are divided uniformly.

Half the distance between neighbours at 8 bits, h, is tried at `TRIED` values and chosen for every
cell by the weighted squared error of the widths together; then each weight takes the code that is
best for all of them (`apq_tvm.formats.anyprec_cells`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.anyprec import table_name
from apq_tvm.formats.anyprec_cells import (
    CELL_BITS,
    CELLS,
    FINE,
    HALVES,
    UNITS,
    integers,
    offsets,
)
from apq_tvm.types import F32, QuantizedTensor

TRIED = (*range(13), 14, 16, 18, 20, 22, 25, 28, 31, 34, 38, 42)
"""Values of h: all small ones, of which most cells have one, then steps of a tenth."""

WEIGHTS = {6: 2.0, 7: 1.0, 8: 1.0}
"""What the squared error of a width counts. With 1, 2 and 4 layers of SmolLM2 behind error feedback
lose 18 % at 6 bits, whose models have the least to spare, and gain 8 % at 8."""

CHUNK = 1 << 17
"""Weights that one thread works on at a time."""


def divided(w: F32, tensor: QuantizedTensor, importance: F32) -> QuantizedTensor:
    """Choose steps and codes of the widths above 5.

    Parameters
    ----------
    w : float32 [N, K]
    tensor : QuantizedTensor
        With cells to divide; its codes are of 5 bits, its tables settled.
    importance : float32 [N, K] or broadcast to it
        What an error counts, in units of a row's scale.

    Returns
    -------
    QuantizedTensor
        With codes of the scheme's widest width, of which the upper 5 bits are `tensor`'s.
    """
    codes, halves = np.empty_like(tensor.codes), np.empty((len(w), CELLS), np.uint8)
    importance = np.broadcast_to(importance, w.shape)
    step = max(1, CHUNK // w.shape[1])

    def work(first: int) -> None:
        rows = slice(first, first + step)
        tables = {key: table[rows] for key, table in tensor.tables.items()}
        part = replace(tensor, codes=tensor.codes[rows], scales=tensor.scales[rows], tables=tables)
        rest, cells = _rest(w[rows], part)
        halves[rows] = _chosen(rest, cells, importance[rows], tensor.scheme.bits)
        codes[rows] = _codes(rest, cells, halves[rows], tensor.scheme.bits)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(work, first) for first in range(0, len(w), step)]:
            done.result()
    return replace(tensor, codes=codes, tables={**tensor.tables, HALVES: halves})


def _rest(w: F32, tensor: QuantizedTensor) -> tuple[F32, NDArray[np.uint8]]:
    """Weights less their cell's centroid, in 1 / 16 of a step, and their cells."""
    scales = tensor.scales.astype(np.float32)
    unit = np.where(scales > 0, scales, np.float32(1)) / np.float32(UNITS)
    centroids = integers(tensor.tables[table_name(CELL_BITS)]).astype(np.float32)
    rest = w / unit - np.take_along_axis(centroids, tensor.codes.astype(np.intp), 1)
    return np.asarray(rest * np.float32(FINE), np.float32), tensor.codes


def _widths(bits: int) -> range:
    return range(CELL_BITS + 1, bits + 1)


def _chosen(rest: F32, cells: NDArray[np.uint8], importance: F32, bits: int) -> NDArray[np.uint8]:
    """h of every cell, uint8 [N, 32]."""
    flat = (np.arange(len(rest))[:, None] * CELLS + cells).reshape(-1)
    least = np.full(len(rest) * CELLS, np.inf)
    best = np.zeros(len(rest) * CELLS, np.uint8)
    for h in TRIED:
        cost = _cost(rest, h, bits)
        total = np.bincount(flat, (cost * importance).reshape(-1), len(least))
        better = total < least
        least[better], best[better] = total[better], h
    return best.reshape(len(rest), CELLS)


def _cost(rest: F32, h: int, bits: int) -> F32:
    """Weighted squared errors of all widths, each weight at the nearest of the widest's levels."""
    low, high = -((h + 1) >> 2) * FINE, ((h + 2) >> 2) * FINE
    left = rest - np.where(rest * 2 > low + high, np.float32(high), np.float32(low))
    cost = np.float32(WEIGHTS[6]) * left * left
    if bits >= 7:
        rest7 = np.abs(left) - np.float32(2 * h)
        cost += np.float32(WEIGHTS[7]) * rest7 * rest7
        if bits == 8:
            rest8 = np.abs(rest7) - np.float32(h)
            cost += np.float32(WEIGHTS[8]) * rest8 * rest8
    return np.asarray(cost, np.float32)


def _codes(
    rest: F32, cells: NDArray[np.uint8], halves: NDArray[np.uint8], bits: int
) -> NDArray[np.uint8]:
    """Codes of least error over all widths, uint8 [N, K]."""
    added = bits - CELL_BITS
    at = cells.astype(np.intp)
    tables = {b: offsets(halves, b).astype(np.float32) for b in _widths(bits)}
    least = np.full(rest.shape, np.inf, np.float32)
    found = np.zeros(rest.shape, np.uint8)
    for low in range(1 << added):
        cost = np.zeros_like(rest)
        for b, table in tables.items():
            level = np.take_along_axis(table[:, :, low >> (bits - b)], at, 1)
            cost += np.float32(WEIGHTS[b]) * np.square(rest - level)
        better = cost < least
        least[better], found[better] = cost[better], low
    return np.asarray((cells << np.uint8(added)) | found, np.uint8)

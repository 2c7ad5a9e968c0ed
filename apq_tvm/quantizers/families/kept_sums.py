"""Rounding that keeps the sums of rows: what a layer answers to the mean of its inputs.

Inputs behind ReLU and its kin have a mean of about the size of their deviation, and the errors of a
row's K weights add up to sqrt(K / 12) steps against it. Moving as many codes to their second
nearest value as the sum is steps away brings that below half a step; those closest to the middle
between two codes move, so that the squared error hardly grows. It needs no data: the approximation
is that of Guo et al., "SQuant: On-the-Fly Data-Free Quantization via Diagonal Hessian
Approximation", ICLR 2022, at the level of output channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from apq_tvm.types import F32, QuantizedTensor, Scheme

LEAST_BITS = 3
"""Below, a step is as large as the weights, and a code's second nearest value is no neighbour."""

MOST = 4
"""At most one code of so many moves: a row whose largest weight is clipped is left as it is."""

CHUNK = 1 << 20
"""Weights looked at together."""

Room = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Least and greatest of what each code [N, K] may become."""


def keeps_sums(scheme: Scheme) -> bool:
    """Whether rows of a scheme are rounded so that their sums stay: one scale for a whole row."""
    return scheme.group_size == -1 and scheme.bits >= LEAST_BITS


def room_of(tensor: QuantizedTensor) -> Room:
    """All codes that there are."""
    largest, shape = (1 << tensor.scheme.bits) - 1, tensor.codes.shape
    return (
        np.broadcast_to(np.uint8(0), shape),
        np.broadcast_to(np.uint8(largest), shape),
    )


def keep_row_sums(w: F32, tensor: QuantizedTensor, room: Room | None = None) -> QuantizedTensor:
    """Move a few codes by one so that the sum of each row is nearly that of its weights.

    Parameters
    ----------
    w : float32 [N, K]
    tensor : QuantizedTensor
        Uniform integers with one scale per row, rounded to nearest.
    room : Room, optional
        What codes may become.

    Returns
    -------
    QuantizedTensor
        The sum of a row differs from that of its weights by half a step, if enough codes may move.
    """
    most, (low, high) = max(1, w.shape[1] // MOST), room or room_of(tensor)
    codes = tensor.codes.copy()
    for part, scale, zero in row_parts(tensor, CHUNK):
        error = codes[part].astype(np.float32) - zero - w[part] / scale
        steps = np.rint(error.sum(1)) * (tensor.scales[part, 0] != 0)
        for row in np.flatnonzero((steps != 0) & (np.abs(steps) <= most)):
            count, sign = int(abs(steps[row])), 1 if steps[row] > 0 else -1
            stop = (low if sign > 0 else high)[part][row]
            _move(codes[part][row], error[row] * sign, count, sign, stop)
    return replace(tensor, codes=codes)


def row_parts(tensor: QuantizedTensor, weights: int) -> Iterator[tuple[slice, F32, F32]]:
    """Rows in parts of about so many weights, their scales and zero points.

    Yields
    ------
    slice, float32 [rows, 1], float32 [rows, 1]
        A scale of 0 is 1 here: there is nothing to divide.
    """
    n, k = tensor.codes.shape
    rows = max(1, weights // k)
    middle = np.full((n, 1), 1 << (tensor.scheme.bits - 1), np.float32)
    zeros = middle if tensor.zeros is None else tensor.zeros.astype(np.float32)
    scales = tensor.scales.astype(np.float32)
    usable = np.where(scales == 0, np.float32(1), scales)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        yield part, usable[part], zeros[part]


def _move(codes: np.ndarray, error: F32, count: int, sign: int, stop: np.ndarray) -> None:
    """Move the `count` codes of the largest error by `sign` towards their weights."""
    free = np.where(codes == stop, np.float32(-1), error)
    picked = np.argpartition(free, len(free) - count)[len(free) - count :]
    picked = picked[free[picked] > 0]
    codes[picked] = codes[picked].astype(np.int16) - sign

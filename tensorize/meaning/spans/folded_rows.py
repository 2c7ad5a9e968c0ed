"""What rows of activations come to mean once they are folded, in numpy.

As `apq_tvm.ops.activations.fold` computes it, operation by operation in float32, so that every
rounding falls the same way: a kernel that reads folded activations multiplies these values, and not
x as plain int8 has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.tensorize.meaning.interleaved import VECTORS
from apq_tvm.tensorize.meaning.spans.fold import Fold

UNIT = 4 * VECTORS
"""Columns of a unit."""

TINY, MOST, RANGE = 2.0**-100, 127.0, 126.5
"""As in `apq_tvm.ops.activations.quantize`: the smallest magnitude that is no zero, the largest
code, and steps from the middle of a row's range to its ends."""


@dataclass(frozen=True)
class FoldedRows:
    """How a preparation folds.

    Parameters
    ----------
    fold : Fold
    padded : int
        Columns of a row with zeros behind them.
    group : int
        Columns that share a scale.
    chunk : int
        Columns whose products are one sum of integers.
    asymmetric : bool
        Whether rows have zero points.
    """

    fold: Fold
    padded: int
    group: int
    chunk: int
    asymmetric: bool = False

    @property
    def plain(self) -> bool:
        """Whether no code depends on another: values are those of plain int8."""
        return self.fold.vectors == VECTORS

    @property
    def rounds(self) -> bool:
        """Whether what a chunk's sum is too large by is rounded to a step of a code."""
        return not self.plain and not self.fold.zeros

    def values(self, x: Any) -> tuple[Any, Any]:
        """What is multiplied, and the scales.

        Parameters
        ----------
        x : float32 [M, K]

        Returns
        -------
        float64 [M, K], float64 [M, chunks]
        """
        m, k = x.shape
        rows = np.zeros((m, self.padded), np.float32)
        rows[:, :k] = x
        grouped = rows.reshape(m, -1, self.group // UNIT, VECTORS, 4)
        scale, inverse, middle = self._range(grouped)
        means = self._means(grouped, inverse, middle) + middle
        values = means * scale.astype(np.float64)
        chunks = np.repeat(scale.reshape(m, -1), self.group // self.chunk, axis=1)
        return values.reshape(m, -1)[:, :k], chunks.astype(np.float64)

    def _range(self, rows: Any) -> tuple[Any, Any, Any]:
        """float32 [M, groups, 1, 1, 1]: scale, what codes are of x, and the middle in scales."""
        axes, step = (2, 3, 4), self.fold.vectors
        share = np.float32(2.0**-self.fold.width if step < VECTORS else 0.0)
        if self.asymmetric:
            top = np.maximum(rows.max(axes, keepdims=True), 0) * np.float32(0.5)
            low = np.minimum(rows.min(axes, keepdims=True), 0) * np.float32(0.5)
            size, most = (top - low) * (np.float32(1) + share), RANGE
        else:
            above = np.zeros_like(rows)
            above[..., : VECTORS - step, :] = rows[..., step:, :]
            exact = rows.astype(np.float64) - float(share) * above
            size, most = np.abs(exact.astype(np.float32)).max(axes, keepdims=True), MOST
        none = size < TINY
        short = (size * np.float32(1 / most)).view(np.int32) & np.int32(~3)
        scale = np.where(none, np.float32(0), short.view(np.float32))
        divisor = np.where(none, np.float32(1), size)
        inverse = np.where(none, np.float32(0), np.float32(most) / divisor)
        middle = np.rint((top + low) * inverse) if self.asymmetric else np.zeros_like(scale)
        return scale, inverse, middle

    def _means(self, rows: Any, inverse: Any, middle: Any) -> Any:
        """float64, in steps: codes with their share of those above them."""
        step, share = self.fold.vectors, 2.0**-self.fold.width
        means = np.zeros(rows.shape, np.float64)
        for vector in reversed(range(VECTORS)):
            value = rows[..., vector, :] * inverse[..., 0, :] - middle[..., 0, :]
            above = np.zeros(value.shape, np.float64)
            if vector + step < VECTORS:
                above = share * means[..., vector + step, :]
            folded = (value.astype(np.float64) - above).astype(np.float32)
            means[..., vector, :] = np.rint(folded) + above
        return means

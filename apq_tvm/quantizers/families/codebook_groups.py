"""Groups of weights side by side, and sums over what a table makes of them.

Work arrays are [code of a group, group], so that vector instructions run along the groups. With a
step per group, the table's values being integers, the nearest one to u = w / step is found by one
lookup: the thresholds between values are multiples of 1/2, so floor(2u) decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.integer import check_weight
from apq_tvm.types import F32, U8, LayerStats

CHUNK = 1 << 16
"""Weights handled at a time: work arrays stay in a second-level cache."""

TINY = np.float32(1e-30)
"""Instead of 0 in a denominator."""

LEAST_IMPORTANCE = 1e-4
"""Of a column, relative to the mean: inputs that were never seen may still come."""


def importance(stats: LayerStats | None, shape: tuple[int, int]) -> F32 | None:
    """Weight of every squared error, [K] or [N, K], mean 1; None if all count alike.

    The Fisher information of each weight where there is one, else E[x²] of its input.
    """
    if stats is None:
        return None
    values = stats.mean_square if stats.fisher is None else stats.fisher
    mean = float(values.mean(dtype=np.float64))
    if not np.isfinite(mean) or mean <= 0:
        return None
    scaled = np.maximum(values / np.float32(mean), np.float32(LEAST_IMPORTANCE))
    assert scaled.shape[-1] == shape[1]
    return np.asarray(scaled, np.float32)


@dataclass(frozen=True)
class Lookup:
    """A table of ascending integers as values and codes of every half step.

    Parameters
    ----------
    values : float32 [H], codes : uint8 [H]
        Of u in half steps from ``-reach`` on.
    reach : float
        Half the largest index.
    """

    values: F32
    codes: U8
    reach: float

    @classmethod
    def of(cls, table: NDArray[np.int8 | np.int32]) -> Lookup:
        """`table` must be ascending; equal values get the first one's code."""
        wide = table.astype(np.int32)
        reach = int(np.abs(wide).max())
        middles = wide[1:] + wide[:-1]  # in half steps
        halves = np.arange(-2 * reach, 2 * reach + 1)  # the half step [h, h + 1)
        codes = np.searchsorted(middles, halves, side="right")
        codes = np.searchsorted(wide, wide[codes])
        return cls(wide[codes].astype(np.float32), codes.astype(np.uint8), float(reach))


@dataclass
class Groups:
    """Weights of some rows, [size, groups], with their importance and work space."""

    w: F32
    h: F32 | None
    scratch: F32
    decoded: F32
    index: NDArray[np.intp]

    @classmethod
    def of(cls, w: F32, h: F32 | None) -> Groups:
        """Work space beside weights [size, groups]."""
        return cls(w, h, np.empty_like(w), np.empty_like(w), np.empty(w.shape, np.intp))

    def find(self, step: F32, lookup: Lookup) -> None:
        """Half step of every weight, for a step [groups] of each group."""
        factor = np.float32(2) / np.where(step == 0, np.float32(np.inf), step)
        np.multiply(self.w, factor, out=self.scratch)
        self.scratch += np.float32(2 * lookup.reach)
        np.clip(self.scratch, 0, 4 * lookup.reach, out=self.scratch)
        np.copyto(self.index, self.scratch, casting="unsafe")

    def sums(self, step: F32, lookup: Lookup) -> tuple[F32, F32]:
        """Σ h w c and Σ h c² of every group, c the nearest table values at `step` [groups]."""
        self.find(step, lookup)
        np.take(lookup.values, self.index, out=self.decoded, mode="clip")
        return self.products(self.w), self.products(self.decoded)

    def products(self, other: F32) -> F32:
        """Σ h decoded other of every group."""
        if self.h is None:
            return np.asarray(np.einsum("kg,kg->g", self.decoded, other))
        np.multiply(self.decoded, other, out=self.scratch)
        return np.asarray(np.einsum("kg,kg->g", self.scratch, self.h))

    def codes(self, step: F32, lookup: Lookup) -> U8:
        """Code of every weight [size, groups]."""
        self.find(step, lookup)
        return lookup.codes[self.index]


@dataclass(frozen=True)
class Chunk:
    """Rows of a matrix as groups, padded with zeros of no importance to whole super-blocks.

    Parameters
    ----------
    rows : slice
        Which rows.
    groups : Groups
        [size, rows * G].
    norm : float32 [rows, 1]
        Power of two the weights were divided by, so that none exceeds 1.
    """

    rows: slice
    groups: Groups
    norm: F32

    @property
    def count(self) -> int:
        """Rows."""
        return int(self.rows.stop) - int(self.rows.start)

    def put(self, codes: U8, k: int) -> U8:
        """Codes [size, rows * G] back as [rows, k]."""
        size = codes.shape[0]
        per_row = codes.reshape(size, self.count, -1)  # [size, rows, G]
        return np.ascontiguousarray(per_row.transpose(1, 2, 0)).reshape(self.count, -1)[:, :k]


def chunks(w: F32, h: F32 | None, size: int, per_row: int, name: str) -> Iterator[Chunk]:
    """Cut w [N, K] into rows of ``per_row * size >= K`` weights.

    Raises
    ------
    UnsupportedModel
        If a weight is NaN or infinite.
    """
    check_weight(w, name)
    n, k = w.shape
    if h is None and k % size:
        h = np.ones(k, np.float32)  # the zeros that pad a short group must not count
    width = per_row * size
    rows = max(1, CHUNK // width)
    for start in range(0, n, rows):
        at = slice(start, min(start + rows, n))
        count = at.stop - at.start
        part = np.zeros((count, width), np.float32)
        part[:, :k] = w[at]
        _, exponent = np.frexp(np.abs(part).max(axis=1, keepdims=True))
        # In float64: 2^-exponent of a denormal is no float32.
        scaled = np.ldexp(part.astype(np.float64), -exponent).astype(np.float32)
        weights = None
        if h is not None:
            weights = np.zeros((count, width), np.float32)
            weights[:, :k] = h if h.ndim == 1 else h[at]
            weights = _side_by_side(weights, size)
        norm = np.ldexp(np.ones(exponent.shape), exponent)
        yield Chunk(at, Groups.of(_side_by_side(scaled, size), weights), norm)


def _side_by_side(rows: F32, size: int) -> F32:
    """[rows, G * size] -> [size, rows * G]."""
    return np.ascontiguousarray(rows.reshape(-1, size).T)

"""What layouts share whose groups along K have scales of their own in every row."""

from __future__ import annotations

import numpy as np

from apq_tvm.codegen.layouts.layout import WeightLayout
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.types import Array


class GroupedRows(WeightLayout):
    """Blocks of R interleaved rows; K in whole units and whole groups.

    A base class; layouts say how many rows and what groups.
    """

    group_size: int
    """Weights along K that share a scale; -1 for a whole row."""

    def padded_k(self, k: int) -> int:
        """K rounded up to whole units and whole groups."""
        step = max(UNIT_K, self.group_size)
        return -(-k // step) * step

    def group_width(self, k: int) -> int:
        """Weights per scale in the packed matrix: the group size, or padded K for a whole row."""
        return self.padded_k(k) if self.group_size == -1 else self.group_size

    def groups(self, k: int) -> int:
        """Groups of a canonical row, ceil(K / group_size)."""
        return 1 if self.group_size == -1 else -(-k // self.group_size)

    def padded_groups(self, k: int) -> int:
        """Groups of a packed row, padded K / group width. May exceed `groups` for group_size 16."""
        return self.padded_k(k) // self.group_width(k)

    def interleave(self, values: Array, n: int, k: int) -> Array:
        """[N, G, ...] -> [NB, Gp, ..., R], padded with 0."""
        blocks, groups = self.row_blocks(n), self.padded_groups(k)
        padded = np.zeros((blocks * self.rows, groups, *values.shape[2:]), values.dtype)
        padded[:n, : values.shape[1]] = values
        by_block = padded.reshape(blocks, self.rows, *padded.shape[1:])
        return np.ascontiguousarray(np.moveaxis(by_block, 1, -1))

    def deinterleave(self, values: Array, n: int, k: int) -> Array:
        """Inverse of `interleave`: [NB, Gp, ..., R] -> [N, G, ...]."""
        by_block = np.moveaxis(values, -1, 1)
        rows = by_block.reshape(-1, *by_block.shape[2:])
        return np.ascontiguousarray(rows[:n, : self.groups(k)])

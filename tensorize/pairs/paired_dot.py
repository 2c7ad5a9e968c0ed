"""The meaning of a scaled dot product of one chunk as smmla computes it: pairs of rows, 8 k.

As `apq_tvm.tensorize.pairs.folded_dot`, for codes with runs of 8 k
(`apq_tvm.tensorize.meaning.interleaved`). smmla multiplies 2 rows of x by 2 rows of weights:
``sums[r] += Σ_i x[r // 2, i] w[r % 2, i]``. Several rows of x are taken in pairs, and sums stay in
that order. One row is taken as half of a pair whose other row is zeros, in two ways: above the
zeros it meets two rows of weights, below them the next two, and 4 sums share a vector.

Activations of the k from 8o on are 16 bytes, ``16o .. 16o + 15``: of two rows, or 8 zeros and those
of the one row, so that the bytes from ``16o + 8`` on are the row and the zeros that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.pairs.folded_dot import FoldedDot

BYTES = 16
"""Of activations for 8 k."""


def activation_bytes(k: int, m: int) -> int:
    """Bytes of activations of `k` columns for tiles of `m` rows, of one row or pair."""
    return 2 * k + (BYTES if m == 1 else 0)


@dataclass(frozen=True)
class PairedDot(FoldedDot):
    """Shape of one product, of a unit with runs of 8 and with 1 or an even number of rows of x.

    Parameters
    ----------
    own : bool
        Whether every vector of sums has its own copy of what it starts from.
    """

    own: bool = False

    @property
    def in_pairs(self) -> bool:
        """As smmla has them: rows of x in pairs."""
        return self.m > 1

    @property
    def pairs(self) -> int:
        """Pairs of rows of x; 1 also for one row."""
        return max(1, self.m // 2)

    @property
    def columns(self) -> int:
        """Vectors of sums of one pair."""
        return self.blocks * self.fold.unit.rows // (4 if self.m == 1 else 2)

    @property
    def copies(self) -> int:
        """Copies of what a chunk starts from."""
        return self.columns if self.own else 1

    @property
    def lead(self) -> tuple[int, ...]:
        """Axis of pairs, if there are several."""
        return (self.pairs,) if self.pairs > 1 else ()

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        return (*self.lead, self.columns, 4) if self.in_pairs else super().spatial

    @property
    def scale_align(self) -> int:
        """Bytes that scales are aligned to."""
        return self.fold.unit.rows

    def x_bytes(self, k: int) -> int:
        """Bytes of activations of `k` columns, of one row or pair."""
        return activation_bytes(k, self.m)

    @property
    def unit_bytes(self) -> int:
        """Bytes of activations from one unit to the next."""
        return 2 * UNIT_K

    def rows(self, at: Sequence[Expr]) -> tuple[tuple[Expr, ...], Expr | int, Expr]:
        """(pair if there are several, row in it, row of the block) of a sum."""
        if self.m == 1:
            return (), 1, at[-1]
        *pair, column, r = at
        return tuple(pair), r // 2, column * 2 + r % 2

    def place(self, row: Expr | int, k: Expr) -> Expr:
        """Byte of the activation of column k of one row of a pair."""
        return k // 8 * BYTES + row * 8 + k % 8

    def factor(self, at: Sequence[Expr]) -> Expr:
        """Which of a chunk's factors a sum has."""
        return at[-1] % 4 if self.m == 1 else at[-1]

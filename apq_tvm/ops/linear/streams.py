"""How row blocks of weights and rows of x are shared out, by arithmetic that every nest needs."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, i64


@dataclass(frozen=True)
class Streams:
    """Row blocks that are read side by side; each stream runs through consecutive ones.

    Parameters
    ----------
    blocks : int
        Row blocks of the weights.
    count : int
        Streams.
    """

    blocks: int
    count: int

    @property
    def bundles(self) -> int:
        """Row blocks of one stream."""
        return -(-self.blocks // self.count)

    @property
    def ragged(self) -> bool:
        """Whether the last bundle has fewer row blocks than there are streams."""
        return self.blocks % self.count > 0

    def index(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block, past the end in the last bundle of ragged streams."""
        return stream * i64(self.bundles) + bundle

    def within(self, index: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        return tirx.min(index, i64(self.blocks - 1)) if self.ragged else index


def tiles_of(m: Expr, m_tile: int) -> Expr:
    """Tiles of rows of x."""
    return (m + i64(m_tile - 1)) // i64(m_tile)


def first_row(m: Expr, m_tile: int, tile: Expr) -> Expr:
    """First row of x of a tile; the last one ends at M."""
    return tirx.min(tile * i64(m_tile), m - i64(m_tile))

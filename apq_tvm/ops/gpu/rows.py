"""How quantized rows of x lie for ``mma``, in words and factors that a lane reads at once.

A lane of ``mma.m16n8k32`` multiplies two words of a step of row ``l / 4`` of x, and holds sums of
rows ``2 (l % 4)`` and the next: so words of two steps stand by ``l % 4``, factors in pairs of rows,
and those of the four pairs of a tile beside each other: a warp's read of them is whole sectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from apq_tvm.ops.gpu.steps import Steps
from apq_tvm.tensorize.exprs import MAGIC_BITS, Expr, f32, i32, i64

PAIRS = 4
"""Pairs of rows of x of an ``mma``."""


@dataclass(frozen=True)
class RowFactors:
    """The arrays that a product reads beside the codes of x, each for tiles of four pairs of rows.

    ``xs f32 [T, Ga / P, 4, 2 P]``: scales of `paired` groups P, already divided by what the
    products of their groups are too large by; of whole rows a scale, and as a second group their
    middle.

    ``start i32 [T, Gw, 4, 4]``: what a group's sums begin with, once more for the other row of
    weights: the zero point's part and, where sums are small, `MAGIC_BITS` (``APQ_MAGIC`` in
    mma_s8.cuh). With zero points in the weights, or a group for the whole row: ``[T, Gw, 4, 2]``,
    sums of codes alone.

    Parameters
    ----------
    steps : Steps
    k : int
    act_group : int
        Columns of x that share a scale; -1 for a row.
    centres : int
        1 if rows have a middle.
    """

    steps: Steps
    k: int
    act_group: int
    centres: int

    @property
    def padded(self) -> int:
        """Columns of codes."""
        return self.steps.layout.padded_k(self.k)

    @property
    def width(self) -> int:
        """Columns that share a scale."""
        return self.padded if self.act_group == -1 else self.act_group

    @property
    def sum_width(self) -> int:
        """Columns that share a sum."""
        return self.steps.layout.group_width(self.k)

    @property
    def paired(self) -> int:
        """Groups whose scales a lane reads at once."""
        together = self.steps.layout.chunk_k // self.act_group if self.act_group != -1 else 1
        return 2 if together > 1 else 1

    @property
    def folded(self) -> bool:
        """True if scales are divided already: each belongs to one group of weights."""
        return self.act_group != -1 and self.act_group == self.steps.layout.group_size

    @property
    def ready(self) -> bool:
        """True if sums begin with what is read."""
        layout = self.steps.layout
        return layout.group_size != -1 and not layout.zero_points

    def words(self, m: Expr) -> tuple[Any, ...]:
        """Shape of the codes."""
        return (m, self.padded // 4)

    def scales(self, m: Expr) -> tuple[Any, ...]:
        """Shape of ``xs``."""
        groups = self.padded // self.width + self.centres
        return (_tiles(m), groups // self.paired, PAIRS, 2 * self.paired)

    def starts(self, m: Expr) -> tuple[Any, ...]:
        """Shape of ``start``."""
        return (_tiles(m), self.padded // self.sum_width, PAIRS, 4 if self.ready else 2)

    def scale_place(self, tile: Expr, pair: Expr, group: Expr, odd: Expr) -> tuple[Expr, ...]:
        """Index of the scale of a row of a pair; a lane begins to read at that of the first."""
        outer, inner = group // i64(self.paired), group % i64(self.paired)
        return tile, outer, pair, inner * i64(2) + odd

    def start_place(self, tile: Expr, pair: Expr, group: Expr, at: Expr) -> tuple[Expr, ...]:
        """Index of what a group's sums begin with."""
        return tile, group, pair, at

    @property
    def steps_at_once(self) -> int:
        """Steps whose words a lane reads at once, 16 bytes where a unit has two."""
        return min(self.steps.layout.unit_steps, 2)

    def word(self, word: Expr) -> Expr:
        """Where the word of columns ``4 word ..`` stands: those that four lanes read at once, lane
        by lane."""
        size = self.steps_at_once
        first, step, inner = word // (8 * size) * (8 * size), word // 8 % size, word % 8
        return first + inner // 2 * (2 * size) + step * 2 + inner % 2

    def divided(self, scale: Expr, group: Expr) -> Expr:
        """A group's scale as it is stored."""
        if not self.folded:
            return scale
        return scale * _of(group, [f32(0.5**e) for e in self.steps.exponents])

    def start(self, total: Expr, group: Expr) -> Expr:
        """What a group's sums begin with, by the sum of its codes."""
        if not self.ready:
            return total
        count = range(len(self.steps.groups))
        magic = _of(group, [i32(MAGIC_BITS if self.steps.exact(at) else 0) for at in count])
        return magic - total * _of(group, [i32(self.steps.zero(at)) for at in count])


def pair_of(row: Expr) -> tuple[Expr, Expr]:
    """The tile of a row of x, and the pair in it."""
    return row // i64(2 * PAIRS), row // i64(2) % i64(PAIRS)


def _tiles(m: Expr) -> Expr:
    return tirx.floordiv(m + i64(2 * PAIRS - 1), i64(2 * PAIRS))


def _of(group: Expr, values: list[Expr]) -> Expr:
    """The value of a group's place in its chunk."""
    if all(value.value == values[0].value for value in values):
        return values[0]
    chosen = values[-1]
    for at, value in enumerate(values[:-1]):
        chosen = tirx.Select(group % i64(len(values)) == i64(at), value, chosen)
    return chosen

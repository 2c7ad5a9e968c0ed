"""Large-M layers of 8-bit codes that are multiplied where they lie, unit by unit: no panel.

The last panel ends at the last row block; columns that it shares with the one before are its own.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import IntegerGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.tensorize.exprs import Expr, i64, prefetch_line
from apq_tvm.tensorize.meaning.scaffold import Meaning, View
from apq_tvm.tensorize.meaning.tile import Tile, unit_products

LINE = 16
"""float32 in a cache line."""


class UnitGemm(IntegerGemm):
    """Steps are whole units."""

    clears = False

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, layout, blocking)
        assert layout.bits == 8 and blocking.k_step % UNIT_K == 0
        assert blocking.vectors <= self.row_blocks
        self.shared_columns = self.row_blocks % blocking.vectors > 0

    def scratch(self) -> None:
        last = i64(self.row_blocks - self.blocking.vectors)
        self.first = b.bind(tirx.min(self.panel, last)) if self.shared_columns else self.panel
        self.scratch_of_groups()

    def row_block(self, j: Expr) -> Expr:
        return self.first + j

    def begins_with(self, m: Expr, j: Expr, r: Expr) -> tuple[Expr, ...]:
        """What codes are too large by is taken off first, where all columns have the same."""
        if not self.whole or self.layout.zero_points:
            return super().begins_with(m, j, r)
        total = self.xsum[self.row + m, i64(0)]
        return tirx.const(0, "int32") - super().whole_offset(j, r) * total, total

    def whole_offset(self, j: Expr, r: Expr) -> Expr:
        zero = tirx.const(0, "int32")
        return super().whole_offset(j, r) if self.layout.zero_points else zero

    def fill_units(self, kb: Expr) -> None:
        """They are there."""

    def ask_ahead(self, kb: Expr, tile: Expr, tiles: Expr) -> None:
        """As ever; where sums become results, for what the next tile adds to its own, too.

        Its rows are a few lines each, far apart, which no processor asks for by itself: out of the
        third cache 392 x 1024 x 256 takes 3 % less, 3136 x 256 x 64 a sixth.
        """
        super().ask_ahead(kb, tile, tiles)
        if self.residual is None:
            return
        bl = self.blocking
        row = b.bind(self.first_row + (tile + 1) * i64(bl.m_tile))
        column = b.bind(self.row_block(i64(0)) * i64(self.lanes))
        with b.If(kb == self.k_blocks - 1), b.Then():
            with (
                b.unroll(0, bl.m_tile) as m,
                b.unroll(0, -(-bl.vectors * self.lanes // LINE)) as line,
            ):
                prefetch_line(self.residual[row + m, column + line * LINE])

    def codes(self, kb: Expr, first: Expr, step: Expr) -> View:
        bl = self.blocking
        unit = kb * (bl.k_block // UNIT_K) + first // UNIT_K + step * (bl.k_step // UNIT_K)
        return View(self.weights["codes"], (self.first, unit, 0))

    def products(self, tile: Tile) -> Meaning:
        return unit_products(tile)

"""Large-M layers of codes with minima, and of k-quants: integers whose groups have other scales."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.codegen.layouts import SteppedLayout
from apq_tvm.ops.blocks import put
from apq_tvm.ops.many_rows.bytes import IntegerGemm
from apq_tvm.tensorize.exprs import Buffer, Expr


class SteppedGemm(IntegerGemm):
    """A group's sum, times its step, less its minimum times the sum of the activations."""

    layout: SteppedLayout

    by_groups = True

    def scratch_of_groups(self) -> None:
        super().scratch_of_groups()
        if self.layout.minima:
            self.least = self.per_group("float32")

    def fill_groups(self, mine: Any, first: Expr) -> None:
        self._fill("scales", self.scales, self.layout.step, mine, first)
        if self.layout.minima:
            self._fill("least", self.least, self.layout.least, mine, first)

    def _fill(self, name: str, target: Buffer, value: Any, mine: Any, first: Expr) -> None:
        with self.stage(name, self.blocking.vectors, mine, self.lanes) as (j, g, r):
            put(target, (j, g, r), value(self.weights, self.row_block(j), first + g, r))

    def offset(self, j: Expr, group: Expr, r: Expr) -> Expr:
        return tirx.const(self.layout.pad_code, "int32")

    def term(self, dot: Expr, m: Expr, j: Expr, group: Expr, absolute: Expr, r: Expr) -> Expr:
        term = dot * self.scales[j, group, r]
        if self.layout.minima:
            total = self.xsum[self.row + m, absolute].astype("float32")
            term = term - total * self.least[j, group, r]
        return term * self.xs[self.row + m, absolute]

"""Large-M layers with weights in small groups: values become bytes once a panel.

Codes are looked up where the layout has a table; the sums of a group stay integers, and the group's
scale, that of its span times its sub-scale, is a float of the panel. The rest is
`apq_tvm.ops.many_rows.bytes`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, SpanLayout
from apq_tvm.ops.blocks import put
from apq_tvm.ops.few_rows.spans import lookup_of
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import ByteGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.tensorize.exprs import Buffer, Expr
from apq_tvm.tensorize.meaning.scaffold import View, product


class SpanGemm(ByteGemm):
    """Groups have scales of their own, times that of their span."""

    by_groups = True

    def __init__(self, spec: LinearSpec, layout: SpanLayout, blocking: GemmBlocking) -> None:
        assert spec.scheme is not None and spec.scheme.act_group == layout.group
        groups = layout.groups(spec.k)
        super().__init__(spec, layout, blocking, layout.rows, layout.group, groups)

    def scratch(self) -> None:
        super().scratch()
        if self.layout.minima:
            self.least = self.per_group("float32")

    def fill_groups(self, mine: Any, first: Expr) -> None:
        self._group_values("scales", self.scales, self._scale, mine, first)
        if self.layout.minima:
            self._group_values("least", self.least, self._minimum, mine, first)

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        """Codes of a table, looked up by the intrinsic of block ``lookup``."""
        layout, codes, table = self.layout, self.weights["codes"], self.weights["table"]
        lanes = self.lanes
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        per_unit = layout.unit.groups
        first = at * per_unit if per_unit > 1 else at // (layout.group // UNIT_K)
        book = None
        if layout.book(self.weights, block, first, 0) is not None:
            shape = (per_unit, lanes) if per_unit > 1 else (lanes,)
            book = b.sblock_alloc_buffer(shape, "uint8", align=64)
            with self.stage("book", *shape) as index:
                group = first + index[0] if per_unit > 1 else first
                put(book, index, layout.book(self.weights, block, group, index[-1]))
        with self.stage("empty", 8, lanes * 4) as (v, e):
            put(self.decoded, (j, u * 8 + v, e // 4, e % 4), tirx.const(0, "uint8"))
        views = [View(codes, (block, at, 0)), View(table, (0,))]
        views += [] if book is None else [View(book, (0,) * len(book.shape))]
        views.append(View(self.decoded, (j, u * 8, 0, 0)))
        product(lookup_of(layout, 1).values, "lookup", lambda: views)

    def _group_values(self, name: str, target: Buffer, value: Any, mine: Any, first: Expr) -> None:
        with self.stage(name, self.blocking.vectors, mine, self.lanes) as (j, g, r):
            put(target, (j, g, r), value(self.row_block(j), first + g, r))

    def _scale(self, block: Expr, group: Expr, r: Expr) -> Expr:
        layout = self.layout
        scale = layout.scale(self.weights, block, group // layout.span_groups, r)
        sub = layout.sub(self.weights, block, group, r)
        scale = scale * tirx.const(layout.unit_scale, "float32")
        return scale if sub is None else scale * sub.astype("float32")

    def _minimum(self, block: Expr, group: Expr, r: Expr) -> Expr:
        layout = self.layout
        scale = layout.min_scale(self.weights, block, group // layout.span_groups, r)
        return scale * layout.minimum(self.weights, block, group, r).astype("float32")

    def offset(self, j: Expr, group: Expr, r: Expr) -> Expr:
        return tirx.const(self.layout.offset, "int32")

    def term(self, dot: Expr, m: Expr, j: Expr, group: Expr, absolute: Expr, r: Expr) -> Expr:
        term = dot * self.scales[j, group, r]
        if self.layout.minima:
            total = self.xsum[self.row + m, absolute].astype("float32")
            term = term - total * self.least[j, group, r]
        return term * self.xs[self.row + m, absolute]

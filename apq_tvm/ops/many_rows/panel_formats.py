"""Formats whose weights are int8 times one scale per group, as panels of a GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from apq_tvm.codegen.layouts import (
    BalanceLayout,
    BcqLayout,
    CodebookLayout,
    NonlinearLayout,
    PlanesLayout,
    SpanLayout,
    SuperBlockLayout,
)
from apq_tvm.formats.anyprec import table_name
from apq_tvm.formats.balance import CENTRE
from apq_tvm.formats.superblock import SUB_MAX
from apq_tvm.ops.many_rows.centred_groups import CentredGroups
from apq_tvm.ops.many_rows.panels import PanelFormat
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.codebook_quads import BOOKS, GROUP, QUAD, SPAN_QUADS
from apq_tvm.tensorize.meaning.decoded import DecodedUnit
from apq_tvm.tensorize.meaning.decoded_formats import (
    balance_unit,
    books_unit,
    planes_unit,
    signs_unit,
    super_unit,
    table_unit,
)
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.planes import ROWS as PLANE_ROWS
from apq_tvm.tensorize.meaning.scaffold import View

Arrays = Any


class SpanPanel(PanelFormat):
    """Groups have the scale of their span, times a sub-scale where it is not in the panel."""

    def __init__(self, layout: SpanLayout, k: int, largest: int, unit: DecodedUnit) -> None:
        step = max(UNIT_K, layout.group)
        super().__init__(layout, CentredGroups(-(-k // step) * step, layout.group, largest), unit)

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        layout = self.layout
        span = group // layout.span_groups if layout.span_groups > 1 else group
        unit = tirx.const(layout.unit_scale, "float32")
        return layout.scale(arrays, block, span, r) * unit


class NonlinearPanel(SpanPanel):
    """4-bit codes of a fixed table, in groups of 32 and more."""

    def __init__(self, layout: NonlinearLayout, k: int) -> None:
        super().__init__(layout, k, layout.offset, table_unit(layout.offset))

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        return View(arrays["codes"], (block, u, 0)), View(arrays["table"], (0,))


class SuperPanel(SpanPanel):
    """Uniform super-blocks: codes times sub-scales are bytes."""

    minima = True

    def __init__(self, layout: SuperBlockLayout, k: int) -> None:
        largest = ((1 << layout.bits) - 1) * SUB_MAX
        super().__init__(layout, k, largest, super_unit(layout.bits))

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        return [View(arrays[name], (block, u, 0)) for name in ("codes", "subs")]

    def minimum(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        scale = self.layout.min_scale(arrays, block, group // self.layout.span_groups, r)
        return scale * self.layout.minimum(arrays, block, group, r).astype("float32")


class BooksPanel(SpanPanel):
    """Four codebooks in groups of 16, whose sub-scales are among the factors."""

    def __init__(self, layout: CodebookLayout, k: int) -> None:
        super().__init__(layout, k, layout.offset, books_unit(layout.bits, layout.offset))

    @staticmethod
    def holds(layout: CodebookLayout) -> bool:
        """Whether units can be decoded."""
        return (layout.codebooks, layout.group) == (BOOKS, GROUP)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        codes, index, table = (arrays[name] for name in ("codes", "index", "table"))
        if self.layout.bits < 4:  # quads, of which a span has four
            books = View(index, (block, u // SPAN_QUADS, u % SPAN_QUADS * 4))
            return View(codes, (block, u, 0)), books, View(table, (0,))
        first = View(codes, (block, u * (QUAD // UNIT_K), 0))
        return first, View(index, (block, u, 0)), View(table, (0,))

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        sub = self.layout.sub(arrays, block, group, r).astype("float32")
        return super().factor(arrays, block, part, group, r) * sub


class BalancePanel(PanelFormat):
    """``W2*``: five levels."""

    def __init__(self, layout: BalanceLayout, k: int) -> None:
        weights = CentredGroups(layout.padded_k(k), layout.group_width(k), CENTRE)
        super().__init__(layout, weights, balance_unit(CENTRE))

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        return [View(arrays["codes"], (block, u, 0))]

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        return arrays["scales"][block, group, part * 4 + r].astype("float32")


class PlanesPanel(PanelFormat):
    """Any-precision weights of one width; `group` columns of activations share a scale, -1 for all.

    Weights have no scale along K: those of a row are given to all groups alike.
    """

    def __init__(self, layout: PlanesLayout, k: int, width: int, group: int) -> None:
        self.width, padded = width, layout.padded_k(k)
        weights = CentredGroups(padded, padded if group == -1 else group, 128)
        super().__init__(layout, weights, planes_unit(width, layout.tables_per_block))

    def _first(self, block: Expr) -> Expr:
        """The first table that the rows of a block use."""
        if self.layout.channels <= PLANE_ROWS:
            return block * self.layout.tables_per_block
        return block // (self.layout.channels // PLANE_ROWS)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        planes = View(arrays["planes"], (0, block, u * UNIT_K))
        return planes, View(arrays[table_name(self.width)], (self._first(block), 0))

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        tables, row = self.layout.tables_per_block, part * 4 + r
        table = self._first(block)
        if tables > 1:
            table = table + row // (PLANE_ROWS // tables)
        scale = arrays["scales"][block, row].astype("float32")
        if self.layout.cells:
            return scale * self.layout.factor(self.width)
        return scale * arrays[f"steps{self.width}"][table]


class SignsPanel(PanelFormat):
    """Binary codes: every plane of signs has its own scale, and groups have an offset."""

    minima = True

    def __init__(self, layout: BcqLayout, k: int) -> None:
        weights = CentredGroups(layout.padded_k(k), layout.group_width(k), 1, layout.bits)
        units = (signs_unit(layout.bits, plane) for plane in range(layout.bits))
        super().__init__(layout, weights, *units)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        return [View(arrays["codes"], (block, u, part * 4))]

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        planes = self.weights.planes
        scales = arrays["scales"]
        return scales[block, group // planes, group % planes, part * 4 + r].astype("float32")

    def minimum(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        offset = arrays["scales"][block, group, self.weights.planes, part * 4 + r]
        return -offset.astype("float32")

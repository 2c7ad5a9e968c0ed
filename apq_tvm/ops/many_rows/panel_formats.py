"""Formats whose weights are int8 times one scale per group, as panels of a GEMM."""

from __future__ import annotations

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
from apq_tvm.tensorize.meaning.codebook_quads import BOOKS, GROUP, QUAD
from apq_tvm.tensorize.meaning.decoded import Source
from apq_tvm.tensorize.meaning.decoded_formats import (
    BalanceUnit,
    BooksUnit,
    PlanesUnit,
    SignsUnit,
    SuperUnit,
    TableUnit,
)
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.planes import ROWS as PLANE_ROWS

Expr = Any  # tvm is untyped
Arrays = Any


def stretch(buffer: Any, lead: tuple[Expr, ...], extent: int, start: Any = 0) -> Source:
    """A stretch of a buffer's last axis."""

    def load(at: Expr) -> Expr:
        return buffer[(*lead, at if isinstance(start, int) and not start else start + at)]

    return Source(load, buffer[(*lead, slice(start, start + extent))])


def _columns(layout: SpanLayout, k: int) -> int:
    """Columns of quantized activations."""
    step = max(UNIT_K, layout.group)
    return -(-k // step) * step


def _scale(layout: SpanLayout, arrays: Arrays, block: Expr, group: Expr, r: Expr) -> Expr:
    """The float32 scale of a group's span."""
    span = group // layout.span_groups if layout.span_groups > 1 else group
    unit = tirx.const(layout.unit_scale, "float32")
    return layout.scale(arrays, block, span, r) * unit


class NonlinearPanel(PanelFormat):
    """4-bit codes of a fixed table, in groups of 32 and more."""

    def __init__(self, layout: NonlinearLayout, k: int) -> None:
        self.layout: Any = layout
        self.units = (TableUnit(layout.offset),)
        self.weights = CentredGroups(_columns(layout, k), layout.group, layout.offset)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        return {
            "codes": stretch(arrays["codes"], (block, u), self.layout.unit.nbytes),
            "table": stretch(arrays["table"], (), self.layout.entries),
        }

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        return _scale(self.layout, arrays, block, group, r)


class SuperPanel(PanelFormat):
    """Uniform super-blocks: codes times sub-scales are bytes."""

    minima = True

    def __init__(self, layout: SuperBlockLayout, k: int) -> None:
        self.layout: Any = layout
        self.units = (SuperUnit(layout.bits),)
        largest = ((1 << layout.bits) - 1) * SUB_MAX
        self.weights = CentredGroups(_columns(layout, k), layout.group, largest)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        return {
            "codes": stretch(arrays["codes"], (block, u), self.layout.unit.nbytes),
            "subs": stretch(arrays["subs"], (block, u), 4),
        }

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        return _scale(self.layout, arrays, block, group, r)

    def minimum(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        scale = self.layout.min_scale(arrays, block, group // self.layout.span_groups, r)
        return scale * self.layout.minimum(arrays, block, group, r).astype("float32")


class BooksPanel(PanelFormat):
    """Four codebooks in groups of 16, whose sub-scales are among the factors."""

    def __init__(self, layout: CodebookLayout, k: int) -> None:
        self.layout: Any = layout
        self.units = (BooksUnit(layout.bits, layout.offset),)
        self.weights = CentredGroups(_columns(layout, k), layout.group, layout.offset)

    @staticmethod
    def holds(layout: CodebookLayout) -> bool:
        """Whether units can be decoded."""
        return (layout.codebooks, layout.group) == (BOOKS, GROUP)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        unit, codes, index = self.units[0], arrays["codes"], arrays["index"]
        shape = unit.operands["codes"][0]
        if len(shape) == 1:  # quads, of which a span has four
            span = QUAD * 4
            return {
                "codes": stretch(codes, (block, u), shape[0]),
                "index": stretch(index, (block, u // (span // QUAD)), 4, u % (span // QUAD) * 4),
                "table": stretch(arrays["table"], (), unit.entries),
            }
        units, size = shape

        def load(i: Expr, at: Expr) -> Expr:
            return codes[block, u * units + i, at]

        region = codes[block, u * units : u * units + units, 0:size]
        return {
            "codes": Source(load, region),
            "index": stretch(index, (block, u), 4),
            "table": stretch(arrays["table"], (), unit.entries),
        }

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        sub = self.layout.sub(arrays, block, group, r).astype("float32")
        return _scale(self.layout, arrays, block, group, r) * sub


class BalancePanel(PanelFormat):
    """``W2*``: five levels."""

    def __init__(self, layout: BalanceLayout, k: int) -> None:
        self.layout: Any = layout
        self.units = (BalanceUnit(CENTRE),)
        self.weights = CentredGroups(layout.padded_k(k), layout.group_width(k), CENTRE)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        return {"codes": stretch(arrays["codes"], (block, u), self.layout.unit_bytes)}

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        return arrays["scales"][block, group, part * 4 + r].astype("float32")


class PlanesPanel(PanelFormat):
    """Any-precision weights of one width; `group` columns of activations share a scale, -1 for all.

    Weights have no scale along K: those of a row are given to all groups alike.
    """

    def __init__(self, layout: PlanesLayout, k: int, width: int, group: int) -> None:
        self.layout: Any = layout
        self.width = width
        self.units = (PlanesUnit(width, layout.tables_per_block),)
        padded = layout.padded_k(k)
        self.weights = CentredGroups(padded, padded if group == -1 else group, 128)

    def _first(self, block: Expr) -> Expr:
        """The first table that the rows of a block use."""
        if self.layout.channels <= PLANE_ROWS:
            return block * self.layout.tables_per_block
        return block // (self.layout.channels // PLANE_ROWS)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        planes, table, unit = arrays["planes"], arrays[table_name(self.width)], self.units[0]
        first, k0 = self._first(block), u * unit.k

        def load_plane(p: Expr, _: Expr, k: Expr) -> Expr:
            return planes[p, block, k0 + k]

        def load_entry(t: Expr, e: Expr) -> Expr:
            return table[first + t, e]

        tables = self.layout.tables_per_block
        return {
            "planes": Source(load_plane, planes[0 : self.width, block, k0 : k0 + unit.k]),
            "table": Source(load_entry, table[first : first + tables, 0 : 1 << self.width]),
        }

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        tables, row = self.layout.tables_per_block, part * 4 + r
        table = self._first(block)
        if tables > 1:
            table = table + row // (PLANE_ROWS // tables)
        step = arrays[f"steps{self.width}"][table]
        return arrays["scales"][block, row].astype("float32") * step


class SignsPanel(PanelFormat):
    """Binary codes: every plane of signs has its own scale, and groups have an offset."""

    minima = True

    def __init__(self, layout: BcqLayout, k: int) -> None:
        self.layout: Any = layout
        self.units = tuple(SignsUnit(layout.bits, plane) for plane in range(layout.bits))
        padded = layout.padded_k(k)
        self.weights = CentredGroups(padded, layout.group_width(k), 1, layout.bits)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        codes, size = arrays["codes"], self.units[0].operands["codes"][0][0]
        return {"codes": stretch(codes, (block, u), size, part * 4)}

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        planes = self.weights.planes
        scales = arrays["scales"]
        return scales[block, group // planes, group % planes, part * 4 + r].astype("float32")

    def minimum(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        offset = arrays["scales"][block, group, self.weights.planes, part * 4 + r]
        return -offset.astype("float32")

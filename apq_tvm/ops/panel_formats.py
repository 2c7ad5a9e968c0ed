"""Formats whose weights are int8 times one scale per group, as panels of a GEMM."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.codegen.layouts import BalanceLayout, NonlinearLayout, PlanesLayout
from apq_tvm.formats.anyprec import table_name
from apq_tvm.formats.balance import CENTRE
from apq_tvm.ops.gemm_centred import CentredGroups
from apq_tvm.ops.gemm_panels import PanelFormat
from apq_tvm.tensorize.decoded import Source
from apq_tvm.tensorize.decoded_units import BalanceUnit, PlanesUnit, TableUnit
from apq_tvm.tensorize.planes import ROWS as PLANE_ROWS

Expr = Any  # tvm is untyped
Arrays = Any


def part(buffer: Any, lead: tuple[Expr, ...], extent: int, start: Any = 0) -> Source:
    """A stretch of a buffer's last axis."""

    def load(at: Expr) -> Expr:
        return buffer[(*lead, at if isinstance(start, int) and not start else start + at)]

    return Source(load, buffer[(*lead, slice(start, start + extent))])


class NonlinearPanel(PanelFormat):
    """4-bit codes of a fixed table, in groups of 32 and more."""

    def __init__(self, layout: NonlinearLayout, k: int) -> None:
        self.layout: Any = layout
        self.unit = TableUnit(layout.offset)
        self.weights = CentredGroups(layout.padded_k(k), layout.group, layout.offset)

    def sources(self, arrays: Arrays, block: Expr, u: Expr) -> dict[str, Source]:
        return {
            "codes": part(arrays["codes"], (block, u), self.layout.unit.nbytes),
            "table": part(arrays["table"], (), self.layout.entries),
        }

    def factor(self, arrays: Arrays, block: Expr, vector: Expr, group: Expr, r: Expr) -> Expr:
        unit = tirx.const(self.layout.unit_scale, "float32")
        return arrays["scales"][block, group, r].astype("float32") * unit


class BalancePanel(PanelFormat):
    """``W2*``: five levels."""

    def __init__(self, layout: BalanceLayout, k: int) -> None:
        self.layout: Any = layout
        self.unit = BalanceUnit(CENTRE)
        self.weights = CentredGroups(layout.padded_k(k), layout.group_width(k), CENTRE)

    def sources(self, arrays: Arrays, block: Expr, u: Expr) -> dict[str, Source]:
        return {"codes": part(arrays["codes"], (block, u), self.layout.unit_bytes)}

    def factor(self, arrays: Arrays, block: Expr, vector: Expr, group: Expr, r: Expr) -> Expr:
        return arrays["scales"][block, group, vector * 4 + r].astype("float32")


class PlanesPanel(PanelFormat):
    """Any-precision weights of one width."""

    def __init__(self, layout: PlanesLayout, k: int, width: int) -> None:
        self.layout: Any = layout
        self.width = width
        self.unit = PlanesUnit(width, layout.tables_per_block)
        padded = layout.padded_k(k)
        self.weights = CentredGroups(padded, padded, 128)

    def _first(self, block: Expr) -> Expr:
        """The first table that the rows of a block use."""
        if self.layout.channels <= PLANE_ROWS:
            return block * self.layout.tables_per_block
        return block // (self.layout.channels // PLANE_ROWS)

    def sources(self, arrays: Arrays, block: Expr, u: Expr) -> dict[str, Source]:
        planes, table, unit = arrays["planes"], arrays[table_name(self.width)], self.unit
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

    def factor(self, arrays: Arrays, block: Expr, vector: Expr, group: Expr, r: Expr) -> Expr:
        tables, row = self.layout.tables_per_block, vector * 4 + r
        table = self._first(block)
        if tables > 1:
            table = table + row // (PLANE_ROWS // tables)
        step = arrays[f"steps{self.width}"][table]
        return arrays["scales"][block, row].astype("float32") * step

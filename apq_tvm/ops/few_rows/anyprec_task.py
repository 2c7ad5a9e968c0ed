"""What linear layers on any-precision weights share: operands, epilogue and horizontal sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.formats.anyprec import table_name
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask, argument
from apq_tvm.tensorize.meaning.planes import QUAD, ROWS, PlanesUnit

Expr = Any  # tvm is untyped
Buffer = Any

UNIT_K = 64
"""Columns of a unit; a last one may have half."""


def unit_group(spec: LinearSpec) -> int:
    """Columns of a unit that share a scale of activations; 0 where a token has one."""
    assert spec.scheme is not None
    return max(0, min(spec.scheme.act_group, UNIT_K))


class PlanesTask(GemmTask):
    """Operands, epilogue and horizontal sums."""

    def __init__(
        self, spec: LinearSpec, layout: PlanesLayout, unit: PlanesUnit, m_tile: int, m_tiles: int
    ) -> None:
        k = layout.padded_k(spec.k)
        blocking = GemmBlocking(m_tile, 1, UNIT_K, k, m_tiles)
        super().__init__(spec, blocking, ROWS, k)
        self.layout, self.unit = layout, unit
        self.sum_dtype = unit.sums
        self.units, self.tail = divmod(k, UNIT_K)

    def declare(self) -> None:
        columns, scales = self.k, 1
        if self.unit.group:
            assert self.spec.scheme is not None
            group = self.spec.scheme.act_group
            columns = -(-self.k // group) * group
            scales = columns // QUAD
        self.xq = argument("xq", (self.m, columns), "int8", 4)
        self.xs = argument("xs", (self.m, scales), "float32", 4)
        self.xsum = argument("xsum", (self.m, 1), self.sum_dtype, 4)
        self.weights = {
            name: argument(name, shape, dtype, 64)
            for name, (shape, dtype) in self.layout.shapes(self.spec.n, self.spec.k).items()
        }
        self.table = self.weights[table_name(self.unit.bits)]

    def first_table(self, block: Expr) -> Expr:
        """The first table that the rows of a block use."""
        if self.layout.channels <= ROWS:
            return block * self.layout.tables_per_block
        return block // (self.layout.channels // ROWS)

    def unit_of(self, k: int) -> PlanesUnit:
        """The unit of `k` columns."""
        return replace(self.unit, k=k)

    def scale(self, m: Expr, column: Expr) -> Expr | None:
        """The scale of an activation of row ``row + m``, where they have groups."""
        return self.xs[self.row + m, column // QUAD] if self.unit.group else None

    def scales_at(self, rows: Any, first: Expr, k: int) -> list[Any]:
        """Region of the scales that a unit reads."""
        if not self.unit.group:
            return []
        return [self.xs[rows, first // QUAD : first // QUAD + k // QUAD]]

    def clear(self, name: str, sums: Buffer) -> None:
        """Set spread sums to 0."""
        with self.stage(name, *sums.shape) as at:
            b.reads()
            b.writes(sums[at])
            b.buffer_store(sums, tirx.const(0, self.sum_dtype), list(at))

    def add_lanes(self, name: str, sums: Buffer, at: Any, spread: Any) -> None:
        """``sums[at(i)] += Σ_l spread[.., l]``, where ``spread = (buffer, leading extents)``."""
        buffer, lead = spread
        with b.grid(*lead, self.unit.lanes) as loops, b.sblock(name):
            *i, lane = b.axis.remap("S" * len(lead) + "R", loops)
            where = at(*i)
            b.reads(sums[where], buffer[(*i, lane)])
            b.writes(sums[where])
            b.buffer_store(sums, sums[where] + buffer[(*i, lane)], list(where))

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        row, block = self.row + m, self.row_block(j)
        if self.unit.offset:
            value = value - tirx.const(self.unit.offset, self.sum_dtype) * self.xsum[row, 0]
        per = self.layout.tables_per_block
        table = self.first_table(block) + (r // (ROWS // per) if per > 1 else 0)
        factor = self.weights["scales"][block, r].astype("float32")
        factor = factor * self.weights[f"steps{self.unit.bits}"][table]
        if self.unit.group:
            return value * factor
        return value.astype("float32") * (factor * self.xs[row, 0])

    def planes_at(self, block: Expr, first: Expr, k: int) -> Any:
        """Region of the planes that a unit reads."""
        planes = self.weights["planes"]
        return planes[0 : self.unit.bits, block, first : first + k]

    def tables_at(self, block: Expr) -> Any:
        """Region of the tables that a row block uses."""
        first = self.first_table(block)
        return self.table[first : first + self.unit.tables, 0 : self.unit.entries]

"""What linear layers on any-precision weights share: operands, epilogue and horizontal sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.formats.anyprec import table_name
from apq_tvm.formats.anyprec_cells import CELL_BITS, HALVES
from apq_tvm.ops.blocks import argument, put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask
from apq_tvm.tensorize.exprs import Buffer, Expr
from apq_tvm.tensorize.meaning.planes import QUAD, ROWS, PlanesStep
from apq_tvm.tensorize.meaning.scaffold import View

PLANES_K = 64
"""Columns of a step; a last one may have half."""


def step_group(spec: LinearSpec) -> int:
    """Columns of a step that share a scale of activations; 0 where a token has one."""
    assert spec.scheme is not None
    return max(0, min(spec.scheme.act_group, PLANES_K))


def parts_of(k: int, width: int) -> list[tuple[str, int]]:
    """(suffix of a block's name, columns): whole stretches of `width`, and what is left of K."""
    whole, rest = divmod(k, width)
    return ([("", width)] if whole else []) + ([("_tail", rest)] if rest else [])


def digit_suffix(digit: int) -> str:
    """What names of blocks of the second byte of weights have at their end."""
    return "_fine" if digit else ""


class PlanesTask(GemmTask):
    """Operands, epilogue and horizontal sums."""

    width = PLANES_K
    """Columns of a stretch."""

    def __init__(
        self,
        spec: LinearSpec,
        layout: PlanesLayout,
        step: PlanesStep,
        m_tile: int = 1,
        m_tiles: int = 1,
    ) -> None:
        k = layout.padded_k(spec.k)
        blocking = GemmBlocking(m_tile, 1, PLANES_K, k, m_tiles)
        super().__init__(spec, blocking, ROWS, k)
        self.layout, self.step = layout, step
        self.sum_dtype = step.sums
        self.whole = k // self.width

    def declare(self) -> None:
        columns, scales = self.k, 1
        if self.step.group:
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
        divided = self.step.divided
        self.table = self.weights[table_name(CELL_BITS if divided else self.step.bits)]
        self.halves = self.weights[HALVES] if divided else None

    def first_table(self, block: Expr) -> Expr:
        """The first table that the rows of a block use."""
        if self.layout.channels <= ROWS:
            return block * self.layout.tables_per_block
        return block // (self.layout.channels // ROWS)

    def step_of(self, k: int) -> PlanesStep:
        """The step of `k` columns."""
        return replace(self.step, k=k)

    def stretches(self, emit: Callable[[str, Expr, int], None]) -> None:
        """Call ``emit(suffix, loop variable, columns)`` in a loop over K, then for the rest."""
        for suffix, k in parts_of(self.k, self.width):
            if suffix:
                emit(suffix, None, k)
                continue
            with b.serial(0, self.whole) as u:
                emit(suffix, u, k)

    def around(self, u: Expr) -> list[tuple[Expr, int]]:
        """The loop over stretches, as `product` wants it; none around the rest."""
        return [] if u is None else [(u, self.whole)]

    def first(self, axis: tuple[Expr, ...]) -> Expr:
        """First column of a stretch by its axis, or of the rest."""
        return (axis[0] if axis else self.whole) * self.width

    def planes_at(self, first: Expr) -> tuple[View, ...]:
        """Planes and tables of the row block, from a column on."""
        block = self.row_block(0)
        at = (self.first_table(block), 0)
        planes = View(self.weights["planes"], (0, block, first))
        tables = (View(self.table, at),)
        return (planes, *tables, *((View(self.halves, at),) if self.halves is not None else ()))

    def x_at(self, first: Expr) -> tuple[View, ...]:
        """Activations of the tile and, where they have groups, their scales."""
        x = View(self.xq, (self.row, first))
        return (x, View(self.xs, (self.row, first // QUAD))) if self.step.group else (x,)

    def clear(self, name: str, sums: Buffer) -> None:
        """Set spread sums to 0."""
        with self.stage(name, *sums.shape) as at:
            put(sums, at, tirx.const(0, self.sum_dtype))

    def add_lanes(self, name: str, sums: Buffer, at: Any, spread: Any) -> None:
        """``sums[at(i)] += Σ_l spread[.., l]``, where ``spread = (buffer, leading extents)``."""
        buffer, lead = spread
        with b.grid(*lead, self.step.lanes) as loops, b.sblock(name):
            *i, lane = b.axis.remap("S" * len(lead) + "R", loops)
            where = at(*i)
            put(sums, where, sums[where] + buffer[(*i, lane)], sums[where], buffer[(*i, lane)])

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        row, block = self.row + m, self.row_block(j)
        if self.step.added:
            value = value - tirx.const(self.step.added, self.sum_dtype) * self.xsum[row, 0]
        per = self.layout.tables_per_block
        table = self.first_table(block) + (r // (ROWS // per) if per > 1 else 0)
        factor = self.weights["scales"][block, r].astype("float32")
        if self.layout.cells:
            factor = factor * self.layout.factor(self.step.bits)
        else:
            factor = factor * self.weights[f"steps{self.step.bits}"][table]
        if self.step.group:
            return value * factor
        return value.astype("float32") * (factor * self.xs[row, 0])

"""Linear layers on any-precision weights with int8 activations, as unscheduled TensorIR.

A kernel is for one width b and reads b planes (`apq_tvm.codegen.layouts.planes`). Three forms share
the loops of `apq_tvm.ops.many_rows.task`, a panel being one block of eight rows:

- `planes_gemv`, for one row of x: codes are looked up and multiplied in registers;
- `planes_gemv_apart`, likewise, where tables fill the registers: the codes of a run of columns are
  put together first, then every table is loaded once a run;
- `planes_gemm`: looked up centroids of the whole row block are stored once, then multiplied with
  tiles of rows of x.

Weights have no scale along K, so that sums stay spread over the lanes of a register until a row
ends::

    y[m, n] = act(scale[n] step[t] xs[m] (Σ_k (c[t, code] + offset) xq[m, k] - offset xsum[m])
                  + bias[n]) + residual[m, n]                        t = n // channels

Where groups of activations have scales, sums are float32: a lane multiplies its integers by the
scale of its own columns as often as that changes (`apq_tvm.ops.activations.spread`)::

    y[m, n] = act(scale[n] step[t] (Σ_k xs[m, k / 4] (c[t, code] + offset) xq[m, k]
                                    - offset xsum[m]) + bias[n]) + residual[m, n]
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.ops.few_rows.anyprec_task import UNIT_K, PlanesTask
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.tensorize.meaning.planes import (
    ROWS,
    PlanesUnit,
    centroid_if,
    column_of,
    dot_axes,
    dot_body,
    plane_code,
    rows_body,
    scaled,
    table_axes,
)

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any

RUN = 512
"""Columns whose codes `planes_gemv_apart` puts together at once: 4 KB of them."""

TILE_ROWS = 4
"""Rows of weights in a tile of the GEMM."""

SUM_ROWS = 2
"""Of them, those whose sums share a buffer: one of 1024 bytes would not reach the registers."""


class _Gemv(PlanesTask):
    """Lookups and products in registers."""

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        spread = b.sblock_alloc_buffer((ROWS, self.unit.lanes), self.sum_dtype, align=64)
        self.clear("start", spread)
        if self.units:
            with b.serial(0, self.units) as u:
                self._dot("dot", spread, u, UNIT_K)
        if self.tail:
            self._dot("dot_tail", spread, None, self.tail)
        self.add_lanes("add", sums, lambda r: (0, 0, r), (spread, (ROWS,)))

    def _dot(self, name: str, spread: Buffer, step: Expr, k: int) -> None:
        unit = self.unit_of(k)
        kinds, extents = dot_axes(unit)
        with b.grid(*extents) as loops, b.sblock(name):
            if step is None:
                first: Expr = self.units * UNIT_K
            else:
                first = b.axis.spatial(self.units, step) * UNIT_K
            axes = tuple(b.axis.remap(kinds, loops))
            at, block = (axes[0], axes[1]), self.row_block(0)
            planes, tables = self.weights["planes"], self.first_table(block)
            x = self.xq[self.row, first : first + k]
            read = self.planes_at(block, first, k), self.tables_at(block), x
            b.reads(spread[at], *read, *self.scales_at(self.row, first, k))
            b.writes(spread[at])
            dot_body(
                unit,
                spread,
                at,
                lambda p, column: planes[p, block, first + column],
                lambda t, entry: self.table[tables + t, entry],
                lambda column: self.xq[self.row, first + column],
                lambda column: self.scale(0, first + column),
                axes,
            )


class _Apart(PlanesTask):
    """Lookups in one table after the other."""

    def scratch(self) -> None:
        self.codes = b.sblock_alloc_buffer((ROWS, RUN), "uint8", align=64)

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        spread = b.sblock_alloc_buffer((ROWS, self.unit.lanes), self.sum_dtype, align=64)
        self.clear("start", spread)
        runs, rest = divmod(self.k, RUN)
        if runs:
            with b.serial(0, runs) as run:
                self._run("", spread, (runs, run), RUN)
        if rest:
            self._run("_tail", spread, None, rest)
        self.add_lanes("add", sums, lambda r: (0, 0, r), (spread, (ROWS,)))

    def _first(self, step: tuple[int, Expr] | None) -> Expr:
        if step is None:
            return self.k // RUN * RUN
        return b.axis.spatial(*step) * RUN

    def _run(self, suffix: str, spread: Buffer, step: tuple[int, Expr] | None, k: int) -> None:
        block, planes = self.row_block(0), self.weights["planes"]
        with b.grid(ROWS, k) as loops, b.sblock(f"codes{suffix}"):
            first = self._first(step)
            r, column = b.axis.remap("SS", loops)
            b.reads(self.planes_at(block, first, k))
            b.writes(self.codes[r, column])
            code = plane_code(lambda p: planes[p, block, first + column], r, self.unit.bits)
            b.buffer_store(self.codes, code.astype("uint8"), [r, column])
        for table in range(self.unit.tables):
            self._dot(f"dot{suffix}{table}", spread, step, k, table)

    def _dot(
        self, name: str, spread: Buffer, step: tuple[int, Expr] | None, k: int, table: int
    ) -> None:
        unit, rows = self.unit_of(k), ROWS // self.unit.tables
        kinds, extents = table_axes(unit, rows)
        with b.grid(*extents) as loops, b.sblock(name):
            first = self._first(step)
            *row, lane, register, byte, entry = b.axis.remap(kinds, loops)
            r, index = table * rows + (row[0] if row else 0), self.first_table(self.row_block(0))
            at, column = (r, lane), register * unit.vector + lane * 4 + byte
            mine = slice(table * rows, (table + 1) * rows) if rows > 1 else table
            b.reads(
                spread[at],
                self.codes[mine, 0:k],
                self.table[index + table, 0 : unit.entries],
                self.xq[self.row, first : first + k],
                *self.scales_at(self.row, first, k),
            )
            b.writes(spread[at])
            code, centroid = self.codes[r, column], self.table[index + table, entry]
            term = centroid_if(code.astype("int32"), entry, centroid, unit.offset)
            term = term * self.xq[self.row, first + column].astype("int32")
            term = scaled(term, self.scale(0, first + column))
            b.buffer_store(spread, spread[at] + term, list(at))


class _Gemm(PlanesTask):
    """Looked up bytes of a row block, reused for many rows of x."""

    def scratch(self) -> None:
        width = -(-self.k // UNIT_K) * UNIT_K
        self.bytes = b.sblock_alloc_buffer((ROWS, width), "uint8", align=64)

    def fill(self, kb: Expr) -> None:
        if self.units:
            with b.serial(0, self.units) as u, b.sblock("fill"):
                step = b.axis.spatial(self.units, u)
                b.reads()
                b.writes()
                self._lookup("", step * UNIT_K, UNIT_K)
        if self.tail:
            self._lookup("_tail", self.units * UNIT_K, self.tail)

    def _lookup(self, suffix: str, first: Expr, k: int) -> None:
        unit = self.unit_of(k)
        with self.stage(f"zero{suffix}", ROWS, k) as (r, column):
            b.reads()
            b.writes(self.bytes[r, first + column])
            b.buffer_store(self.bytes, tirx.const(0, "uint8"), [r, first + column])
        with b.grid(ROWS, k, unit.entries) as loops, b.sblock(f"lookup{suffix}"):
            r, column, entry = b.axis.remap("SSR", loops)
            block = self.row_block(0)
            planes, table = self.weights["planes"], self.first_table(block)
            out = self.bytes[r, first + column]
            b.reads(out, self.planes_at(block, first, k), self.tables_at(block))
            b.writes(out)
            code = plane_code(lambda p: planes[p, block, first + column], r, unit.bits)
            centroid = self.table[table + unit.table_of(r), entry]
            value = centroid_if(code, entry, centroid, unit.offset).astype("uint8")
            b.buffer_store(self.bytes, out + value, [r, first + column])

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        shape = (self.blocking.m_tile, SUM_ROWS, self.unit.lanes)
        for start in range(0, ROWS, TILE_ROWS):
            rows = range(start, start + TILE_ROWS, SUM_ROWS)
            spread = {r: b.sblock_alloc_buffer(shape, self.sum_dtype, align=64) for r in rows}
            for r in rows:
                self.clear(f"start{r}", spread[r])
            if self.units:
                with b.serial(0, self.units) as u:
                    for r in rows:
                        self._dot(f"dot{r}", spread[r], r, u, UNIT_K)
            for r in rows:
                if self.tail:
                    self._dot(f"dot_tail{r}", spread[r], r, None, self.tail)
                self.add_lanes(
                    f"add{r}", sums, lambda m, i, r=r: (m, 0, r + i), (spread[r], shape[:2])
                )

    def _dot(self, name: str, spread: Buffer, row: int, step: Expr, k: int) -> None:
        unit = self.unit_of(k)
        registers = (unit.registers,) if unit.registers > 1 else ()
        extents = (self.blocking.m_tile, SUM_ROWS, unit.lanes, *registers, 4)
        with b.grid(*extents) as loops, b.sblock(name):
            if step is None:
                first: Expr = self.units * UNIT_K
            else:
                first = b.axis.spatial(self.units, step) * UNIT_K
            m, r, lane, *inner = b.axis.remap("SSSR" + "R" * len(registers), loops)
            column = column_of(unit, lane, tuple(inner))
            x, mine = self.xq, slice(self.row, self.row + self.blocking.m_tile)
            b.reads(
                spread[m, r, lane],
                self.bytes[row : row + SUM_ROWS, first : first + k],
                x[mine, first : first + k],
                *self.scales_at(mine, first, k),
            )
            b.writes(spread[m, r, lane])
            w, scale = self.bytes[row + r, first + column], self.scale(m, first + column)
            x = x[self.row + m, first + column]
            rows_body(unit, spread, (m, r, lane), w, x, scale, column)


def planes_gemv(spec: LinearSpec, layout: PlanesLayout, unit: PlanesUnit) -> PrimFunc:
    """Linear layer for one or few rows of x.

    Parameters
    ----------
    spec : LinearSpec
        Any-precision with integer activations.
    layout : PlanesLayout
    unit : PlanesUnit
        Of the instruction; its bits are the width.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, 1], xsum i32 [M, 1], *packed arrays, [bias], [residual], y)``,
        with groups of activations as `apq_tvm.ops.activations.spread` gives them.
    """
    return _Gemv(spec, layout, unit, 1, 1).build()


def planes_gemv_apart(spec: LinearSpec, layout: PlanesLayout, unit: PlanesUnit) -> PrimFunc:
    """Linear layer for few rows of x with large tables; otherwise like `planes_gemv`."""
    return _Apart(spec, layout, unit, 1, 1).build()


def planes_gemm(
    spec: LinearSpec, layout: PlanesLayout, unit: PlanesUnit, m_tile: int, m_tiles: int
) -> PrimFunc:
    """Linear layer for M >= `m_tile` rows of x, `m_tiles` tiles in a task; otherwise alike."""
    return _Gemm(spec, layout, unit, m_tile, m_tiles).build()

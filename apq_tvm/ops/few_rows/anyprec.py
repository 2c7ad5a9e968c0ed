"""Linear layers on any-precision weights with int8 activations, as unscheduled TensorIR.

A kernel is for one width b and reads b planes (`apq_tvm.codegen.layouts.planes`). Three forms share
the loops of `apq_tvm.ops.many_rows.task`, a panel being one block of eight rows:

- `planes_gemv`, for one row of x: codes are looked up and multiplied in registers;
- `planes_gemv_apart`, likewise, where tables fill the registers: the codes of a run of columns are
  put together first, then every table is loaded once a run;
- `planes_gemm`: looked up centroids of the whole row block are stored once, then multiplied with
  tiles of rows of x; `planes_gemm_strided` likewise, in another order of columns.

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

from dataclasses import replace

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.ops.blocks import each, put
from apq_tvm.ops.few_rows.anyprec_task import PLANES_K, PlanesTask, digit_suffix, parts_of
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc
from apq_tvm.tensorize.meaning.planes import (
    FINE_BITS,
    QUAD,
    ROWS,
    PlanesStep,
    planes_codes,
    planes_dot,
    planes_lookup,
    rows_dot,
    table_dot,
)
from apq_tvm.tensorize.meaning.scaffold import View, product

RUN = 512
"""Columns whose codes `planes_gemv_apart` puts together at once: 4 KB of them."""

TILE_ROWS = 4
"""Rows of weights in a tile of the GEMM."""

SUM_ROWS = 2
"""Of them, those whose sums share a buffer: one of 1024 bytes would not reach the registers."""


class _Gemv(PlanesTask):
    """Lookups and products in registers."""

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        self.spread = b.sblock_alloc_buffer((ROWS, self.step.lanes), self.sum_dtype, align=64)
        self.clear("start", self.spread)
        self.stretches(self.dot)
        self.add_lanes("add", sums, lambda r: (0, 0, r), (self.spread, (ROWS,)))

    def dot(self, suffix: str, u: Expr, k: int) -> None:
        """Add the products of a stretch."""

        def views(*axis: Expr) -> list[View]:
            first = self.first(axis)
            return [*self.planes_at(first), *self.x_at(first), View(self.spread, (0, 0))]

        product(planes_dot(self.step_of(k)), f"dot{suffix}", views, self.around(u))


class _Apart(_Gemv):
    """Lookups in one table after the other."""

    width = RUN

    def scratch(self) -> None:
        self.codes = b.sblock_alloc_buffer((ROWS, RUN), "uint8", align=64)

    def dot(self, suffix: str, u: Expr, k: int) -> None:
        step, rows = self.step_of(k), ROWS // self.step.tables

        def planes(*axis: Expr) -> list[View]:
            return [self.planes_at(self.first(axis))[0], View(self.codes, (0, 0))]

        product(planes_codes(step), f"codes{suffix}", planes, self.around(u))
        for table in range(step.tables):

            def views(*axis: Expr, table: int = table) -> list[View]:
                x, mine = self.x_at(self.first(axis)), (table * rows, 0)
                at = (self.first_table(self.row_block(0)) + table, 0)
                entries = [View(held, at) for held in (self.table, self.halves) if held is not None]
                return [View(self.codes, mine), *entries, *x, View(self.spread, mine)]

            product(table_dot(step, rows), f"dot{suffix}{table}", views, self.around(u))


class _Gemm(PlanesTask):
    """Looked up bytes of a row block, reused for many rows of x.

    Weights of two bytes pass the tile twice: 16 times the sums of the first are what those of the
    second start from.
    """

    def scratch(self) -> None:
        width = -(-self.k // PLANES_K) * PLANES_K
        self.bytes = [
            b.sblock_alloc_buffer((ROWS, width), "uint8", align=64) for _ in range(self.step.digits)
        ]

    def fill(self, kb: Expr) -> None:
        for suffix, k in parts_of(self.k, PLANES_K):
            if suffix:
                self.look_up(suffix, self.first(()), k, self.bytes)
                continue
            with each("fill", self.whole) as axis:
                self.look_up("", self.first((axis,)), k, self.bytes)

    def look_up(
        self, suffix: str, first: Expr, k: int, into: list[Buffer], at: Expr | None = None
    ) -> None:
        """Store the bytes of `k` columns, from column `at` on, which is `first` unless said."""
        at = first if at is None else at
        for digit, found in enumerate(into):
            name = f"{suffix}{digit_suffix(digit)}"
            with self.stage(f"zero{name}", ROWS, k) as (r, column):
                put(found, [r, at + column], tirx.const(0, "uint8"))
            views = [*self.planes_at(first), View(found, (0, at))]
            product(planes_lookup(self.step_of(k), digit), f"lookup{name}", lambda v=views: v)

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        shape = (self.blocking.m_tile, SUM_ROWS, self.step.lanes)
        for start in range(0, ROWS, TILE_ROWS):
            rows = range(start, start + TILE_ROWS, SUM_ROWS)
            spread = {r: b.sblock_alloc_buffer(shape, self.sum_dtype, align=64) for r in rows}
            for r in rows:
                self.clear(f"start{r}", spread[r])
            self.add_products(0, list(rows), spread)
            if self.step.two_digits:
                spread = self._raised(spread)
                self.add_products(1, list(rows), spread)
            for r in rows:
                self.add_lanes(
                    f"add{r}", sums, lambda m, i, r=r: (m, 0, r + i), (spread[r], shape[:2])
                )

    def _raised(self, spread: dict[int, Buffer]) -> dict[int, Buffer]:
        """Sums of the second byte's unit, which start from those of the first."""
        raised = {}
        for r, sums in spread.items():
            raised[r] = b.sblock_alloc_buffer(sums.shape, self.sum_dtype, align=64)
            with self.stage(f"start_fine{r}", *sums.shape) as at:
                value = sums[at] * tirx.const(1 << FINE_BITS, self.sum_dtype)
                put(raised[r], at, value, sums[at])
        return raised

    def add_products(self, digit: int, rows: list[int], spread: dict[int, Buffer]) -> None:
        """Add the products of one byte of the weights."""
        suffix = digit_suffix(digit)
        if self.whole:
            with b.serial(0, self.whole) as u:
                for r in rows:
                    self._dot(f"dot{suffix}{r}", spread[r], r, u, PLANES_K, digit)
        for r in rows:
            if self.k % PLANES_K:
                self._dot(f"dot_tail{suffix}{r}", spread[r], r, None, self.k % PLANES_K, digit)

    def _dot(self, name: str, spread: Buffer, row: int, u: Expr, k: int, digit: int) -> None:
        def views(*axis: Expr) -> list[View]:
            first = self.first(axis)
            return [
                View(self.bytes[digit], (row, first)),
                *self.x_at(first),
                View(spread, (0, 0, 0)),
            ]

        meaning = rows_dot(self.step_of(k), self.blocking.m_tile, SUM_ROWS)
        product(meaning, name, views, self.around(u))


class _Strided(_Gemm):
    """Sums of integers over whole groups of activations.

    A register of columns side by side holds parts of several groups: after every product a lane
    multiplies its integers by the scale of its own. In a *span*, of as many groups as a register
    has lanes, `QUAD` columns of each group are one register instead, so that lane l stays with
    group l: the integers of a span are one sum, which is scaled once. x comes so
    (`apq_tvm.ops.activations.spread`), looked up bytes are turned so once for all rows of x. What
    is left of K after whole spans is as in `_Gemm`.
    """

    def __init__(
        self, spec: LinearSpec, layout: PlanesLayout, step: PlanesStep, m_tile: int, m_tiles: int
    ) -> None:
        super().__init__(spec, layout, step, m_tile, m_tiles)
        self.span = step.lanes * step.group
        self.spans = spec.k // self.span
        self.rest = self.k - self.spans * self.span

    def scratch(self) -> None:
        def allocated(columns: int) -> list[Buffer]:
            shape = (ROWS, max(1, -(-columns // PLANES_K)) * PLANES_K)
            digits = range(self.step.digits)
            return [b.sblock_alloc_buffer(shape, "uint8", align=64) for _ in digits]

        self.straight, self.turned = allocated(self.span), allocated(self.spans * self.span)
        self.bytes = allocated(self.rest)

    def fill(self, kb: Expr) -> None:
        group, vector = self.step.group, self.step.vector
        with each("fill_span", self.spans) as s:
            with each("fill", self.span // PLANES_K) as u:
                first = u * PLANES_K
                self.look_up("", s * self.span + first, PLANES_K, self.straight, first)
            shape = (ROWS, group // QUAD, self.step.lanes, QUAD)
            for digit in range(self.step.digits):
                with self.stage(f"turn{digit_suffix(digit)}", *shape) as (r, j, lane, byte):
                    mine = self.straight[digit][r, lane * group + j * QUAD + byte]
                    at = s * self.span + j * vector + lane * QUAD + byte
                    put(self.turned[digit], [r, at], mine, mine)
        for suffix, first, k in stretches_left(self.rest):
            self.look_up(f"_left{suffix}", self.spans * self.span + first, k, self.bytes, first)

    def add_products(self, digit: int, rows: list[int], spread: dict[int, Buffer]) -> None:
        m, suffix = self.blocking.m_tile, digit_suffix(digit)
        step = replace(self.step, k=self.span, strided=True)
        with b.serial(0, self.spans) as u:
            for r in rows:

                def views(axis: Expr, r: int = r) -> list[View]:
                    first = axis * self.span
                    turned = View(self.turned[digit], (r, first))
                    return [turned, *self.x_at(first), View(spread[r], (0, 0, 0))]

                meaning = rows_dot(step, m, SUM_ROWS)
                product(meaning, f"dot{suffix}{r}", views, [(u, self.spans)])
        for left, first, k in stretches_left(self.rest):
            for r in rows:
                x = self.x_at(self.spans * self.span + first)
                found = [View(self.bytes[digit], (r, first)), *x, View(spread[r], (0, 0, 0))]
                meaning = rows_dot(self.step_of(k), m, SUM_ROWS)
                product(meaning, f"dot_left{left}{suffix}{r}", lambda v=found: v)


def stretches_left(columns: int) -> list[tuple[str, int, int]]:
    """(suffix, first column, columns) of the stretches of what whole spans leave of K."""
    whole, rest = divmod(columns, PLANES_K)
    parts = [(str(i), i * PLANES_K, PLANES_K) for i in range(whole)]
    return parts + ([("_tail", whole * PLANES_K, rest)] if rest else [])


def planes_gemv(spec: LinearSpec, layout: PlanesLayout, step: PlanesStep) -> PrimFunc:
    """Linear layer for one or few rows of x.

    Parameters
    ----------
    spec : LinearSpec
        Any-precision with integer activations.
    layout : PlanesLayout
    step : PlanesStep
        Of the instruction; its bits are the width.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, 1], xsum i32 [M, 1], *packed arrays, [bias], [residual], y)``,
        with groups of activations as `apq_tvm.ops.activations.spread` gives them.
    """
    return _Gemv(spec, layout, step).build()


def planes_gemv_apart(spec: LinearSpec, layout: PlanesLayout, step: PlanesStep) -> PrimFunc:
    """Linear layer for few rows of x with large tables; otherwise like `planes_gemv`."""
    return _Apart(spec, layout, step).build()


def planes_gemm(
    spec: LinearSpec, layout: PlanesLayout, step: PlanesStep, m_tile: int, m_tiles: int
) -> PrimFunc:
    """Linear layer for M >= `m_tile` rows of x, `m_tiles` tiles in a task; otherwise alike."""
    return _Gemm(spec, layout, step, m_tile, m_tiles).build()


def planes_gemm_strided(
    spec: LinearSpec, layout: PlanesLayout, step: PlanesStep, m_tile: int, m_tiles: int
) -> PrimFunc:
    """The same of x whose whole spans are turned; K has a span at least."""
    return _Strided(spec, layout, step, m_tile, m_tiles).build()

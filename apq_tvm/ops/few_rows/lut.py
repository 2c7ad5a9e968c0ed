"""``y = act(x Wᵀ + b) + residual`` on binary codes by tables of activation sums, unscheduled.

LUT-GEMM (section 3)::

    y[m, n] = Σ_g (Σ_i alpha[n, g, i] Σ_quads table[m, quad, key] + z[n, g] Σ x[m, k])

No weight is decoded: four bits of a plane pick a sum out of `apq_tvm.ops.activations.lut_tables`.
Three loop nests: lookups per span of columns, their sum with the scales, and the store with its
epilogue. M is covered by tiles and row blocks are read by streams as in `apq_tvm.ops.linear.nest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.ops.activations.lut_tables import MIDDLE, span_width, units_of
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.tensorize.exprs import MAGIC, MAGIC_BITS, f32, i32, i64
from apq_tvm.tensorize.meaning.binary_codes import ENTRIES, QUADS, LutDot, lut_meaning
from apq_tvm.tensorize.meaning.scaffold import View, product

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class LutBlocking:
    """Extents of the loops of a PrimFunc that looks weights up.

    Parameters
    ----------
    dot : LutDot
        Lookups of one unit: planes, rows, rows of x per tile.
    streams : int
        Row blocks that are read at once.
    bundles : int
        Row blocks of one stream.
    span : int
        Columns that share a table scale.
    spans : int
        Of one row.
    """

    dot: LutDot
    streams: int
    bundles: int
    span: int
    spans: int

    @classmethod
    def of(
        cls, layout: BcqLayout, n: int, k: int, m_tile: int, streams: int, table_dtype: str
    ) -> LutBlocking:
        """The blocking of an [n, k] matrix in `layout`."""
        padded = layout.padded_k(k)
        span = span_width(padded, layout.group_size)
        bundles = -(-layout.row_blocks(n) // streams)
        dot = LutDot(layout.unit, m_tile, table_dtype)
        return cls(dot, streams, bundles, span, padded // span)

    @property
    def lanes(self) -> tuple[int, ...]:
        """Shape of the sums of one row of x and row block."""
        unit = self.dot.unit
        return (2, 16) if unit.paired else (unit.rows,)

    @property
    def row_axes(self) -> int:
        """Axes for rows of a tile: none where there is one."""
        return 1 if self.dot.m > 1 else 0


def lut_linear(
    spec: LinearSpec, layout: BcqLayout, m_tile: int, streams: int, table_dtype: str
) -> Any:
    """Linear layer on binary codes.

    Parameters
    ----------
    spec : LinearSpec
    layout : BcqLayout
    m_tile : int
        Rows of x per tile; M must be at least that.
    streams : int
        Row blocks that are read at once.
    table_dtype : {"uint8", "float32"}

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(tables [M, 4 Kp], [table_scales f32 [M, spans],] sums f32 [M, spans], codes, scales,
        [bias], [residual], y)``, blocks ``dot``, ``scale`` and ``store``.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    blocking = LutBlocking.of(layout, spec.n, spec.k, m_tile, streams, table_dtype)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m, spans = operands.m, blocking.spans
        tables = operands.declare("tables", (m, 4 * layout.padded_k(spec.k)), table_dtype)
        scales = None
        if table_dtype == "uint8":
            scales = operands.declare("table_scales", (m, spans), "float32")
        totals = operands.declare("sums", (m, spans), "float32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = _Nest(spec, layout, blocking, m)
        dots = b.sblock_alloc_buffer(nest.dots_shape, blocking.dot.acc_dtype)
        sums = b.sblock_alloc_buffer(nest.sums_shape, "float32")
        nest.dot(dots, tables, weights["codes"])
        nest.scale(sums, dots, weights["scales"], scales, totals)
        nest.store(y, sums, bias, residual)
    return builder.get()


class _Nest:
    """Emits the loop nests.

    Buffers between the nests are indexed by loop variables alone, (tile, bundle, [span,] stream,
    [row of the tile,] [plane,] lanes), so that each nest can be computed inside the next.
    """

    def __init__(self, spec: LinearSpec, layout: BcqLayout, blocking: LutBlocking, m: Expr) -> None:
        self.spec, self.layout, self.blocking, self.m = spec, layout, blocking, m
        tile = blocking.dot.m
        outer = [(m + i64(tile - 1)) // i64(tile), i64(blocking.bundles)]
        streams = i64(blocking.streams)
        self.dots_shape = [
            *outer,
            i64(blocking.spans),
            streams,
            *map(i64, blocking.dot.acc_shape),
        ]
        rows = [i64(tile)] if tile > 1 else []
        self.sums_shape = [*outer, streams, *rows, *map(i64, blocking.lanes)]

    def _first(self, tile: Expr) -> Expr:
        """First row of x of a tile. The last tile ends at M."""
        from tvm import tirx

        mt = self.blocking.dot.m
        return tirx.min(tile * i64(mt), self.m - i64(mt)) if mt > 1 else tile

    def _row(self, tile: Expr, inner: Expr | None) -> Expr:
        """Row of x."""
        return self._first(tile) if inner is None else self._first(tile) + inner

    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block, past the end in the last bundle of ragged streams."""
        return stream * i64(self.blocking.bundles) + bundle

    def _block(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        from tvm import tirx

        index, last = self._block_index(bundle, stream), self.layout.row_blocks(self.spec.n) - 1
        return tirx.min(index, i64(last)) if self._ragged else index

    @property
    def _ragged(self) -> bool:
        return self.layout.row_blocks(self.spec.n) % self.blocking.streams != 0

    def dot(self, dots: Buffer, tables: Buffer, codes: Buffer) -> None:
        """Sums of looked-up entries, less what integer tables add to each."""
        dot, units = self.blocking.dot, units_of(self.blocking.span)

        def views(t: Expr, nb: Expr, g: Expr, s: Expr, u: Expr) -> tuple[View, ...]:
            index = g * i64(units) + u
            return (
                View(codes, (self._block(nb, s), index, 0)),
                View(tables, (self._first(t), index * i64(QUADS * ENTRIES))),
                View(dots, (t, nb, g, s, *(0,) * len(dot.acc_shape))),
            )

        outer = self.dots_shape[:4]
        product(lut_meaning(dot), "dot", views, (), outer, [i64(units)], init=self._start)

    def _start(self, lanes: Sequence[Expr]) -> Expr:
        """What sums start from, so that they end as if tables held no `MIDDLE`."""
        from tvm import tirx

        dot = self.blocking.dot
        if dot.table_dtype == "float32":
            return tirx.const(0.0, "float32")
        excess = -MIDDLE * (self.blocking.span // 4)
        if not dot.unit.bytewise:
            return tirx.const(excess, "int32")
        if not dot.unit.paired:
            return tirx.const(excess % 65536, "uint16")
        odd, both = excess % 65536, excess * 257 % 65536
        second = lanes[-2] == i64(1)
        return tirx.Select(second, tirx.const(odd, "uint16"), tirx.const(both, "uint16"))

    def scale(
        self, sums: Buffer, dots: Buffer, scales: Buffer, steps: Buffer | None, totals: Buffer
    ) -> None:
        """Σ over spans of (Σ_i alpha_i dot_i) step + z Σx."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, unit = self.blocking, self.blocking.dot.unit
        width = self.layout.group_width(self.spec.k)
        kinds = "S" * len(self.sums_shape) + "R"
        with b.grid(*self.sums_shape, i64(bl.spans)) as loops, b.sblock("scale"):
            *target, g = b.axis.remap(kinds, loops)
            t, nb, s, *inner = target
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            tile_row = inner[0] if bl.row_axes else None
            lanes = inner[bl.row_axes :]
            lane = lanes[0] * i64(16) + lanes[1] if unit.paired else lanes[0]
            block, row = self._block(nb, s), self._row(t, tile_row)
            group = g if width == bl.span else g * i64(bl.span) // i64(width)
            total = None
            for plane in range(unit.bits):
                alpha = scales[block, group, plane, lane].astype("float32")
                at = [t, nb, g, s, *([tile_row] if tile_row is not None else [])]
                at += [i64(plane)] if unit.bits > 1 else []
                term = alpha * self._sum(dots, at, lanes)
                total = term if total is None else total + term
            if steps is not None:
                total = total * steps[row, g]
            offset = scales[block, group, unit.bits, lane].astype("float32")
            value = sums[tuple(target)] + total + offset * totals[row, g]
            b.buffer_store(sums, value, target)

    def _sum(self, dots: Buffer, at: list[Expr], lanes: list[Expr]) -> Expr:
        """float32 sum of one plane; the two halves of a paired unit are taken apart."""
        from tvm import tirx

        unit = self.blocking.dot.unit
        if not unit.bytewise:
            return dots[(*at, *lanes)].astype("float32")
        if not unit.paired:
            # No conversion.
            total = tirx.reinterpret("int16", dots[(*at, *lanes)]).astype("int32")
            return tirx.reinterpret("float32", total + i32(MAGIC_BITS)) - f32(MAGIC)
        half, lane = lanes
        both, odd = dots[(*at, i64(0), lane)], dots[(*at, i64(1), lane)]
        even = both - tirx.shift_left(odd, tirx.const(8, "uint16"))
        chosen = tirx.Select(half == i64(1), odd, even)
        return tirx.reinterpret("int16", chosen).astype("int32").astype("float32")

    def store(self, y: Buffer, sums: Buffer, bias: Buffer | None, residual: Buffer | None) -> None:
        """Epilogue of every sum inside [M, N]."""
        from tvm.tirx.script.builder import ir as b

        def output(target: list[Expr], total: Expr, lane: Expr) -> tuple[Expr, list[Expr]]:
            row = self._row(target[0], target[3] if self.blocking.row_axes else None)
            col = self._column(target) + lane
            return epilogue_of(self.spec, total, bias, residual, row, col), [row, col]

        if not self.whole:
            self._store_ragged(sums, y, output)
            return
        with b.grid(*self.sums_shape) as loops, b.sblock("store"):
            *target, lane = b.axis.remap("S" * len(self.sums_shape), loops)
            value, at = output(target, sums[(*target, lane)], lane)
            b.buffer_store(y, value, at)

    @property
    def whole(self) -> bool:
        """Whether every lane of every block is a row of the matrix."""
        return self.spec.n % self.layout.rows == 0 and not self._ragged

    def _column(self, target: list[Expr]) -> Expr:
        """Column of y of a vector's first lane; `target` is an index into the sums without it."""
        first = self._block_index(target[1], target[2]) * i64(self.layout.rows)
        return first + target[-1] * i64(16) if self.blocking.dot.unit.paired else first

    def _store_ragged(self, sums: Buffer, y: Buffer, output: Any) -> None:
        """Whole vectors where they fit; lane by lane, from a copy, where N ends within one.

        The lanes are loops of the block itself: a schedule could not treat the two cases apart. The
        copy leaves the sums with constant indices, so that they stay in registers.
        """
        from tvm.tirx.script.builder import ir as b

        n, lanes = self.spec.n, self.blocking.lanes[-1]
        with b.grid(*self.sums_shape[:-1]) as loops, b.sblock("store"):
            target = list(b.axis.remap("S" * len(loops), loops))
            first = self._column(target)
            row = self._row(target[0], target[3] if self.blocking.row_axes else None)
            b.reads(sums[(*target, slice(0, i64(lanes)))])
            b.writes(y[row, first : first + i64(lanes)])
            tail = b.sblock_alloc_buffer([i64(lanes)], "float32")
            with b.If(first < i64(n - lanes + 1)):
                with b.Then(), b.vectorized(i64(lanes)) as lane:
                    value, at = output(target, sums[(*target, lane)], lane)
                    b.buffer_store(y, value, at)
                with b.Else(), b.If(first < i64(n)), b.Then():
                    with b.vectorized(i64(lanes)) as lane:
                        b.buffer_store(tail, sums[(*target, lane)], [lane])
                    with b.serial(i64(n % lanes)) as lane:
                        value, at = output(target, tail[lane], lane)
                        b.buffer_store(y, value, at)

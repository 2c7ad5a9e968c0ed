"""``y = act(x Wᵀ + b) + residual`` for few rows of x and weights in small groups (`SpanLayout`).

Per task of row blocks, tile of rows of x and span: for every unit the dot products of its groups
(block ``dot``, for an intrinsic), which become part of the span's totals with the sub-scales and
the activations' scales::

    total += xs * sub * (dot - offset * xsum)
    sum   += scale * total                                                at the span's end

The products with sub-scales are integers, exact in a float.

M tiles and streams are as in `apq_tvm.ops.linear.nest`. The last span of a row may be short, in
units of 32: it has a loop of its own, so that no loop inside a span has a varying end. All that the
loops keep is small and has constant indices, so that it lives in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import SpanLayout
from apq_tvm.ops.blocks import each, put
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.ops.many_rows.task import STAGES
from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.packed_dot import LookupDot
from apq_tvm.tensorize.meaning.scaffold import Meaning, View, product

DOTS = "apq.dots"
"""Annotation of the root block: names of the blocks for an intrinsic."""


@dataclass(frozen=True)
class SpanBlocking:
    """Extents of the loops.

    Parameters
    ----------
    m_tile : int
        Rows of x per tile.
    streams : int
        Row blocks read at once.
    step : int
        Units in an iteration.
    """

    m_tile: int
    streams: int
    step: int = 1


def lookup_of(layout: SpanLayout, m_tile: int) -> LookupDot:
    """What the intrinsic of a layout with a table computes."""
    return LookupDot(layout.unit, layout.entries, m_tile)


def span_linear(spec: LinearSpec, layout: SpanLayout, blocking: SpanBlocking) -> Any:
    """Linear layer with int8 activations.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations, one scale per group of weights.
    layout : SpanLayout
    blocking : SpanBlocking

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, groups], xsum i32 [M, groups], *packed arrays, [bias],
        [residual], y)``, M >= m_tile.
    """
    return SpanLinear(spec, layout, blocking).build()


class SpanLinear:
    """The loops; a subclass may take more operands and do otherwise within a span."""

    def __init__(self, spec: LinearSpec, layout: SpanLayout, blocking: SpanBlocking) -> None:
        self.spec, self.layout, self.blocking = spec, layout, blocking
        assert spec.scheme is not None
        self.dot = lookup_of(layout, blocking.m_tile)
        self.row_blocks = layout.row_blocks(spec.n)
        self.bundles = -(-self.row_blocks // blocking.streams)
        units = layout.padded_k(spec.k) // UNIT_K
        per_span = layout.span // UNIT_K
        self.spans, self.units = units // per_span, per_span
        self.tail = units % per_span
        assert spec.scheme.act_group == layout.group
        self.unit_scale, self.spans_at_once = layout.unit_scale, 1
        self.stages: list[str] = []
        self.dots: list[str] = []

    def declare(self, operands: Operands) -> None:
        """Declare the activations."""
        groups = self.layout.groups(self.spec.k)
        self.xq = operands.declare("xq", (self.m, self.layout.padded_k(self.spec.k)), "int8")
        self.xs = operands.declare("xs", (self.m, groups), "float32")
        self.xsum = operands.declare("xsum", (self.m, groups), "int32")

    def build(self) -> Any:
        """The PrimFunc."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as b

        spec = self.spec
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            operands = Operands(spec)
            self.m = operands.m
            self.declare(operands)
            self.arrays = operands.weights(self.layout)
            self.bias, self.residual, self.y = operands.epilogue()
            with b.sblock("root"):
                b.reads()
                b.writes()
                with b.serial(0, i64(self.bundles)) as t, b.sblock("task"):
                    self.bundle = b.axis.spatial(i64(self.bundles), t)
                    b.reads()
                    b.writes(self.y[0 : self.m, 0 : spec.n])
                    self._tiles()
                b.sblock_attr({STAGES: self.stages, DOTS: self.dots})
        return builder.get()

    def _tiles(self) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        mt = i64(self.blocking.m_tile)
        tiles = (self.m + mt - i64(1)) // mt
        with each("tile", tiles) as tile:
            self.row = b.bind(tirx.min(tile * mt, self.m - mt))
            shape = self._shape()
            self.sums = b.sblock_alloc_buffer(shape, "float32", align=64)
            with self._stage("clear_sums", *shape) as at:
                b.writes(self.sums[at])
                b.buffer_store(self.sums, tirx.const(0.0, "float32"), list(at))
            if self.spans:
                count = self.spans_at_once
                with b.serial(0, i64(self.spans // count)) as s, b.sblock("span"):
                    first = b.axis.opaque(i64(self.spans // count), s)
                    b.reads()
                    b.writes()
                    for i in range(count):
                        span = first * i64(count) + i64(i) if count > 1 else first
                        self.span(span, self.units, f"_{i}" if count > 1 else "")
            if self.tail:
                with b.sblock("tail_span"):
                    b.reads()
                    b.writes()
                    self.span(i64(self.spans), self.tail, "_tail")
            self._store()

    def _shape(self) -> tuple[int, int, int]:
        return self.blocking.streams, self.blocking.m_tile, self.layout.rows

    def span(self, span: Expr, units: int, suffix: str) -> None:
        """Add a span's products, of so many units of k, to the sums."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        shape, layout = self._shape(), self.layout
        totals = b.sblock_alloc_buffer(shape, "float32", align=64)
        with self._stage(f"clear{suffix}", *shape) as at:
            b.writes(totals[at])
            b.buffer_store(totals, tirx.const(0.0, "float32"), list(at))
        step = self.blocking.step
        loops = ((0, units // step, step), (units // step * step, 1, units % step))
        for first, count, inner in loops:
            if not count or not inner:
                continue
            end = suffix if first == 0 else f"{suffix}_odd"
            with b.serial(0, i64(count)) as i, b.sblock(f"units{end}"):
                index = b.axis.opaque(i64(count), i)
                b.reads()
                b.writes()
                for part in range(inner):
                    unit = span * i64(self.units) + i64(first + part) + index * i64(inner)
                    # The sum of a group's activations is taken off once, with its first unit.
                    opens = part % max(1, layout.group // UNIT_K) == 0
                    for stream in range(self.blocking.streams):
                        self._unit(unit, stream, totals, f"{end}_{part}_{stream}", opens)
        with self._stage(f"scale{suffix}", *shape) as (s, m, r):
            block = self.block(s)
            term = totals[s, m, r] * layout.scale(self.arrays, block, span, r)
            # `sums` is left out of the reads: TVM would not vectorize a running sum.
            put(self.sums, [s, m, r], self.sums[s, m, r] + term, totals[s, m, r])

    def _unit(self, unit: Expr, stream: int, totals: Buffer, suffix: str, opens: bool) -> None:
        """Dot products of one unit of one stream, and their share of the totals.

        `opens` tells that the unit's groups start with it.
        """
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        layout, dot, block = self.layout, self.dot, self.block(i64(stream))
        per_unit = dot.unit.groups
        first = unit * i64(per_unit) if per_unit > 1 else unit // i64(layout.group // UNIT_K)
        with b.sblock(f"unit{suffix}"):
            b.reads()
            b.writes()
            dots = b.sblock_alloc_buffer(dot.spatial, "int32", align=64)
            codes = View(self.arrays["codes"], (block, unit, 0))
            x = self.rows_of(self.xq, unit * i64(UNIT_K))
            views = [codes, x, View(self.arrays["table"], (i64(0),))]
            if dot.books > 1:
                book = b.sblock_alloc_buffer(dot.book_shape, "uint8", align=64)
                views.append(View(book, (i64(0),) * len(dot.book_shape)))
                with self._stage(f"book{suffix}", per_unit, layout.rows) as (p, r):
                    value = layout.book(self.arrays, block, first + p, r)
                    where = (p, r) if dot.groups else (r,)
                    put(book, where, value)
            with self._stage(f"zero{suffix}", *dots.shape) as at:
                b.writes(dots[tuple(at)])
                b.buffer_store(dots, tirx.const(0, "int32"), list(at))
            views.append(View(dots, (0,) * len(dots.shape)))
            self.product(dot.meaning, views, f"dot{suffix}")
            for p in range(per_unit):
                with self._stage(f"add{suffix}_{p}", dot.m, layout.rows) as (m, r):
                    self._add(dots, totals, (stream, block, first + i64(p)), (p, m, r), opens)

    def rows_of(self, buffer: Buffer, *first: Expr) -> View:
        """A tile's rows of activations, or of what comes with them, from index `first` on."""
        return View(buffer, (self.row, *first))

    def product(self, meaning: Meaning, views: Sequence[View], name: str) -> None:
        """The block `name`, for an intrinsic."""
        self.dots.append(name)
        product(meaning, name, lambda: views)

    def _add(
        self,
        dots: Buffer,
        totals: Buffer,
        where: tuple[int, Expr, Expr],
        at: tuple[int, Expr, Expr],
        opens: bool,
    ) -> None:
        """The share of the totals of one group in a stream and row block."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        (stream, block, group), (p, m, r), layout, dot = where, at, self.layout, self.dot
        value = dots[(*((p,) if dot.groups else ()), *((m,) if dot.m > 1 else ()), r)]
        b.reads(value)
        b.writes(totals[stream, m, r])
        if opens:
            offset = tirx.const(layout.offset, "int32")
            value = value - self.xsum[self.row + m, group] * offset
        sub = layout.sub(self.arrays, block, group, r)
        if sub is not None:
            value = value * sub.astype("int32")
        term = value.astype("float32") * self.xs[self.row + m, group]
        b.buffer_store(totals, totals[stream, m, r] + term, [stream, m, r])

    def _index(self, stream: Expr) -> Expr:
        """Row block, past the end in the last bundle of ragged streams."""
        return stream * i64(self.bundles) + self.bundle

    def block(self, stream: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        from tvm import tirx

        index = self._index(stream)
        if self.row_blocks % self.blocking.streams:
            return tirx.min(index, i64(self.row_blocks - 1))
        return index

    def _store(self) -> None:
        from tvm.tirx.script.builder import ir as b

        shape, spec, rows = self._shape(), self.spec, self.layout.rows
        tail = spec.n % rows
        if not tail and self.row_blocks % self.blocking.streams == 0:
            with self._stage("store", *shape) as (s, m, r):
                self._write(self.sums, s, m, r)
            return
        results = b.sblock_alloc_buffer(shape, "float32", align=64)
        with self._stage("spill", *shape) as at:
            put(results, at, self.sums[at], self.sums[at])
        with b.grid(*map(i64, shape[:2])) as (s0, m0), b.sblock("vector"):
            s, m = b.axis.spatial(shape[0], s0), b.axis.spatial(shape[1], m0)
            b.reads()
            b.writes()
            with b.If(self._index(s) < i64(spec.n // rows)), b.Then():
                with self._stage("store", rows) as (r,):
                    self._write(results, s, m, r)
            if tail:
                with b.If(self._index(s) == i64(spec.n // rows)), b.Then():
                    with b.serial(0, i64(tail)) as r0, b.sblock("store_tail"):
                        self._write(results, s, m, b.axis.spatial(i64(tail), r0))

    def _write(self, source: Buffer, s: Expr, m: Expr, r: Expr) -> None:
        """The epilogue of one sum."""
        from tvm import tirx

        row, col = self.row + m, self._index(s) * i64(self.layout.rows) + r
        value = source[s, m, r] * tirx.const(self.unit_scale, "float32")
        value = epilogue_of(self.spec, value, self.bias, self.residual, row, col)
        put(self.y, [row, col], value, source[s, m, r])

    @contextmanager
    def _stage(self, name: str, *extents: int) -> Iterator[tuple[Expr, ...]]:
        """A loop nest over `extents` around a block with one spatial axis for each."""
        from tvm.tirx.script.builder import ir as b

        self.stages.append(name)
        sizes = [i64(e) for e in extents]
        with b.sblock(f"{name}_stage"):
            b.reads()
            b.writes()
            with b.grid(*sizes) as loops, b.sblock(name):
                loops = [loops] if len(sizes) == 1 else loops
                pairs = zip(sizes, loops, strict=True)
                yield tuple(b.axis.spatial(size, loop) for size, loop in pairs)

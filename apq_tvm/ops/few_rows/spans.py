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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import SpanLayout
from apq_tvm.ops.blocks import put
from apq_tvm.ops.few_rows.task import FewRows
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.packed_dot import LookupDot
from apq_tvm.tensorize.meaning.scaffold import View


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


class SpanLinear(FewRows):
    """A subclass may take more operands and do otherwise within a span."""

    layout: SpanLayout

    def __init__(self, spec: LinearSpec, layout: SpanLayout, blocking: SpanBlocking) -> None:
        super().__init__(spec, layout, blocking.m_tile, blocking.streams)
        self.step = blocking.step
        assert spec.scheme is not None
        self.dot = lookup_of(layout, blocking.m_tile)
        units = layout.padded_k(spec.k) // UNIT_K
        per_span = layout.span // UNIT_K
        self.spans, self.units = units // per_span, per_span
        self.tail = units % per_span
        assert spec.scheme.act_group == layout.group
        self.unit_scale, self.spans_at_once = layout.unit_scale, 1

    def declare(self, operands: Operands) -> None:
        """Declare the activations."""
        groups = self.layout.groups(self.spec.k)
        self.xq = operands.declare("xq", (self.m, self.layout.padded_k(self.spec.k)), "int8")
        self.xs = operands.declare("xs", (self.m, groups), "float32")
        self.xsum = operands.declare("xsum", (self.m, groups), "int32")

    def products(self) -> None:
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

    def span(self, span: Expr, units: int, suffix: str) -> None:
        """Add a span's products, of so many units of k, to the sums."""
        layout, step = self.layout, self.step
        totals = self.cleared(f"totals{suffix}", "float32")
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
                    for stream in range(self.streams.count):
                        self._unit(unit, stream, totals, f"{end}_{part}_{stream}", opens)
        with self.stage(f"scale{suffix}", *self.shape) as (s, m, r):
            block = self.block(s)
            term = totals[s, m, r] * layout.scale(self.arrays, block, span, r)
            # `sums` is left out of the reads: TVM would not vectorize a running sum.
            put(self.sums, [s, m, r], self.sums[s, m, r] + term, totals[s, m, r])

    def _unit(self, unit: Expr, stream: int, totals: Buffer, suffix: str, opens: bool) -> None:
        """Dot products of one unit of one stream, and their share of the totals.

        `opens` tells that the unit's groups start with it.
        """
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
                with self.stage(f"book{suffix}", per_unit, layout.rows) as (p, r):
                    value = layout.book(self.arrays, block, first + p, r)
                    where = (p, r) if dot.groups else (r,)
                    put(book, where, value)
            with self.stage(f"zero{suffix}", *dots.shape) as at:
                b.writes(dots[tuple(at)])
                b.buffer_store(dots, tirx.const(0, "int32"), list(at))
            views.append(View(dots, (0,) * len(dots.shape)))
            self.product(dot.meaning, views, f"dot{suffix}")
            for p in range(per_unit):
                with self.stage(f"add{suffix}_{p}", dot.m, layout.rows) as (m, r):
                    self._add(dots, totals, (stream, block, first + i64(p)), (p, m, r), opens)

    def _add(
        self,
        dots: Buffer,
        totals: Buffer,
        where: tuple[int, Expr, Expr],
        at: tuple[int, Expr, Expr],
        opens: bool,
    ) -> None:
        """The share of the totals of one group in a stream and row block."""
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

    def value(self, kept: Sequence[Buffer], s: Expr, m: Expr, r: Expr) -> Expr:
        return kept[0][s, m, r] * tirx.const(self.unit_scale, "float32")

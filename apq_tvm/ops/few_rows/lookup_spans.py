"""``y = act(x Wᵀ + b) + residual`` for few rows of x and looked up weights, a span at a time.

Tiles, streams and the epilogue are those of `apq_tvm.ops.few_rows.spans`; the products of a span of
a row block, with all scales, are one block for an intrinsic
(`apq_tvm.tensorize.meaning.spans.lookup`). Besides codes and scales the kernel takes `extra` with
the activations, what `apq_tvm.ops.activations.extra` computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import SpanLayout
from apq_tvm.ops.few_rows.spans import SpanBlocking, SpanLinear
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.scaffold import View
from apq_tvm.tensorize.meaning.spans.lookup import EXTRA, SpanDot


@dataclass(frozen=True)
class Lookup:
    """How a layout is computed.

    Parameters
    ----------
    layout : SpanLayout
        Of four rows.
    kind : type of SpanDot
        The dot product of a span, or of what is left of one.
    step : int
        k of a unit.
    unit : float
        `SpanDot.unit`.
    acts : float
        What the activations' scales have been multiplied by.
    factor : float or None
        What they are multiplied by in `extra`; None for the sums of the activations' codes.
    """

    layout: SpanLayout
    kind: type[SpanDot]
    step: int
    unit: float
    acts: float
    factor: float | None

    def dot(self, m: int, k: int) -> SpanDot:
        """The product of `m` rows of x with `k` columns."""
        at = self.layout
        return self.kind(m, k, at.group, at.entries, at.offset, self.unit, at.bits)


def lookup_spans(spec: LinearSpec, lookup: Lookup, blocking: SpanBlocking) -> Any:
    """Linear layer with int8 activations.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations, one scale per group of weights.
    lookup : Lookup
    blocking : SpanBlocking
        Its step is spans in an iteration, at most.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, groups], xsum i32 [M, groups], extra f32 [M, groups, 8],
        *packed arrays, [bias], [residual], y)``, M >= m_tile. The root's annotation `DOTS` of
        `apq_tvm.ops.few_rows.task` names the blocks for an intrinsic; those of a short last span
        are called ``tail...``.
    """
    return _LookupSpans(spec, lookup, blocking).build()


class _LookupSpans(SpanLinear):
    def __init__(self, spec: LinearSpec, lookup: Lookup, blocking: SpanBlocking) -> None:
        layout = lookup.layout
        super().__init__(spec, layout, blocking)
        self.lookup = lookup
        self.unit_scale /= lookup.acts * lookup.unit
        self.units = layout.span // lookup.step
        self.spans, self.tail = divmod(layout.padded_k(spec.k) // lookup.step, self.units)
        self.spans_at_once = max(c for c in range(1, blocking.step + 1) if self.spans % c == 0)

    def declare(self, operands: Operands) -> None:
        super().declare(operands)
        shape = (self.m, self.layout.groups(self.spec.k), EXTRA)
        self.extra = operands.declare("extra", shape, "float32")

    def span(self, span: Expr, units: int, suffix: str) -> None:
        for stream in range(self.streams.count):
            start = "" if "tail" in suffix else "_span"
            self._dot_span(span, units, stream, f"{start}{suffix}_{stream}"[1:])

    def _dot_span(self, span: Expr, units: int, stream: int, name: str) -> None:
        layout, mt = self.layout, self.m_tile
        dot = self.lookup.dot(mt, units * self.lookup.step)
        block, group = self.block(i64(stream)), span * i64(layout.span_groups)
        each = self.lookup.dot(1, layout.span).arrays

        def part(name: str) -> View:
            """From the span on; one of its units where the operand has no axis of them."""
            per_span = each[name][0]
            first = span * per_span[0] if per_span[1:] else span
            return View(self.arrays[name], (block, first, 0))

        views = [part(name) for name in dot.arrays]
        if layout.entries:
            views.append(View(self.arrays["table"], (0,)))
        views.append(View(self.arrays["scales"], (block, span, i64(0))))
        views.append(self.rows_of(self.xq, span * i64(layout.span)))
        views.append(self.rows_of(self.xs, group))
        views.append(self.rows_of(self.extra, group, 0))
        views.append(View(self.sums, (stream, 0, 0)))
        self.product(dot.meaning, views, name)

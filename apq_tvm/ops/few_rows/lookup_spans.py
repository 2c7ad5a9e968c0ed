"""``y = act(x Wᵀ + b) + residual`` for few rows of x and looked up weights, a span at a time.

Tiles, streams and the epilogue are those of `apq_tvm.ops.few_rows.spans`; the products of a span of
a row block, with all scales, are one block for an intrinsic
(`apq_tvm.tensorize.meaning.lookup_span`). Besides codes and scales the kernel takes `extra` with
the activations, what `apq_tvm.ops.activations.extra` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import SpanLayout
from apq_tvm.ops.few_rows.spans import SpanBlocking, SpanLinear
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.meaning.lookup_span import EXTRA, SpanDot

Expr = Any  # tvm is untyped


@dataclass(frozen=True)
class Lookup:
    """What a kernel does with a layout.

    Parameters
    ----------
    dot : callable
        (rows of x, k) to the dot product of a span, or of what is left of one.
    step : int
        k of a unit.
    acts : float
        What the activations' scales have been multiplied by.
    """

    dot: Callable[[int, int], SpanDot]
    step: int
    acts: float


def lookup_spans(
    spec: LinearSpec, layout: SpanLayout, lookup: Lookup, blocking: SpanBlocking
) -> Any:
    """Linear layer with int8 activations.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations, one scale per group of weights.
    layout : SpanLayout
        Of four rows.
    lookup : Lookup
    blocking : SpanBlocking
        Its step is spans or runs of them in an iteration, at most.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, groups], xsum i32 [M, groups], extra f32 [M, groups, 8],
        *packed arrays, [bias], [residual], y)``, M >= m_tile. The root's annotation `DOTS` of
        `apq_tvm.ops.few_rows.spans` names the blocks for an intrinsic; those of a short last span
        are called ``tail...``.
    """
    return _LookupSpans(spec, layout, lookup, blocking).build()


class _LookupSpans(SpanLinear):
    def __init__(
        self, spec: LinearSpec, layout: SpanLayout, lookup: Lookup, blocking: SpanBlocking
    ) -> None:
        super().__init__(spec, layout, blocking)
        self.lookup = lookup
        self.unit_scale /= lookup.acts * lookup.dot(1, layout.span).unit
        self.units = layout.span // lookup.step
        spans, self.tail = divmod(layout.padded_k(spec.k) // lookup.step, self.units)
        self.spans, rest = divmod(spans, blocking.run)
        assert not rest
        self.spans_at_once = max(c for c in range(1, blocking.step + 1) if self.spans % c == 0)

    def declare(self, operands: Operands) -> None:
        super().declare(operands)
        shape = (self.m, self.layout.groups(self.spec.k), EXTRA)
        self.extra = operands.declare("extra", shape, "float32")

    def span(self, span: Expr, units: int, suffix: str) -> None:
        for stream in range(self.blocking.streams):
            start = "" if "tail" in suffix else "_span"
            self._dot_span(span, units, stream, f"{start}{suffix}_{stream}"[1:])

    def _dot_span(self, span: Expr, units: int, stream: int, name: str) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        layout, run = self.layout, self.blocking.run
        if run > 1:
            span = span * tirx.const(run, "int64")
        runs = 1 if name.startswith("tail") else run
        dot = self.lookup.dot(self.blocking.m_tile, units * runs * self.lookup.step)
        block = self.block(tirx.const(stream, "int64"))
        kinds, extents = dot.loops()
        self.dots.append(name)
        first_k = span * tirx.const(layout.span, "int64")
        first_group = span * tirx.const(layout.span_groups, "int64")
        whole = self.lookup.dot(1, layout.span).arrays
        first = {n: span * shape[0] if shape[1:] else span for n, (shape, _) in whole.items()}
        views = [
            _View(self.arrays[n], block, first[n], shape) for n, (shape, _) in dot.arrays.items()
        ]
        tables = {"table": self.arrays["table"]} if layout.entries else {}
        with b.grid(*(tirx.const(e, "int64") for e in extents)) as loops, b.sblock(name):
            m, r, k, e = dot.split(tuple(b.axis.remap(kinds, loops)))
            row = self.row + m[0] if m else self.row
            g = first_group + k // tirx.const(dot.group, "int64")
            at = (stream, m[0] if m else 0, r)
            *inside, _ = dot.scales_at(r, k)
            where = span + inside[0] if inside else span
            sums, scale = self.sums[at], self.arrays["scales"][block, where, r]
            x, xs = self.xq[row, first_k + k], self.xs[row, g]
            reads = [
                *(v.region() for v in views),
                *(t[0 : layout.entries] for t in tables.values()),
            ]
            b.reads(sums, *reads, scale, x, xs, self.extra[row, g, 0:EXTRA])
            b.writes(sums)
            arrays = {**dict(zip(dot.arrays, views, strict=True)), **tables}
            term = dot.term(arrays, scale, x, xs, (r, k, e))
            b.buffer_store(self.sums, sums + term, list(at))


@dataclass(frozen=True)
class _View:
    """An array of weights seen from one span of a row block on.

    Parameters
    ----------
    buffer : Buffer
        [block, unit or span, byte].
    block, first : PrimExpr
        Where the view starts.
    shape : tuple of int
        Of the view: bytes, or units and bytes.
    """

    buffer: Any
    block: Expr
    first: Expr
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> Expr:
        *unit, byte = index if isinstance(index, tuple) else (index,)
        return self.buffer[self.block, self.first + unit[0] if unit else self.first, byte]

    def region(self) -> Any:
        """All of it."""
        *units, size = self.shape
        last = slice(self.first, self.first + units[0]) if units else self.first
        return self.buffer[self.block, last, 0:size]

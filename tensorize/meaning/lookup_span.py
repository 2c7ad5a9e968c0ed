"""Dot products of one span of looked up weights with its scales: meaning and operands.

A *span* is what one float16 scale per row belongs to. Unlike `apq_tvm.tensorize.pairs.lookup_dot`,
whose sums are integers that the caller scales, these pairs end in float sums, so that an
instruction set
may choose how it gets there::

    acc[i, r] += unit * Σ_k scale[r] * factor[r, k] * (table[entry(r, k)] - offset) * x[i, k]

`factor` is the activations' scale of the group, with the weights' sub-scale where there is one;
`unit` a power of two that an implementation has left over.
What else an implementation wants of the activations comes in `extra`, which the meaning ignores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import operand, whole

Expr = Any  # tvm is untyped
Buffer = Any
Arrays = Mapping[str, Any]

ROWS = 4
"""Rows of weights."""

EXTRA = 8
"""Floats per group of activations in `extra`: two vectors."""


@dataclass(frozen=True)
class SpanDot(ABC):
    """Shape of one span's dot product.

    Parameters
    ----------
    m : int
        Rows of x.
    k : int
        Weights of a row.
    group : int
        Weights that share a scale of the activations.
    entries : int
        Of the table; 0 if codes are their own values.
    offset : int
        What its entries are too large by.
    unit : float
        A power of two.
    """

    m: int
    k: int
    group: int
    entries: int
    offset: int
    unit: float

    @property
    @abstractmethod
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the operands with a span's weights, `scales` and `table` aside."""

    @abstractmethod
    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32: which entry of the table a weight is, or its code."""

    def minimum(self, arrays: Arrays, r: Expr, k: Expr) -> Expr | None:
        """float32: what is taken off a weight besides; None if nothing is."""
        return None

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr | None:
        """uint8 sub-scale of a weight's group; None if there are none."""
        return None

    @property
    def groups(self) -> int:
        """Scales of one row of activations."""
        return self.k // self.group

    @property
    def spans(self) -> int:
        """Spans of it, each with its scales."""
        return 1

    def scales_at(self, r: Expr, k: Expr) -> tuple[Expr, ...]:
        """Index of the scale of row r, column k."""
        return (k // (self.k // self.spans), r) if self.spans > 1 else (r,)

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        return (self.m, ROWS) if self.m > 1 else (ROWS,)

    def loops(self) -> tuple[str, tuple[int, ...]]:
        """Kinds and extents of the loops: [row of x,] row, k, [entry]."""
        entries = (self.entries,) if self.entries else ()
        kinds = "S" * len(self.spatial) + "R" * (1 + len(entries))
        return kinds, (*self.spatial, self.k, *entries)

    def split(self, axes: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], Expr, Expr, Expr | None]:
        """Row of x or nothing, row, k and entry or None of an index into the loops."""
        lead = len(self.spatial) - 1
        r, k, *entry = axes[lead:]
        return tuple(axes[:lead]), r, k, entry[0] if entry else None

    def term(
        self,
        arrays: Arrays,
        scale: Expr,
        x: Expr,
        xs: Expr,
        where: tuple[Expr, Expr, Expr | None],
    ) -> Expr:
        """float32 term of the sum for one row, k and entry.

        Parameters
        ----------
        arrays : mapping
            Of `arrays`, and ``table``: buffers or views whose indices start at the span.
        scale, x, xs : PrimExpr
            float16 of the row, int8 of k, float32 of its group.
        where : tuple of PrimExpr
            Row, k, entry of the table or None.
        """
        from tvm import tirx

        r, k, e = where
        value = self.entry(arrays, r, k)
        if e is not None:
            meant = arrays["table"][e].astype("int32") - tirx.const(self.offset, "int32")
            value = tirx.Select(value == e.astype("int32"), meant, tirx.const(0, "int32"))
        factor, unit = scale.astype("float32"), tirx.const(self.unit, "float32")
        sub, least = self.sub(arrays, r, k), self.minimum(arrays, r, k)
        if sub is not None:
            factor = factor * sub.astype("float32")
        if least is None:
            return (value * x.astype("int32")).astype("float32") * (factor * xs * unit)
        return (value.astype("float32") * factor - least) * (x.astype("float32") * xs * unit)


@dataclass(frozen=True)
class SpanOperands:
    """Buffers of one pair member.

    ``arrays`` those of the weights with ``table`` uint8; ``scales`` float16 [4], of several spans
    [spans, 4]; ``x`` int8 [m, k],
    ``xs`` float32 [m, groups], ``extra`` float32 [m, groups, 8], ``acc`` float32 [m, 4]. The first
    axis is left out where m is 1.
    """

    dot: SpanDot
    arrays: Arrays
    scales: Buffer
    x: Buffer
    xs: Buffer
    extra: Buffer
    acc: Buffer

    def at(self, row: int, *index: Any) -> list[Expr]:
        """Index of one row of x."""
        from tvm import tirx

        lead = [row] if self.dot.m > 1 else []
        return [tirx.const(i, "int64") if isinstance(i, int) else i for i in (*lead, *index)]


def make_pair(dot: SpanDot, implement: Callable[[SpanOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a span's dot product."""
    return _member(dot, _plain_loops), _member(dot, implement)


def _member(dot: SpanDot, body: Callable[[SpanOperands], None]) -> Any:
    """PrimFunc (*arrays, table, scales, x, xs, extra, acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    m = (dot.m,) if dot.m > 1 else ()

    def strides(name: str, *inner: int) -> Any:
        from tvm import tirx

        return [f"{name}_stride", *(tirx.const(i, "int64") for i in inner)] if m else None

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("span_dot")
        arrays = {
            name: operand(name, shape, dtype, 8 if dtype == "float16" else 4, None)
            for name, (shape, dtype) in dot.arrays.items()
        }
        if dot.entries:
            arrays["table"] = operand("table", (dot.entries,), "uint8", 16, None)
        spans = (dot.spans,) if dot.spans > 1 else ()
        scales = operand("scales", (*spans, ROWS), "float16", 8, None)
        x = operand("x", (*m, dot.k), "int8", 4, strides("x", 1))
        xs = operand("xs", (*m, dot.groups), "float32", 4, strides("xs", 1))
        extra = operand("extra", (*m, dot.groups, EXTRA), "float32", 4, strides("extra", EXTRA, 1))
        acc = operand("acc", dot.spatial, "float32", 16, None)
        with b.sblock("root"):
            b.reads(*map(whole, (acc, *arrays.values(), scales, x, xs, extra)))
            b.writes(whole(acc))
            body(SpanOperands(dot, arrays, scales, x, xs, extra, acc))
    return builder.get()


def _plain_loops(o: SpanOperands) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    dot = o.dot
    kinds, extents = dot.loops()
    with b.grid(*(tirx.const(e, "int64") for e in extents)) as loops, b.sblock("dot"):
        at, r, k, e = dot.split(tuple(b.axis.remap(kinds, loops)))
        g = k // tirx.const(dot.group, "int64")
        scale = o.scales[dot.scales_at(r, k)]
        b.reads(
            o.acc[(*at, r)],
            *map(whole, o.arrays.values()),
            scale,
            o.x[(*at, k)],
            o.xs[(*at, g)],
            o.extra[(*at, g, slice(0, EXTRA))],
        )
        b.writes(o.acc[(*at, r)])
        term = dot.term(o.arrays, scale, o.x[(*at, k)], o.xs[(*at, g)], (r, k, e))
        b.buffer_store(o.acc, o.acc[(*at, r)] + term, [*at, r])

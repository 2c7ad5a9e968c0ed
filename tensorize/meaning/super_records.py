"""Records of super-blocks: everything a row block needs of K, in the order it is read.

A decode kernel waits for memory, and every array it walks through is one more stream of cache lines
to keep in flight. So codes, sub-scales, minima and scales of R rows lie in one array: per
super-block up to four *chunks* of 64 columns, then the scales::

    chunk:  subs [2, R]   byte u of a row: sub-scales of k 32u..32u+15 (low nibble) and 32u+16..
            mins [2, R]   the same of minima
            codes         vectors of R rows x 4 bytes, below
    scales: [2, R]        low bytes, then high bytes, of the float16 scales
            [2, R]        and of the minima's

Group g of a chunk (16 columns) has k ``16 g + 4 i + c`` of a row in byte c of vector i at bits 2g
and 2g + 1. A mask takes a group's codes out where they stand, 4^g too large: the shift that brings
them down is a factor of the group's sum. Three-bit codes have their high bits in two more vectors:
those of i are in vector 4 + i // 2, at bit 2g + 2 + i % 2 for g < 3 and at bit i % 2 for g = 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, whole

Expr = Any  # tvm is untyped
Buffer = Any
Load = Callable[[Expr], Expr]

CHUNK = 64
"""Columns of a chunk."""

GROUP = 16
"""Columns that share a sub-scale and a minimum."""

GROUPS = CHUNK // GROUP
"""Groups of a chunk."""

SUPER = 256
"""Columns that share two float16 scales."""


def high_bit(group: Expr, i: Expr) -> Expr:
    """Which bit of its byte the high bit of a 3-bit code is, for integers or expressions."""
    return (2 * group + 2) % 8 + i % 2


@dataclass(frozen=True)
class Records:
    """Where things lie in the records of one row block.

    Parameters
    ----------
    bits : int
        Of a code, 2 or 3.
    rows : int
        R.
    """

    bits: int
    rows: int

    @property
    def vector(self) -> int:
        """Bytes of a vector of codes."""
        return 4 * self.rows

    @property
    def codes(self) -> int:
        """Byte of a chunk where its codes start."""
        return 4 * self.rows

    @property
    def chunk(self) -> int:
        """Bytes of a chunk."""
        return self.codes + self.vector * (4 if self.bits == 2 else 6)

    @property
    def scales(self) -> int:
        """Bytes of the scales of a super-block."""
        return 4 * self.rows

    @property
    def record(self) -> int:
        """Bytes of a whole super-block."""
        return SUPER // CHUNK * self.chunk + self.scales

    def nbytes(self, k: int) -> int:
        """Bytes of a row block of `k` columns."""
        chunks, supers = -(-k // CHUNK), -(-k // SUPER)
        return chunks * self.chunk + supers * self.scales

    def chunk_at(self, k: Expr) -> Expr:
        """Byte of a row block where the chunk of column `k` starts."""
        return k // SUPER * self.record + k % SUPER // CHUNK * self.chunk

    def scales_at(self, span: Expr, nbytes: int) -> Expr:
        """Byte of a row block of `nbytes` where the scales of super-block `span` start."""
        from tvm import tirx

        # The last super-block may have fewer chunks in front of its scales.
        whole = span * self.record + (self.record - self.scales)
        return tirx.min(whole, tirx.const(nbytes - self.scales, str(whole.ty)))

    def code(self, load: Load, r: Expr, k: Expr) -> Expr:
        """int32 code of row `r`, column `k` of a chunk, whose bytes `load` gives."""
        from tvm import tirx

        g, i, byte = k // GROUP, k % GROUP // 4, r * 4 + k % 4

        def field(vector: Expr, shift: Expr, width: int) -> Expr:
            down = tirx.shift_right(
                load(self.codes + vector * self.vector + byte), shift.astype("uint8")
            )
            return tirx.bitwise_and(down, tirx.const((1 << width) - 1, "uint8")).astype("int32")

        code = field(i, 2 * g, 2)
        if self.bits == 2:
            return code
        return code + field(4 + i // 2, high_bit(g, i), 1) * tirx.const(4, "int32")

    def small(self, load: Load, r: Expr, k: Expr, least: bool) -> Expr:
        """uint8 sub-scale, or minimum, of the group of column `k` of a chunk."""
        from tvm import tirx

        byte = load(k // (2 * GROUP) * self.rows + r + (2 * self.rows if least else 0))
        shift = (k // GROUP % 2 * 4).astype("uint8")
        return tirx.bitwise_and(tirx.shift_right(byte, shift), tirx.const(15, "uint8"))

    def scale(self, load: Load, r: Expr, least: bool) -> Expr:
        """float32 scale, or scale of minima, of a row, from the bytes of the scales."""
        from tvm import tirx

        first = 2 * self.rows if least else 0
        low, high = (load(first + i * self.rows + r).astype("uint16") for i in range(2))
        both = tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(8, "uint16")))
        return tirx.reinterpret("float16", both).astype("float32")


@dataclass(frozen=True)
class RecordDot:
    """Products of a chunk of a row block with rows of x: two sums per row, before the scales.

    Parameters
    ----------
    records : Records
    m : int
        Rows of x.
    k : int
        Columns multiplied: 64, or 32 of the last chunk.
    """

    records: Records
    m: int
    k: int

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of rows of x, left out where there is one."""
        return (self.m,) if self.m > 1 else ()

    def term(self, load: Load, x: Expr, xs: Expr, which: Expr, r: Expr, k: Expr) -> Expr:
        """float32 addend of sum `which`: 0 with codes and sub-scales, 1 with minima."""
        from tvm import tirx

        sub, least = (self.records.small(load, r, k, b).astype("int32") for b in (False, True))
        first = self.records.code(load, r, k) * sub
        value = tirx.Select(which == tirx.const(0, str(which.ty)), first, least)
        return (value * x.astype("int32")).astype("float32") * xs


@dataclass(frozen=True)
class DotOperands:
    """Buffers of a member: chunk uint8 [bytes], x int8 [m, k], xs float32 [m, k / 16], factors
    float32 [m, k / 16, 2], which the meaning ignores (`apq_tvm.ops.activations.factors`), acc
    float32
    [2, m, R]; m is left out where it is 1."""

    dot: RecordDot
    chunk: Buffer
    x: Buffer
    xs: Buffer
    factors: Buffer
    acc: Buffer

    def at(self, row: int, *index: Any) -> list[Expr]:
        """Index of one row of x."""
        from tvm import tirx

        lead = [row] if self.dot.m > 1 else []
        return [tirx.const(i, "int64") if isinstance(i, int) else i for i in (*lead, *index)]

    def sums_at(self, which: int, row: int) -> list[Expr]:
        """Index of a vector of sums."""
        from tvm import tirx

        return [tirx.const(which, "int64"), *self.at(row, 0)]


def dot_pair(dot: RecordDot, implement: Callable[[DotOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of the products of a chunk."""
    return _dot_member(dot, _plain_dot), _dot_member(dot, implement)


def _dot_member(dot: RecordDot, body: Callable[[DotOperands], None]) -> Any:
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    records, groups = dot.records, dot.k // GROUP

    def strides(name: str, *inner: int) -> Any:
        ones = [tirx.const(i, "int64") for i in inner]
        return [f"{name}_stride", *ones] if dot.m > 1 else None

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("records_dot")
        chunk = operand("chunk", (records.chunk,), "uint8", records.rows, None)
        x = operand("x", (*dot.lead, dot.k), "int8", 4, strides("x", 1))
        xs = operand("xs", (*dot.lead, groups), "float32", 4, strides("xs", 1))
        shape = (*dot.lead, groups, 2)
        factors = operand("factors", shape, "float32", 4, strides("factors", 2, 1))
        acc = operand("acc", (2, *dot.lead, records.rows), "float32", 4 * records.rows, None)
        with b.sblock("root"):
            b.reads(*map(whole, (acc, chunk, x, xs, factors)))
            b.writes(whole(acc))
            body(DotOperands(dot, chunk, x, xs, factors, acc))
    return builder.get()


def _plain_dot(o: DotOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    dot, rows = o.dot, o.dot.records.rows
    extents = (2, *dot.lead, rows, dot.k)
    with b.grid(*(i64(e) for e in extents)) as loops, b.sblock("dot"):
        which, *row, r, k = b.axis.remap("S" * (len(extents) - 1) + "R", loops)
        at, g = (which, *row, r), (*row, k // i64(GROUP))
        b.reads(o.acc[at], whole(o.chunk), o.x[(*row, k)], o.xs[g], o.factors[(*g, slice(0, 2))])
        b.writes(o.acc[at])
        term = dot.term(lambda byte: o.chunk[byte], o.x[(*row, k)], o.xs[g], which, r, k)
        b.buffer_store(o.acc, o.acc[at] + term, list(at))


@dataclass(frozen=True)
class ScaleOperands:
    """Buffers of a member: scales uint8 [4R], totals float32 [2, m, R], acc float32 [m, R]."""

    records: Records
    m: int
    scales: Buffer
    totals: Buffer
    acc: Buffer


def scale_term(records: Records, load: Load, total: Expr, least: Expr, r: Expr) -> Expr:
    """What a super-block adds to a row's sum."""
    return total * records.scale(load, r, False) - least * records.scale(load, r, True)


def scale_pair(
    records: Records, m: int, implement: Callable[[ScaleOperands], None]
) -> tuple[Any, Any]:
    """(desc, impl) of the end of a super-block: its totals, scaled, are added to the sums."""
    return _scale_member(records, m, _plain_scale), _scale_member(records, m, implement)


def _scale_member(records: Records, m: int, body: Callable[[ScaleOperands], None]) -> Any:
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    lead, rows = (m,) if m > 1 else (), records.rows
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("records_scale")
        scales = operand("scales", (records.scales,), "uint8", rows, None)
        totals = operand("totals", (2, *lead, rows), "float32", 4 * rows, None)
        acc = operand("acc", (*lead, rows), "float32", 4 * rows, None)
        with b.sblock("root"):
            b.reads(*map(whole, (acc, scales, totals)))
            b.writes(whole(acc))
            body(ScaleOperands(records, m, scales, totals, acc))
    return builder.get()


def _plain_scale(o: ScaleOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    lead = (o.m,) if o.m > 1 else ()
    extents = (*lead, o.records.rows)
    with b.grid(*(i64(e) for e in extents)) as loops, b.sblock("scale"):
        found = [loops] if len(extents) == 1 else loops
        at = tuple(b.axis.spatial(i64(e), v) for e, v in zip(extents, found, strict=True))
        total, least = o.totals[(0, *at)], o.totals[(1, *at)]
        b.reads(o.acc[at], whole(o.scales), o.totals[(slice(0, 2), *at)])
        b.writes(o.acc[at])
        term = scale_term(o.records, lambda byte: o.scales[byte], total, least, at[-1])
        b.buffer_store(o.acc, o.acc[at] + term, list(at))

"""Register tiles of attention: products of rows with vectors of floats, or of int8 keys; those of
int4 are in `apq_tvm.schedules.graph.attention.nibbles`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import tirx

from apq_tvm.ops.graph.attention import FOURS, PACK
from apq_tvm.schedules.graph.attention.scratch import Scratch, slots
from apq_tvm.schedules.graph.panel import loop
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i64, splat

if TYPE_CHECKING:
    from apq_tvm.schedules.graph.attention.problem import Problem

Sums = Callable[[int, int], Expr]
"""Row and vector of a register tile → 16 sums, float32."""


def multiply(acc: Any, factors: list[Expr], vectors: list[Expr]) -> Stmt:
    """``acc[r, v] += factors[r] * vectors[v]``."""
    out, columns = slots(vectors, "column")
    for r, factor in enumerate(factors):
        binds, (scalar,) = slots([factor], "factor")
        out += binds
        for v, column in enumerate(columns):
            lanes = int(str(column.ty).partition("x")[2])
            at = tirx.Ramp(i64((r * len(columns) + v) * PACK), i64(1), lanes)
            more = tirx.Broadcast(scalar, lanes) * column
            out.append(tirx.BufferStore(acc, tirx.BufferLoad(acc, [at]) + more, [at]))
    return tirx.stmt_seq(*out)


def cleared(acc: Any, vectors: int) -> list[Stmt]:
    """Sums of so many vectors of 16 begin with 0."""
    zero = tirx.Broadcast(f32(0.0), PACK)
    return [
        tirx.BufferStore(acc, zero, [tirx.Ramp(i64(v * PACK), i64(1), PACK)])
        for v in range(vectors)
    ]


def as_float(vector: Expr) -> Expr:
    """Floats, halves or int8 as floats."""
    kind, _, lanes = str(vector.ty).partition("x")
    wanted = f"float32x{lanes}" if lanes else "float32"
    return vector if kind == "float32" else vector.astype(wanted)


def coded_scores(
    p: Problem, s: Scratch, row: Expr, rows: int, bases: list[Expr]
) -> tuple[list[Stmt], Sums]:
    """Products of `rows` rows with int8 keys, 16 from each of `bases` on, without their scales."""
    sums = _by_dot if p.dot is not None else _decoded
    return sums(p, s, row, rows, bases)


def _by_dot(
    p: Problem, s: Scratch, row: Expr, rows: int, bases: list[Expr]
) -> tuple[list[Stmt], Sums]:
    """Codes of q and of keys, four columns at a time; the row's scale at the end."""
    dot, vectors = p.dot, len(bases)
    assert dot is not None
    lanes, size = dot.lanes, dot.lanes * FOURS
    pieces = [(v, begin) for v in range(vectors) for begin in range(0, PACK, lanes)]
    acc = tirx.decl_buffer((rows * vectors * PACK,), "int32", "acc")

    def place(r: int, v: int, begin: int) -> Expr:
        return i64((r * vectors + v) * PACK + begin)

    def four(i: Expr) -> Stmt:
        parts: list[Stmt] = []
        ready = []
        for v, begin in pieces:
            at = bases[v] + i * i64(PACK * FOURS) + i64(begin * FOURS)
            binds, found = slots(list(dot.ready(s.load(p.keys, at, size))), "keys")
            parts += binds
            ready.append(tuple(found))
        for r in range(rows):
            at = (row + i64(r)) * i64(p.columns) + i * i64(FOURS)
            query = tirx.reinterpret("int32", s.load(s.codes, at, FOURS))
            binds, (query,) = slots([query], "query")
            parts += binds
            for (v, begin), keys in zip(pieces, ready, strict=True):
                total = dot.add(s.load(acc, place(r, v, begin), lanes), keys, query)
                parts.append(s.store(acc, place(r, v, begin), total, lanes))
        return tirx.stmt_seq(*parts)

    parts: list[Stmt] = [tirx.AllocBuffer(acc)]
    for r in range(rows):
        zero: Expr = splat(0, "int32", PACK)
        if dot.offset:
            zero = tirx.Broadcast(s.load(s.offsets, row + i64(r)), PACK)
        parts += [s.store(acc, place(r, v, 0), zero, PACK) for v in range(vectors)]
    parts.append(loop(i64(-(-p.size // FOURS)), four))
    binds, steps = slots([s.load(s.steps, row + i64(r)) for r in range(rows)], "step")

    def of(r: int, v: int) -> Expr:
        value = s.load(acc, place(r, v, 0), PACK).astype(f"float32x{PACK}")
        return value * tirx.Broadcast(steps[r], PACK)

    return [*parts, *binds], of


def _decoded(
    p: Problem, s: Scratch, row: Expr, rows: int, bases: list[Expr]
) -> tuple[list[Stmt], Sums]:
    """Floats of q, and codes of keys that become floats: shifts bring each byte to the top."""
    vectors = len(bases)
    acc = tirx.decl_buffer((rows * vectors * PACK,), "float32", "acc")

    def four(i: Expr) -> Stmt:
        parts: list[Stmt] = []
        words = []
        for base in bases:
            codes = s.load(p.keys, base + i * i64(PACK * FOURS), PACK * FOURS)
            words.append(tirx.reinterpret(f"int32x{PACK}", codes))
        binds, words = slots(words, "keys")
        parts += binds
        for j in range(FOURS):
            at = i * i64(FOURS) + i64(j)
            loads = [_byte(word, j).astype(f"float32x{PACK}") for word in words]
            factors = [s.load(s.q, (row + i64(r)) * i64(p.columns) + at) for r in range(rows)]
            parts.append(multiply(acc, factors, loads))
        return tirx.stmt_seq(*parts)

    fours = loop(i64(-(-p.size // FOURS)), four)
    parts = [tirx.AllocBuffer(acc), *cleared(acc, rows * vectors), fours]
    return parts, lambda r, v: s.load(acc, i64((r * vectors + v) * PACK), PACK)


def _byte(words: Expr, j: int) -> Expr:
    """Byte `j` of every int32, with its sign."""
    left, right = 24 - 8 * j, splat(24, "int32", PACK)
    raised = tirx.shift_left(words, splat(left, "int32", PACK)) if left else words
    return tirx.shift_right(raised, right)

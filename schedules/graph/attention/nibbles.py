"""Products of rows with int4 keys and values, groups of whose columns have a scale and a least.

A score is the sum over groups of ``scale * Σ q code + least * Σ q``; so codes are multiplied as
they are, and floats appear once a group. A value is made a float once for all rows.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Any

from tvm import tirx

from apq_tvm.formats.caches import group_size
from apq_tvm.ops.graph.attention import FOURS, PACK
from apq_tvm.schedules.graph.attention.codes import from_upper
from apq_tvm.schedules.graph.attention.products import Sums, cleared, multiply
from apq_tvm.schedules.graph.attention.scratch import BLOCK, VECTORS, Scratch, across, slots
from apq_tvm.schedules.graph.panel import loop
from apq_tvm.tensorize.exprs import Expr, Stmt, i64, splat

if TYPE_CHECKING:
    from apq_tvm.schedules.graph.attention.problem import Problem

EIGHT = 2 * FOURS
"""Columns of a token in neighbouring bytes of packed keys."""


def low_and_high(codes: Expr) -> tuple[Expr, Expr]:
    """The two codes of every byte of uint8."""
    _, _, lanes = str(codes.ty).partition("x")
    low = tirx.bitwise_and(codes, splat(15, "uint8", int(lanes)))
    return low, tirx.shift_right(codes, splat(4, "uint8", int(lanes)))


def row_sums(p: Problem, s: Scratch, r: Expr) -> list[Stmt]:
    """What the columns of every group of a row of q add up to, as they are multiplied."""
    size, parts = group_size(p.size), list[Stmt]()
    for group in range(p.size // size):
        places = [r * i64(p.columns) + i64(group * size + begin) for begin in range(0, size, PACK)]
        if p.dot is None:
            more, total = across(add, [s.load(s.q, at, PACK) for at in places])
        else:
            wide = [s.load(s.codes, at, PACK).astype(f"int32x{PACK}") for at in places]
            more, total = across(add, wide)
            total = total.astype("float32") * s.load(s.steps, r)
        parts += [*more, s.store(s.q_sums, r * i64(p.size // size) + i64(group), total)]
    return parts


def nibble_scores(
    p: Problem, s: Scratch, row: Expr, rows: int, bases: list[Expr], scales: list[Expr]
) -> tuple[list[Stmt], Sums]:
    """Products of `rows` rows with int4 keys, 16 from each of `bases` on, scaled from `scales`."""
    size, vectors = group_size(p.size), len(bases)
    total = tirx.decl_buffer((rows * vectors * PACK,), "float32", "total")
    products = _by_dot if p.dot is not None else _by_floats

    def group(g: Expr) -> Stmt:
        work, of = products(p, s, row, rows, bases, g * i64(size // EIGHT), size // EIGHT)
        starts = [at + g * i64(2 * PACK) for at in scales]
        steps = [from_upper(s.load(p.key_scales, at, PACK)) for at in starts]
        lows = [from_upper(s.load(p.key_scales, at + i64(PACK), PACK)) for at in starts]
        binds, steps = slots(steps, "key_step")
        more, lows = slots(lows, "key_least")
        parts = [*work, *binds, *more]
        for r in range(rows):
            sums = s.load(s.q_sums, (row + i64(r)) * i64(p.size // size) + g)
            binds, (summed,) = slots([sums], "summed")
            parts += binds
            for v in range(vectors):
                at = i64((r * vectors + v) * PACK)
                value = of(r, v) * steps[v] + tirx.Broadcast(summed, PACK) * lows[v]
                parts.append(s.store(total, at, s.load(total, at, PACK) + value, PACK))
        return tirx.stmt_seq(*parts)

    groups = loop(i64(p.size // size), group)
    parts = [tirx.AllocBuffer(total), *cleared(total, rows * vectors), groups]
    return parts, lambda r, v: s.load(total, i64((r * vectors + v) * PACK), PACK)


def _by_dot(
    p: Problem, s: Scratch, row: Expr, rows: int, bases: list[Expr], first: Expr, eights: int
) -> tuple[list[Stmt], Sums]:
    """Codes of q and of keys, so many times eight columns; the row's scale at the end."""
    dot, vectors = p.dot, len(bases)
    assert dot is not None and dot.plain is not None
    plain, lanes, size = dot.plain, dot.lanes, dot.lanes * FOURS
    pieces = [(v, begin) for v in range(vectors) for begin in range(0, PACK, lanes)]
    acc = tirx.decl_buffer((rows * vectors * PACK,), "int32", "acc")

    def place(r: int, v: int, begin: int) -> Expr:
        return i64((r * vectors + v) * PACK + begin)

    def eight(i: Expr) -> Stmt:
        parts: list[Stmt] = []
        ready = []
        for v, begin in pieces:
            at = bases[v] + i * i64(PACK * FOURS) + i64(begin * FOURS)
            binds, (codes,) = slots([s.load(p.keys, at, size)], "pairs")
            more, halves = slots(list(low_and_high(codes)), "keys")
            parts += [*binds, *more]
            ready.append([plain.ready(tirx.reinterpret(f"int8x{size}", half)) for half in halves])
        for r in range(rows):
            for half in range(2):
                at = (row + i64(r)) * i64(p.columns) + i * i64(EIGHT) + i64(half * FOURS)
                query = tirx.reinterpret("int32", s.load(s.codes, at, FOURS))
                binds, (query,) = slots([query], "query")
                parts += binds
                for (v, begin), keys in zip(pieces, ready, strict=True):
                    sums = s.load(acc, place(r, v, begin), lanes)
                    sums = plain.add(sums, keys[half], query)
                    parts.append(s.store(acc, place(r, v, begin), sums, lanes))
        return tirx.stmt_seq(*parts)

    zero = splat(0, "int32", PACK)
    parts: list[Stmt] = [tirx.AllocBuffer(acc)]
    parts += [s.store(acc, i64(at * PACK), zero, PACK) for at in range(rows * vectors)]
    parts.append(loop(i64(eights), lambda i: eight(first + i)))
    binds, steps = slots([s.load(s.steps, row + i64(r)) for r in range(rows)], "step")

    def of(r: int, v: int) -> Expr:
        value = s.load(acc, place(r, v, 0), PACK).astype(f"float32x{PACK}")
        return value * tirx.Broadcast(steps[r], PACK)

    return [*parts, *binds], of


def _by_floats(
    p: Problem, s: Scratch, row: Expr, rows: int, bases: list[Expr], first: Expr, eights: int
) -> tuple[list[Stmt], Sums]:
    """Floats of q, and codes of keys that become floats."""
    vectors = len(bases)
    acc = tirx.decl_buffer((rows * vectors * PACK,), "float32", "acc")

    def eight(i: Expr) -> Stmt:
        parts: list[Stmt] = []
        words = []
        for base in bases:
            codes = s.load(p.keys, base + i * i64(PACK * FOURS), PACK * FOURS)
            words.append(tirx.reinterpret(f"int32x{PACK}", codes))
        binds, words = slots(words, "keys")
        parts += binds
        for half in range(2):
            for j in range(FOURS):
                at = i * i64(EIGHT) + i64(half * FOURS + j)
                loads = [_nibble(word, j, half).astype(f"float32x{PACK}") for word in words]
                factors = [s.load(s.q, (row + i64(r)) * i64(p.columns) + at) for r in range(rows)]
                parts.append(multiply(acc, factors, loads))
        return tirx.stmt_seq(*parts)

    work = loop(i64(eights), lambda i: eight(first + i))
    parts = [tirx.AllocBuffer(acc), *cleared(acc, rows * vectors), work]
    return parts, lambda r, v: s.load(acc, i64((r * vectors + v) * PACK), PACK)


def _nibble(words: Expr, j: int, half: int) -> Expr:
    """Half a byte `j` of every int32."""
    by = 8 * j + 4 * half
    raised = tirx.shift_right(words, splat(by, "int32", PACK)) if by else words
    return tirx.bitwise_and(raised, splat(15, "int32", PACK))


def value_spans(p: Problem, s: Scratch, number: Expr, base: Expr, vectors: int) -> Stmt:
    """Scales and leasts of a block's values as floats, those of a group behind one another."""

    def one(i: Expr) -> Stmt:
        parts = list[Stmt]()
        for v in range(vectors):
            at = base + (number * i64(VECTORS) + i64(v)) * p.span_steps[0] + i * i64(PACK)
            value = from_upper(s.load(p.value_scales, at, PACK))
            parts.append(s.store(s.spans, i * i64(BLOCK) + i64(v * PACK), value, PACK))
        return tirx.stmt_seq(*parts)

    return loop(i64(2 * p.width // group_size(p.width)), one)


def value_runs(width: int) -> list[tuple[int, int]]:
    """Columns of values as vectors: each is half of a group."""
    half = group_size(width) // 2
    return [(begin, half) for begin in range(0, width, half)]


def decoded_value(p: Problem, s: Scratch, base: Expr, token: Expr, begin: int) -> Expr:
    """Half a group of a token's values, from column `begin` on, as floats."""
    size = group_size(p.width)
    group, half = begin // size, begin % size // (size // 2)
    codes = low_and_high(s.load(p.values, base + i64(group * (size // 2)), size // 2))[half]
    at = i64(2 * group * BLOCK) + token
    step, least = (s.load(s.spans, place) for place in (at, at + i64(BLOCK)))
    wide: Any = codes.astype(f"float32x{size // 2}")
    return wide * tirx.Broadcast(step, size // 2) + tirx.Broadcast(least, size // 2)

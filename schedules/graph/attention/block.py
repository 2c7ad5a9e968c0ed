"""One block of keys of a task of attention: scores, their softmax, what those weigh."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from tvm import tirx

from apq_tvm.ops import math
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.softmax import LOWEST
from apq_tvm.schedules.graph.attention.nibbles import (
    decoded_value,
    nibble_scores,
    value_runs,
    value_spans,
)
from apq_tvm.schedules.graph.attention.products import (
    Sums,
    as_float,
    cleared,
    coded_scores,
    multiply,
)
from apq_tvm.schedules.graph.attention.scratch import (
    BLOCK,
    VECTORS,
    Rows,
    Scratch,
    across,
    exponential,
    runs,
    slots,
)
from apq_tvm.schedules.graph.panel import loop
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i32, i64

if TYPE_CHECKING:
    from apq_tvm.schedules.graph.attention.problem import Problem

HIDDEN, SEEN = -1e37, -1e36
"""A mask up to the first beside a score from the second on weighs exactly 0 in float32."""


class Block:
    """Blocks of keys for the rows of one task.

    Parameters
    ----------
    p : Problem
    rows : Rows
    scratch : Scratch
    count, used : Expr
        Register tiles and rows that there are.
    keys, values, scales, spans : Expr
        Where those of the task's head begin; scales are those of int8 keys and values, or of int4
        keys, and spans of int4 values.
    """

    def __init__(
        self, p: Problem, rows: Rows, scratch: Scratch, count: Expr, used: Expr, keys: Expr,
        values: Expr, scales: Expr = None, spans: Expr = None,
    ) -> None:  # fmt: skip
        self.p, self.rows, self.s = p, rows, scratch
        self.count, self.used = count, used
        self.keys, self.values, self.scales, self.spans = keys, values, scales, spans

    def whole(self, number: Expr) -> Stmt:
        """Block `number`, of 64 keys."""
        return self._unless_hidden(number, VECTORS, None)

    def part(self, number: Expr, rest: Expr) -> Stmt:
        """The last block, of `rest` keys, fewer than 64: code for 16, 32, 48 and 64."""
        out: Stmt = tirx.Evaluate(i32(0))
        for vectors in range(VECTORS, 0, -1):
            if isinstance(rest, tirx.IntImm):
                if (vectors - 1) * PACK < int(rest) <= vectors * PACK:
                    out = self._unless_hidden(number, vectors, rest)
            else:
                steps = self._unless_hidden(number, vectors, rest)
                fits = tirx.all(rest > i64(0), rest <= i64(vectors * PACK))
                out = tirx.IfThenElse(fits, steps, out)
        return out

    def _steps(self, number: Expr, vectors: int, rest: Expr | None) -> Stmt:
        first, s, p = number * i64(VECTORS), self.s, self.p
        rows, step = i64(self.rows.rows), min(self.rows.vectors, vectors)
        parts: list[Stmt] = []
        if p.mask is not None:
            parts.append(s.store(s.least, i64(0), f32(float("inf"))))

        def tile(i: Expr) -> Stmt:
            return loop(i64(vectors // step), lambda c: self._scores(i * rows, first, c, step))

        parts.append(loop(self.count, tile))
        parts += self._softmax(number, vectors, rest)
        keys = i64(BLOCK) if rest is None else rest
        if p.spec.nibbles:
            parts.append(value_spans(p, s, number, self.spans, vectors))
        parts.append(loop(self.count, lambda i: self._weigh(i * rows, number, keys)))
        return tirx.stmt_seq(*parts)

    def _unless_hidden(self, number: Expr, vectors: int, rest: Expr | None) -> Stmt:
        """Pass over a block whose mask hides all of it, once every row has seen something."""
        p, s = self.p, self.s
        steps = self._steps(number, vectors, rest)
        if p.mask is None:
            return steps
        found = tirx.decl_buffer((1,), "int32", "found")
        every = 1 if _not_zero(p.mask_steps[2]) else p.spec.group

        def test(row: Expr) -> Stmt:
            parts, masks = self._mask(row, number, vectors, rest)
            binds, top = across(tirx.max, masks)
            seen = tirx.IfThenElse(top > f32(HIDDEN), s.store(found, i64(0), i32(1)), None)
            return tirx.stmt_seq(*parts, *binds, seen)

        last = self.used - i64(1)
        tests: list[Stmt] = [loop(last // i64(every) + i64(1), lambda i: test(i * i64(every)))]
        if every > 1:  # a tile begins anywhere in a group, so it may have one more query
            tests.append(test(last))
        seen = s.load(s.least, i64(0)) > f32(SEEN)
        tests = [s.store(found, i64(0), i32(0)), *tests]
        return tirx.stmt_seq(
            tirx.AllocBuffer(found),
            s.store(found, i64(0), i32(1)),
            tirx.IfThenElse(seen, tirx.stmt_seq(*tests), None),
            tirx.IfThenElse(s.load(found, i64(0)) > i32(0), steps, None),
        )

    def _mask(
        self, row: Expr, number: Expr, vectors: int, rest: Expr | None
    ) -> tuple[list[Stmt], list[Expr]]:
        """What is added to a row's scores; -inf, from a copy, where there is no key."""
        s, mask = self.s, self.p.mask
        parts, (at,) = slots([s.load(s.hidden, row) + number * i64(BLOCK)], "mask_at")
        found = [s.load(mask, at + i64(v * PACK), PACK) for v in range(vectors)]
        if rest is None:
            return parts, found
        begin = (vectors - 1) * PACK
        nothing = tirx.Broadcast(f32(-float("inf")), PACK)
        copied = loop(
            rest - i64(begin), lambda j: s.store(s.edge, j, s.load(mask, at + i64(begin) + j))
        )
        by_one = tirx.stmt_seq(s.store(s.edge, i64(0), nothing, PACK), copied)
        at_once = s.store(s.edge, i64(0), found[-1], PACK)
        parts.append(tirx.IfThenElse(rest >= i64(vectors * PACK), at_once, by_one))
        return parts, [*found[:-1], s.load(s.edge, i64(0), PACK)]

    def _scores(self, row: Expr, first: Expr, c: Expr, vectors: int) -> Stmt:
        """Products of a register tile with ``vectors`` times 16 keys."""
        p, s, rows = self.p, self.s, self.rows.rows
        step = p.key_steps[0]
        blocks = [first + c * i64(vectors) + i64(v) for v in range(vectors)]
        binds, bases = slots([self.keys + block * step for block in blocks], "keys_at")
        at = [self.scales + block * p.scale_steps[0] for block in blocks] if p.spec.coded else []
        scaled = p.spec.coded and not p.spec.nibbles
        if p.spec.nibbles:
            more, at = slots(at, "scales_at")
            summed, of = nibble_scores(p, s, row, rows, bases, at)
            parts = [*binds, *more, *summed]
        elif scaled:
            summed, of = coded_scores(p, s, row, rows, bases)
            more, scales = slots([s.load(p.key_scales, a, PACK) for a in at], "key_scale")
            parts = [*binds, *summed, *more]
        else:
            summed, of = self._float_scores(row, bases)
            parts = [*summed[:1], *binds, *summed[1:]]
        for r in range(rows):
            for v in range(vectors):
                value = of(r, v) * scales[v] if scaled else of(r, v)
                to = (row + i64(r)) * i64(BLOCK) + (c * i64(vectors) + i64(v)) * i64(PACK)
                parts.append(s.store(s.scores, to, value, PACK))
        return tirx.stmt_seq(*parts)

    def _float_scores(self, row: Expr, bases: list[Expr]) -> tuple[list[Stmt], Sums]:
        """Of keys that are floats, column by column."""
        p, s, rows, vectors = self.p, self.s, self.rows.rows, len(bases)
        acc = tirx.decl_buffer((rows * vectors * PACK,), "float32", "acc")

        def column(d: Expr) -> Stmt:
            at = [tirx.Ramp(base + d * i64(PACK), i64(1), PACK) for base in bases]
            loads = [as_float(tirx.BufferLoad(p.keys, [a])) for a in at]
            factors = [s.load(s.q, (row + i64(r)) * i64(p.size) + d) for r in range(rows)]
            return multiply(acc, factors, loads)

        parts = [tirx.AllocBuffer(acc), *cleared(acc, rows * vectors), loop(i64(p.size), column)]
        return parts, lambda r, v: s.load(acc, i64((r * vectors + v) * PACK), PACK)

    def _softmax(self, number: Expr, vectors: int, rest: Expr | None) -> list[Stmt]:
        """Scores of all rows become what they weigh.

        In three loops: what one finds of a row needs a while, and the processor looks only so far
        ahead.
        """
        rows = self.count * i64(self.rows.rows)
        sixteen = (rows + i64(PACK - 1)) // i64(PACK)
        return [
            loop(rows, lambda r: self._largest(r, number, vectors, rest)),
            loop(sixteen, lambda i: self._fades(i * i64(PACK))),
            loop(rows, lambda r: self._weights(r, number, vectors)),
        ]

    def _largest(self, r: Expr, number: Expr, vectors: int, rest: Expr | None) -> Stmt:
        """The mask is added; the largest score of a row."""
        p, s = self.p, self.s
        here = [r * i64(BLOCK) + i64(v * PACK) for v in range(vectors)]
        parts: list[Stmt] = []
        if p.spec.softcap:
            parts.append(self._bend(r))
        scores = [s.load(s.scores, at, PACK) for at in here]
        if p.mask is not None:
            binds, masks = self._mask(r, number, vectors, rest)
            parts += binds
            scores = [score + mask for score, mask in zip(scores, masks, strict=True)]
        if rest is not None:
            lane = tirx.Ramp(i64((vectors - 1) * PACK), i64(1), PACK)
            there = tirx.LT(lane, tirx.Broadcast(rest, PACK))
            nothing = tirx.Broadcast(f32(-float("inf")), PACK)
            scores[-1] = tirx.Select(there, scores[-1], nothing)
        binds, scores = slots(scores, "score")
        parts += binds
        if p.mask is not None or rest is not None:
            parts += [s.store(s.scores, at, x, PACK) for at, x in zip(here, scores, strict=True)]
        binds, top = across(tirx.max, scores)
        parts += [*binds, s.store(s.top, r, top)]
        if p.mask is not None:
            seen = tirx.max(tirx.max(top, s.load(s.most, r)), s.load(s.before, r))
            parts.append(s.store(s.least, i64(0), tirx.min(s.load(s.least, i64(0)), seen)))
        return tirx.stmt_seq(*parts)

    def _fades(self, r: Expr) -> Stmt:
        """The largest of 16 rows so far, and by what that makes their sums less."""
        s = self.s
        parts, (old,) = slots([s.load(s.most, r, PACK)], "old")
        binds, (top,) = slots([tirx.max(old, s.load(s.top, r, PACK))], "new")
        parts += binds
        base = tirx.max(top, tirx.Broadcast(f32(LOWEST), PACK))
        binds, (base,) = slots([base], "least")
        parts += binds
        binds, fade = exponential(old - base)
        parts += [*binds, s.store(s.fade, r, fade, PACK)]
        return tirx.stmt_seq(*parts, s.store(s.most, r, top, PACK), s.store(s.top, r, base, PACK))

    def _weights(self, r: Expr, number: Expr, vectors: int) -> Stmt:
        """Exponentials of a row, and their sum; of int8 values the former times their scales."""
        s, parts = self.s, list[Stmt]()
        base, weights = tirx.Broadcast(s.load(s.top, r), PACK), list[Expr]()
        for v in range(vectors):
            at = r * i64(BLOCK) + i64(v * PACK)
            binds, value = exponential(s.load(s.scores, at, PACK) - base)
            parts += binds
            binds, (value,) = slots([value], "weight")
            weights.append(value)
            if self.p.spec.coded and not self.p.spec.nibbles:
                block = number * i64(VECTORS) + i64(v)
                place = self.scales + block * self.p.scale_steps[0]
                value = value * s.load(self.p.value_scales, place, PACK)
            parts += [*binds, s.store(s.scores, at, value, PACK)]
        total = s.load(s.sums, r * i64(PACK), PACK) * tirx.Broadcast(s.load(s.fade, r), PACK)
        total = total + reduce(lambda a, c: a + c, weights)
        return tirx.stmt_seq(*parts, s.store(s.sums, r * i64(PACK), total, PACK))

    def _bend(self, r: Expr) -> Stmt:
        """The softcap."""
        s, cap = self.s, self.p.spec.softcap
        j = tirx.Var("j", "int64")
        at = r * i64(BLOCK) + j
        value = math.tanh(s.load(s.scores, at) * f32(1.0 / cap)) * f32(cap)
        body = s.store(s.scores, at, value)
        return tirx.For(j, i64(0), i64(BLOCK), tirx.ForKind.VECTORIZED, body)

    def _weigh(self, row: Expr, number: Expr, keys: Expr) -> Stmt:
        """What a register tile's rows weigh, times the values, to their sums."""
        vectors = self.rows.vectors
        columns = (value_runs if self.p.spec.nibbles else runs)(self.p.width)
        whole = [columns[i : i + vectors] for i in range(0, len(columns), vectors)]
        return tirx.stmt_seq(*(self._columns(row, number, keys, part) for part in whole))

    def _columns(self, row: Expr, number: Expr, keys: Expr, part: list[tuple[int, int]]) -> Stmt:
        p, s, rows = self.p, self.s, self.rows.rows
        acc = tirx.decl_buffer((rows * len(part) * PACK,), "float32", "acc")
        parts: list[Stmt] = [tirx.AllocBuffer(acc)]
        binds, fades = slots([s.load(s.fade, row + i64(r)) for r in range(rows)], "fade")
        parts += binds

        def each(move: Callable[[int, int, int, Expr], Stmt]) -> list[Stmt]:
            return [
                move(r, v, lanes, (row + i64(r)) * i64(p.width) + i64(begin))
                for r in range(rows)
                for v, (begin, lanes) in enumerate(part)
            ]

        def here(r: int, v: int) -> Expr:
            return i64((r * len(part) + v) * PACK)

        def load(r: int, v: int, lanes: int, at: Expr) -> Stmt:
            value = s.load(s.total, at, lanes) * tirx.Broadcast(fades[r], lanes)
            return s.store(acc, here(r, v), value, lanes)

        def store(r: int, v: int, lanes: int, at: Expr) -> Stmt:
            return s.store(s.total, at, s.load(acc, here(r, v), lanes), lanes)

        def key(t: Expr) -> Stmt:
            at = self.values + (number * i64(BLOCK) + t) * p.value_steps[0]
            binds, (base,) = slots([at], "value_at")
            if p.spec.nibbles:
                loads = [decoded_value(p, s, base, t, begin) for begin, _ in part]
            else:
                at = [(base + i64(begin), lanes) for begin, lanes in part]
                loads = [as_float(s.load(p.values, *place)) for place in at]
            factors = [s.load(s.scores, (row + i64(r)) * i64(BLOCK) + t) for r in range(rows)]
            return tirx.stmt_seq(*binds, multiply(acc, factors, loads))

        return tirx.stmt_seq(*parts, *each(load), loop(keys, key), *each(store))


def _not_zero(e: Expr) -> bool:
    return not (isinstance(e, tirx.IntImm) and int(e) == 0)

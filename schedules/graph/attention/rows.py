"""Rows of queries with one head of keys: what is kept of them before, between and after blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import TYPE_CHECKING, Any

from tvm import sym, tirx

from apq_tvm.formats.caches import group_size
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.shapes import stored_index
from apq_tvm.schedules.graph.attention.block import Block
from apq_tvm.schedules.graph.attention.codes import coded_row
from apq_tvm.schedules.graph.attention.made import Made, in_vectors
from apq_tvm.schedules.graph.attention.nibbles import row_sums
from apq_tvm.schedules.graph.attention.problem import Problem
from apq_tvm.schedules.graph.attention.scratch import (
    BLOCK,
    Kept,
    Rows,
    Scratch,
    across,
    runs,
    slots,
)
from apq_tvm.schedules.graph.panel import is_const, loop
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i32, i64

if TYPE_CHECKING:
    from apq_tvm.tensorize.meaning.four_dot import FourDot


class Task:
    """Rows of one head of keys of one sequence of the batch."""

    def __init__(
        self, p: Problem, rows: Rows, batch: Expr, head: Expr, first: Expr, whole: Expr
    ) -> None:
        self.p, self.rows, self.batch, self.head, self.first = p, rows, batch, head, first
        self.whole = whole
        nibbles = p.spec.nibbles
        groups = tuple(n // group_size(n) for n in (p.size, p.width)) if nibbles else ()
        self.scratch = Scratch.of(rows, p.columns, p.width, p.dot is not None, groups)

        self.used: Expr = None
        self.count: Expr = None
        self.block: Any = None

    def _begin(self) -> list[Stmt]:
        """Scratch, sizes and the rows of q."""
        p, s = self.p, self.scratch
        units = i64(self.rows.rows)
        per_task = i64(self.rows.rows * self.rows.tiles)
        sizes, (self.used,) = slots([tirx.min(per_task, self.whole - self.first)], "used")
        more, (self.count,) = slots([(self.used + units - i64(1)) // units], "count")
        key_at = self.batch * p.key_steps[1] + self.head * p.key_steps[2]
        value_at = self.batch * p.value_steps[1] + self.head * p.value_steps[2]
        bases = [key_at, value_at]
        if p.scale_steps:
            bases.append(self.batch * p.scale_steps[1] + self.head * p.scale_steps[2])
        if p.span_steps:
            bases.append(self.batch * p.span_steps[1] + self.head * p.span_steps[2])
        binds, bases = slots(bases, "base")
        self.block = Block(p, self.rows, s, self.count, self.used, *bases)
        return [
            *(tirx.AllocBuffer(buffer) for buffer in s.buffers),
            *binds,
            *sizes,
            *more,
            s.store(s.least, i64(0), f32(-float("inf"))),
            loop(self.count * units, self._start),
        ]

    def _part(self, part: Expr) -> Stmt:
        """All blocks of a part, from nothing."""
        p, least = self.p, i64(self.rows.part)
        full = p.tokens // i64(BLOCK)
        rest = sym.Analyzer().simplify(p.tokens - full * i64(BLOCK))
        first = part * least
        binds, (first, blocks) = slots([first, tirx.min(least, full - first)], "blocks")
        last = self.block.part(full, rest)
        if not is_const(p.parts(self.rows), 1):
            last = tirx.IfThenElse(part == p.parts(self.rows) - i64(1), last, None)
        return tirx.stmt_seq(
            *binds,
            loop(self.count * i64(self.rows.rows), lambda r: self._reset(r, part)),
            loop(blocks, lambda i: self.block.whole(first + i)),
            last,
        )

    def one_part(self, part: Expr, record: Callable[[Expr], Kept]) -> Stmt:
        """One part, whose sums are kept as they are."""
        return tirx.stmt_seq(
            *self._begin(),
            self._part(part),
            loop(self.used, lambda r: self._record(r, record(r))),
        )

    def all_parts(self) -> Stmt:
        """All parts, joined where there are several, and the result."""
        p, s = self.p, self.scratch
        begin, parts = self._begin(), p.parts(self.rows)
        if is_const(parts, 1):
            work = self._part(i64(0))
            return tirx.stmt_seq(*begin, work, loop(self.used, self._finish))
        kept = Kept.alone(p.width, self.rows.rows * self.rows.tiles)
        several = parts > i64(1)

        def own(r: Expr) -> Kept:
            return kept.moved(r * i64(p.width + PACK))

        def join(r: Expr) -> Stmt:
            alone = Kept.alone(p.width)
            binds, (top,) = slots([tirx.max(s.load(s.before, r), s.load(s.most, r))], "top")
            return tirx.stmt_seq(
                tirx.AllocBuffer(alone.buffer),
                *binds,
                s.store(s.before, r, top),
                self._record(r, alone),
                own(r).join(alone),
            )

        def part(number: Expr) -> Stmt:
            joined = loop(self.used, join)
            return tirx.stmt_seq(self._part(number), tirx.IfThenElse(several, joined, None))

        def result(r: Expr) -> Stmt:
            return finished(p, own(r), self._to(r))

        cleared = loop(self.used, lambda r: own(r).clear())
        results = tirx.IfThenElse(several, loop(self.used, result), loop(self.used, self._finish))
        return tirx.stmt_seq(
            *begin,
            tirx.AllocBuffer(kept.buffer),
            tirx.IfThenElse(several, cleared, None),
            loop(parts, part),
            results,
        )

    def _place(self, row: Expr) -> tuple[Expr, Expr]:
        """Query, head in the group."""
        group = i64(self.p.spec.group)
        return row // group, row % group

    def _offset(self, steps: Sequence[Expr], query: Expr, head: Expr) -> Expr:
        return self.batch * steps[0] + self.head * steps[1] + head * steps[2] + query * steps[3]

    def _start(self, r: Expr) -> Stmt:
        """A row of q, scaled; rows past the last repeat it."""
        p, s = self.p, self.scratch
        parts, (row,) = slots([tirx.min(self.first + r, self.whole - i64(1))], "row")
        query, head = self._place(row)
        if p.made is not None:
            parts += self._computed(p.made, r, query, head)
        else:
            parts += self._loaded(r, query, head)
        for begin, lanes in runs(p.columns - p.size):
            zero: Any = f32(0.0) if lanes == 1 else tirx.Broadcast(f32(0.0), lanes)
            parts.append(s.store(s.q, r * i64(p.columns) + i64(p.size + begin), zero, lanes))
        if p.dot is not None:
            parts += self._rounded(r, p.dot)
        if p.spec.nibbles:
            parts += row_sums(p, s, r)
        if p.mask is not None:
            parts.append(s.store(s.hidden, r, self._offset(p.mask_steps, query, head)))
        return tirx.stmt_seq(*parts, s.store(s.before, r, f32(-float("inf"))))

    def _computed(self, made: Made, r: Expr, query: Expr, head: Expr) -> list[Stmt]:
        """A row of q that is no argument."""
        p, s = self.p, self.scratch
        binds, (query, head) = slots([query, head], "of")
        logical = {
            3: [self.batch, query],
            4: [self.batch, self.head * i64(p.spec.group) + head, query],
            5: [self.batch, self.head, head, query],
        }[len(p.spec.order)]

        def store(column: Expr, value: Expr) -> Stmt:
            return s.store(s.q, r * i64(p.columns) + column, value * f32(p.spec.scale))

        def element(column: Expr) -> Expr:
            return made.at(stored_index(p.spec.order, [*logical, column]))

        return [*binds, in_vectors(i64(p.size), p.vector_bytes, element, store)]

    def _loaded(self, r: Expr, query: Expr, head: Expr) -> list[Stmt]:
        p, s = self.p, self.scratch
        parts, (at,) = slots([self._offset(p.q_steps, query, head)], "from")
        for begin, lanes in runs(p.size):
            place: Any = at + i64(begin) * p.q_steps[4]
            place = place if lanes == 1 else tirx.Ramp(place, p.q_steps[4], lanes)
            value = tirx.BufferLoad(p.q, [place])
            factor: Any = f32(p.spec.scale)
            factor = factor if lanes == 1 else tirx.Broadcast(factor, lanes)
            parts.append(s.store(s.q, r * i64(p.columns) + i64(begin), value * factor, lanes))
        return parts

    def _rounded(self, r: Expr, dot: FourDot) -> list[Stmt]:
        """Codes of a row of q, and what its sums with int8 keys begin with."""
        p, s, at = self.p, self.scratch, r * i64(self.p.columns)
        parts, scale, codes = coded_row(s.q, at, s.codes, at, p.columns)
        if p.spec.nibbles:
            return [*parts, s.store(s.steps, r, scale)]
        more, whole = across(add, codes)
        offset = whole * i32(-dot.offset)
        return [*parts, *more, s.store(s.steps, r, scale), s.store(s.offsets, r, offset)]

    def _reset(self, r: Expr, part: Expr) -> Stmt:
        """Nothing is seen yet; the first part begins with the sink."""
        p, s, parts = self.p, self.scratch, []
        for begin, lanes in runs(p.width):
            zero = tirx.Broadcast(f32(0.0), lanes)
            parts.append(s.store(s.total, r * i64(p.width) + i64(begin), zero, lanes))
        parts.append(s.store(s.sums, r * i64(PACK), tirx.Broadcast(f32(0.0), PACK), PACK))
        most: Any = f32(-float("inf"))
        if p.sink is not None:
            row = tirx.min(self.first + r, self.whole - i64(1))
            at = self.head * i64(p.spec.group) + self._place(row)[1]
            first = part == i64(0)
            most = tirx.Select(first, tirx.BufferLoad(p.sink, [at]), most)
            parts.append(s.store(s.sums, r * i64(PACK), tirx.Select(first, f32(1.0), f32(0.0))))
        return tirx.stmt_seq(*parts, s.store(s.most, r, most))

    def _record(self, r: Expr, kept: Kept) -> Stmt:
        """Keep a row's sums elsewhere."""
        p, s = self.p, self.scratch
        parts, whole = across(add, [s.load(s.sums, r * i64(PACK), PACK)])
        for begin, lanes in runs(p.width):
            value = s.load(s.total, r * i64(p.width) + i64(begin), lanes)
            parts.append(s.store(kept.buffer, kept.at + i64(begin), value, lanes))
        parts.append(s.store(kept.buffer, kept.most, s.load(s.most, r)))
        return tirx.stmt_seq(*parts, s.store(kept.buffer, kept.sum, whole))

    def _to(self, r: Expr) -> Expr:
        query, head = self._place(self.first + r)
        return self._offset(self.p.y_steps, query, head)

    def _finish(self, r: Expr) -> Stmt:
        p, s = self.p, self.scratch
        parts, whole = across(add, [s.load(s.sums, r * i64(PACK), PACK)])
        return tirx.stmt_seq(*parts, _written(p, s.total, r * i64(p.width), whole, self._to(r)))


def finished(p: Problem, kept: Kept, to: Expr) -> Stmt:
    """A row of the result, of sums that were kept."""
    return _written(p, kept.buffer, kept.at, Scratch.load(kept.buffer, kept.sum), to)


def _written(p: Problem, total: Any, at: Expr, whole: Expr, to: Expr) -> Stmt:
    whole = tirx.max(whole, f32(1e-30)) if p.spec.zero_masked else whole
    parts, (to,) = slots([to], "to")
    binds, (inverse,) = slots([f32(1.0) / whole], "inverse")
    parts += binds
    for begin, width in runs(p.width):
        value = Scratch.load(total, at + i64(begin), width) * tirx.Broadcast(inverse, width)
        place = tirx.Ramp(to + i64(begin), i64(1), width)
        parts.append(tirx.BufferStore(p.y, value, [place]))
    return tirx.stmt_seq(*parts)

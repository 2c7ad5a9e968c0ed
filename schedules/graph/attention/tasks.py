"""Attention: blocks of 64 keys pass a tile of rows of queries, whose sums stay in the caches.

A row is a head of a query; heads that share keys are rows of one tile, so that a key is read once
for all of them. Scores of a block lie in a small scratch; the largest so far, the sum of
exponentials and the sum of what those weigh are kept for each row (streaming softmax, sources in
`apq_tvm.ops.graph.attention`). A block that the mask hides from all rows is passed over.

How a row is summed depends on nothing but its keys: neither on the tile it is in, nor on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from tvm import sym, tirx

from apq_tvm.ops.graph.attention import PACK, Attended
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.attention.block import Block
from apq_tvm.schedules.graph.attention.scratch import BLOCK, Rows, Scratch, across, runs, slots
from apq_tvm.schedules.graph.lowering import finish
from apq_tvm.schedules.graph.panel import flat_views, loop, strides
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i64
from apq_tvm.types import DeviceProfile


@dataclass(frozen=True)
class Problem:
    """Flat arguments and their strides, by logical axes."""

    spec: Attended
    q: Any
    keys: Any
    values: Any
    mask: Any
    sink: Any
    y: Any
    q_steps: tuple[Expr, ...]
    """Of batch, head of keys, head in the group, query; columns last."""
    y_steps: tuple[Expr, ...]
    mask_steps: tuple[Expr, ...]
    value_steps: tuple[Expr, ...]
    """Of token, batch, head."""
    key_steps: tuple[Expr, ...]
    """Likewise, of 16 tokens."""
    batch: Expr
    heads: int
    queries: Expr
    tokens: Expr
    size: int
    width: int


def schedule_attention(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Write the body of `apq_tvm.ops.graph.attention.attention`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``rows`` of a register tile, ``tiles`` of them in a task.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    views, p = _problem(func)
    wide = profile.vector_bytes >= 64
    narrow = profile.vector_bytes == 16 and profile.vector_registers < 32
    most = decide("rows", (3, 2) if narrow else (6, 4, 3))
    fits = profile.l1_bytes // (4 * most * (BLOCK + p.size + p.width))
    tiles = next((t for t in (8, 4, 2) if t <= fits), 1)
    rows = Rows(most, decide("tiles", (tiles, *({1, 2, 4, 8} - {tiles}))), 4 if wide else 1)
    group = p.spec.group
    parts = -(-group // most)
    one = replace(rows, rows=-(-group // parts), tiles=parts)
    if isinstance(p.queries, tirx.IntImm) and int(p.queries) == 1:
        body = _tasks(p, one)
    elif (one.rows, one.tiles) == (rows.rows, rows.tiles):
        body = _tasks(p, rows)
    else:
        body = tirx.IfThenElse(p.queries == i64(1), _tasks(p, one), _tasks(p, rows))
    return finish(func.with_body(tirx.stmt_seq(*views, body)))


def _problem(func: Any) -> tuple[list[Stmt], Problem]:
    """Views of the arguments, and what they mean."""
    spec, params = Attended.of(func), list(func.params)
    declared, views = flat_views(func)
    rest = list(zip(params[3:-1], views[3:-1], strict=True))
    mask = rest.pop(0) if spec.masked else None
    q, keys, values, y = params[0], params[1], params[2], params[-1]
    logical = [q.shape[p] for p in spec.order]
    steps = [strides(q.shape)[p] for p in spec.order]
    out = _inverted(strides(y.shape), spec.order_out)
    spread = [strides(values.shape)[p] for p in spec.order_values]
    by_key = strides(keys.shape)
    problem = Problem(
        spec, views[0], views[1], views[2], mask[1] if mask else None,
        rest[0][1] if spec.sink else None, views[-1],
        _grouped(steps, spec.group), _grouped(out, spec.group),
        _mask_steps(mask[0].shape, logical, spec.group) if mask else (),
        (*spread[:2], spread[2] if len(spread) == 4 else i64(0)), tuple(by_key[:3]),
        keys.shape[1], int(keys.shape[2]), logical[-2],
        values.shape[spec.order_values[0]], int(keys.shape[3]), int(y.shape[-1]),
    )  # fmt: skip
    return declared, problem


def _inverted(steps: Sequence[Expr], order: Sequence[int]) -> list[Expr]:
    """Strides by logical axes of what was permuted by `order`."""
    out: list[Any] = [None] * len(order)
    for position, axis in enumerate(order):
        out[axis] = steps[position]
    return out


def _grouped(steps: Sequence[Expr], group: int) -> tuple[Expr, ...]:
    """Strides of batch, head of keys, head in the group, query and column."""
    if len(steps) == 5:
        return tuple(steps)
    if len(steps) == 3:
        return (steps[0], i64(0), i64(0), *steps[1:])
    return (steps[0], steps[1] * i64(group), *steps[1:])


def _mask_steps(shape: Sequence[Expr], logical: Sequence[Expr], group: int) -> tuple[Expr, ...]:
    """Strides of batch, head of keys, head in the group and query, 0 where the mask repeats."""
    own = strides(shape)
    kept = [i64(0) if _is_one(d) else s for d, s in zip(shape[:-1], own[:-1], strict=True)]
    steps = [i64(0)] * (len(logical) - len(shape)) + kept
    return _grouped([*steps, i64(1)], group)[:4]


def _is_one(extent: Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _tasks(p: Problem, rows: Rows) -> Stmt:
    """A task for each batch, head of keys and so many rows."""
    whole = sym.Analyzer().simplify(p.queries * i64(p.spec.group))
    per_task = rows.rows * rows.tiles
    tiles = sym.Analyzer().simplify((whole + i64(per_task - 1)) // i64(per_task))

    def task(t: Expr) -> Stmt:
        head, first = t // tiles % i64(p.heads), t % tiles * i64(per_task)
        binds, (b, h, start) = slots([t // tiles // i64(p.heads), head, first], "task")
        return tirx.stmt_seq(*binds, _Task(p, rows, b, h, start, whole).emit())

    return loop(p.batch * i64(p.heads) * tiles, task, tirx.ForKind.PARALLEL)


class _Task:
    """Rows of one head of keys of one sequence of the batch."""

    def __init__(
        self, p: Problem, rows: Rows, batch: Expr, head: Expr, first: Expr, whole: Expr
    ) -> None:
        self.p, self.rows, self.batch, self.head, self.first = p, rows, batch, head, first
        self.whole = whole
        self.scratch = Scratch.of(rows, p.size, p.width)

    def emit(self) -> Stmt:
        """Queries to scratch, all blocks of keys, results to memory."""
        p, s = self.p, self.scratch
        per_task = i64(self.rows.rows * self.rows.tiles)
        units = i64(self.rows.rows)
        sizes, (used,) = slots([tirx.min(per_task, self.whole - self.first)], "used")
        more, (count,) = slots([(used + units - i64(1)) // units], "count")
        key_at = self.batch * p.key_steps[1] + self.head * p.key_steps[2]
        value_at = self.batch * p.value_steps[1] + self.head * p.value_steps[2]
        binds, (key_base, value_base) = slots([key_at, value_at], "base")
        block = Block(p, self.rows, s, count, used, key_base, value_base)
        full = p.tokens // i64(BLOCK)
        rest = p.tokens - full * i64(BLOCK)
        full, rest = (sym.Analyzer().simplify(e) for e in (full, rest))
        return tirx.stmt_seq(
            *(tirx.AllocBuffer(buffer) for buffer in s.buffers),
            *binds,
            *sizes,
            *more,
            s.store(s.least, i64(0), f32(-float("inf"))),
            loop(count * units, self._start),
            loop(full, block.whole),
            block.part(full, rest),
            loop(used, self._finish),
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
        binds, (at,) = slots([self._offset(p.q_steps, query, head)], "from")
        parts += binds
        for begin, lanes in runs(p.size):
            place: Any = at + i64(begin) * p.q_steps[4]
            place = place if lanes == 1 else tirx.Ramp(place, p.q_steps[4], lanes)
            value = tirx.BufferLoad(p.q, [place])
            factor: Any = f32(p.spec.scale)
            factor = factor if lanes == 1 else tirx.Broadcast(factor, lanes)
            parts.append(s.store(s.q, r * i64(p.size) + i64(begin), value * factor, lanes))
        for begin, lanes in runs(p.width):
            zero = tirx.Broadcast(f32(0.0), lanes)
            parts.append(s.store(s.total, r * i64(p.width) + i64(begin), zero, lanes))
        if p.mask is not None:
            parts.append(s.store(s.hidden, r, self._offset(p.mask_steps, query, head)))
        parts.append(s.store(s.sums, r * i64(PACK), tirx.Broadcast(f32(0.0), PACK), PACK))
        most: Any = f32(-float("inf"))
        if p.sink is not None:
            most = tirx.BufferLoad(p.sink, [self.head * i64(p.spec.group) + head])
            parts.append(s.store(s.sums, r * i64(PACK), f32(1.0)))
        return tirx.stmt_seq(*parts, s.store(s.most, r, most))

    def _finish(self, r: Expr) -> Stmt:
        p, s = self.p, self.scratch
        query, head = self._place(self.first + r)
        parts, (to,) = slots([self._offset(p.y_steps, query, head)], "to")
        binds, whole = across(add, [s.load(s.sums, r * i64(PACK), PACK)])
        parts += binds
        whole = tirx.max(whole, f32(1e-30)) if p.spec.zero_masked else whole
        binds, (inverse,) = slots([f32(1.0) / whole], "inverse")
        parts += binds
        for begin, width in runs(p.width):
            value = s.load(s.total, r * i64(p.width) + i64(begin), width)
            at = tirx.Ramp(to + i64(begin), i64(1), width)
            parts.append(tirx.BufferStore(p.y, value * tirx.Broadcast(inverse, width), [at]))
        return tirx.stmt_seq(*parts)

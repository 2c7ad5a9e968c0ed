"""Attention: blocks of 64 keys pass a tile of rows of queries, whose sums stay in the caches.

A row is a head of a query; heads that share keys are rows of one tile, so that a key is read once
for all of them. Scores of a block lie in a small scratch; the largest so far, the sum of
exponentials and the sum of what those weigh are kept for each row (streaming softmax, sources in
`apq_tvm.ops.graph.attention`). A block that the mask hides from all rows is passed over.

Keys come in parts of so many blocks, whose sums are joined in order. A query alone, as decoding has
it, has too few heads for all threads: there each part is a task of its own, and joined at the end.
How a row is summed depends on nothing but its keys: neither on the tile it is in, nor on threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import sym, tirx

from apq_tvm.ops.graph.attention import PACK, Attended
from apq_tvm.schedules.decide import Decide, all_asked
from apq_tvm.schedules.devices import four_dots
from apq_tvm.schedules.graph.attention.problem import Problem, read_problem
from apq_tvm.schedules.graph.attention.rows import Task, finished
from apq_tvm.schedules.graph.attention.scratch import BLOCK, Kept, Rows, slots
from apq_tvm.schedules.graph.panel import is_const, loop
from apq_tvm.schedules.graph.rewrites.lowering import finish
from apq_tvm.tensorize.exprs import Expr, Stmt, i64
from apq_tvm.types import DeviceProfile

MANY_ROWS = 512
"""From so many rows on, more than one thread joins parts: less is done sooner than they wake."""


def schedule_attention(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Write the body of `apq_tvm.ops.graph.attention.attention`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``rows`` of a register tile, ``tiles`` of them in a task, blocks of a ``part``; of int8 keys
        how ``scores`` are made, by an instruction of the device or as ``float``.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    dot = None
    if Attended.of(func).coded:
        dots = {dot.name: dot for dot in four_dots(profile)}
        dot = dots.get(decide("scores", (*dots, "float")))
    views, p = read_problem(func, profile.vector_bytes, dot)
    wide = profile.vector_bytes >= 64
    narrow = profile.vector_bytes == 16 and profile.vector_registers < 32
    most = decide("rows", (3, 2) if narrow else (6, 4, 3))
    fits = profile.l1_bytes // (4 * most * (BLOCK + p.size + p.width))
    tiles = next((t for t in (8, 4, 2) if t <= fits), 1)
    rows = Rows(most, decide("tiles", (tiles, *sorted({1, 2, 4, 8} - {tiles}))), 4 if wide else 1)
    rows = replace(rows, part=decide("part", (8, 4, 16)))
    all_asked(decide)
    group = p.spec.group
    parts = -(-group // most)
    one = replace(rows, rows=-(-group // parts), tiles=parts)
    if is_const(p.queries):
        body = _apart(p, one) if int(p.queries) == 1 else _tasks(p, rows)
    else:
        body = tirx.IfThenElse(p.queries == i64(1), _apart(p, one), _tasks(p, rows))
    return finish(func.with_body(tirx.stmt_seq(*views, body)))


def _tasks(p: Problem, rows: Rows) -> Stmt:
    """A task for each batch, head of keys and so many rows."""
    whole = sym.Analyzer().simplify(p.queries * i64(p.spec.group))
    per_task = rows.rows * rows.tiles
    tiles = sym.Analyzer().simplify((whole + i64(per_task - 1)) // i64(per_task))

    def task(t: Expr) -> Stmt:
        head, first = t // tiles % i64(p.heads), t % tiles * i64(per_task)
        binds, (b, h, start) = slots([t // tiles // i64(p.heads), head, first], "task")
        return tirx.stmt_seq(*binds, Task(p, rows, b, h, start, whole).all_parts())

    return loop(p.batch * i64(p.heads) * tiles, task, tirx.ForKind.PARALLEL)


def _apart(p: Problem, rows: Rows) -> Stmt:
    """For one query: a task for each batch, head of keys and part of the keys."""
    group, stride = i64(p.spec.group), i64(p.width + PACK)
    parts = p.parts(rows)
    heads = p.batch * i64(p.heads)
    kept = tirx.decl_buffer((heads * parts * group * stride,), "float32", "parts")

    def record(row: Expr) -> Kept:
        return Kept(kept, row * stride, i64(p.width))

    def task(t: Expr) -> Stmt:
        head = t // parts
        values = [head // i64(p.heads), head % i64(p.heads), t % parts]
        binds, (b, h, part) = slots(values, "task")
        one = Task(p, rows, b, h, i64(0), group)
        return tirx.stmt_seq(*binds, one.one_part(part, lambda r: record(t * group + r)))

    def row(i: Expr) -> Stmt:
        own = Kept.alone(p.width)
        binds, (head, place) = slots([i // group, i % group], "row")

        def join(part: Expr) -> Stmt:
            return own.join(record((head * parts + part) * group + place))

        at = head // i64(p.heads) * p.y_steps[0] + head % i64(p.heads) * p.y_steps[1]
        done = finished(p, own, at + place * p.y_steps[2])
        all_parts = loop(parts, join)
        return tirx.stmt_seq(tirx.AllocBuffer(own.buffer), *binds, own.clear(), all_parts, done)

    joined: Any = loop(heads * group, row)
    if not is_const(heads) or int(heads) * p.spec.group >= MANY_ROWS:
        by_all = loop(heads * group, row, tirx.ForKind.PARALLEL)
        joined = tirx.IfThenElse(heads * group >= i64(MANY_ROWS), by_all, joined)
    tasks = loop(heads * parts, task, tirx.ForKind.PARALLEL)
    return tirx.stmt_seq(tirx.AllocBuffer(kept), tasks, joined)

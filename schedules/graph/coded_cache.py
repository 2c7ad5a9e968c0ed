"""A cache's new tokens in int8 or int4: a head of a token is rounded in registers, then put in
place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from apq_tvm.formats.caches import group_size
from apq_tvm.ops.graph.attention import FOURS, PACK
from apq_tvm.ops.graph.caches.grown import KEYS
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.attention.codes import coded_group, coded_row, padded, paired
from apq_tvm.schedules.graph.attention.scratch import Scratch, runs, slots
from apq_tvm.schedules.graph.panel import flat_views, is_const, loop, strides
from apq_tvm.schedules.graph.rewrites.lowering import finish
from apq_tvm.tensorize.exprs import Expr, Stmt, f32, i64
from apq_tvm.types import DeviceProfile


def schedule_coded_cache(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Write the body of `apq_tvm.ops.graph.caches.coded.coded_cache`.

    A task is a token; which it is in says nothing about how it is rounded.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    writer = _Writer(func)
    kept, total = writer.kept, writer.total

    def task(behind: Expr) -> Stmt:
        binds, (token,) = slots([behind + kept], "token")
        heads = i64(writer.heads)

        def head(i: Expr) -> Stmt:
            more, (seq, one) = slots([i // heads, i % heads], "head")
            return tirx.stmt_seq(*more, writer.head(token, seq, one))

        return tirx.stmt_seq(*binds, loop(writer.batch * heads, head))

    body = loop(total - kept, task, tirx.ForKind.PARALLEL)
    return finish(func.with_body(tirx.stmt_seq(*writer.views, body)))


class _Writer:
    """What is where."""

    def __init__(self, func: Any) -> None:
        attrs, params = func.attrs, list(func.params)
        buffers = [p for p in params if hasattr(p, "shape")]
        self.views, flat = flat_views(func)
        self.old, self.added, *start, self.scales, self.codes = flat
        self.start = start[0] if start else None
        self.kept, self.total = (p for p in params if not hasattr(p, "shape"))
        self.keys = str(attrs["apq.layout"]) == KEYS
        self.nibbles = self.codes.dtype == "uint8"
        orders = [[int(axis) for axis in attrs[f"apq.{name}"]] for name in ("past", "new")]
        shapes = [buffer.shape for buffer in buffers[:2]]
        pairs = list(zip(shapes, orders, strict=True))
        self.steps = [[strides(shape)[axis] for axis in order] for shape, order in pairs]
        self.held, self.fresh = (shape[order[0]] for shape, order in pairs)
        _, self.batch, heads, width = (shapes[0][axis] for axis in orders[0])
        self.heads, self.width = int(heads), int(width)

    def head(self, token: Expr, seq: Expr, one: Expr) -> Stmt:
        """One head of one token."""
        columns = padded(self.width)
        row = tirx.decl_buffer((columns,), "float32", "row")
        codes = tirx.decl_buffer((columns,), self.codes.dtype, "row_codes")
        start = self.held if self.start is None else tirx.BufferLoad(self.start, [seq])
        parts, (at,) = slots([token - start], "at")
        old = self._copy(row, self.old, self.steps[0], (token, seq, one))
        new = self._copy(row, self.added, self.steps[1], (at, seq, one))
        zeros = tirx.stmt_seq(*_zeros(row, 0, columns))
        there = tirx.IfThenElse(tirx.all(at < i64(0), token < self.held), old, zeros)
        rounded, scales = self._rounded(row, codes)
        block, lane = token // i64(PACK), token % i64(PACK)
        where = (block * self.batch + seq) * i64(self.heads) + one
        binds, (where, lane) = slots([where, lane], "where")
        places = [
            (where * i64(len(scales)) + i64(i)) * i64(PACK) + lane for i in range(len(scales))
        ]
        write = self._fours(codes, where, lane) if self.keys else self._row(codes, token, seq, one)
        return tirx.stmt_seq(
            tirx.AllocBuffer(row),
            tirx.AllocBuffer(codes),
            *parts,
            *_zeros(row, self.width, columns),
            tirx.IfThenElse(tirx.all(at >= i64(0), at < self.fresh), new, there),
            *rounded,
            *binds,
            *(
                tirx.BufferStore(self.scales, scale, [at])
                for scale, at in zip(scales, places, strict=True)
            ),
            write,
        )

    def _rounded(self, row: Any, codes: Any) -> tuple[list[Stmt], list[Expr]]:
        """Codes of a row, and what scales them."""
        if not self.nibbles:
            rounded, scale, _ = coded_row(row, i64(0), codes, i64(0), padded(self.width))
            return rounded, [scale]
        parts, spans, size = list[Stmt](), list[Expr](), group_size(self.width)
        for begin in range(0, self.width, size):
            rounded, scale, least = coded_group(row, codes, begin, size)
            parts += rounded
            spans += [scale, least]
        return parts, spans

    def _copy(self, row: Any, source: Any, steps: Sequence[Expr], at: Sequence[Expr]) -> Stmt:
        """A head's columns from where they are stored."""
        base = sum((a * step for a, step in zip(at, steps[:-1], strict=True)), i64(0))
        parts, (base,) = slots([base], "from")

        def load(begin: int, lanes: int) -> Expr:
            place: Any = base + i64(begin) * steps[-1]
            return tirx.BufferLoad(
                source, [place if lanes == 1 else tirx.Ramp(place, steps[-1], lanes)]
            )

        if not is_const(steps[-1], 1):  # one by one: gathers of every device would be slower
            each = loop(
                i64(self.width),
                lambda d: tirx.BufferStore(
                    row, tirx.BufferLoad(source, [base + d * steps[-1]]), [d]
                ),
            )
            return tirx.stmt_seq(*parts, each)
        for begin, lanes in runs(self.width):
            parts.append(Scratch.store(row, i64(begin), load(begin, lanes), lanes))
        return tirx.stmt_seq(*parts)

    def _fours(self, codes: Any, where: Expr, lane: Expr) -> Stmt:
        """Of keys: four columns, or twice as many of int4, beside those of 15 other tokens."""
        each = 2 * FOURS if self.nibbles else FOURS
        count = -(-self.width // each)
        parts, (base,) = slots([where * i64(count * PACK * FOURS) + lane * i64(FOURS)], "to")

        def store(i: Expr) -> Stmt:
            value = Scratch.load(codes, i * i64(each), FOURS)
            if self.nibbles:
                value = paired(codes, i * i64(each), FOURS, FOURS)
            return Scratch.store(self.codes, base + i * i64(PACK * FOURS), value, FOURS)

        return tirx.stmt_seq(*parts, loop(i64(count), store))

    def _row(self, codes: Any, token: Expr, seq: Expr, one: Expr) -> Stmt:
        """Of values: as they are, or halves of groups beside each other."""
        size = self.width // 2 if self.nibbles else self.width
        place = ((token * self.batch + seq) * i64(self.heads) + one) * i64(size)
        parts, (base,) = slots([place], "to")
        if self.nibbles:
            half = group_size(self.width) // 2
            for begin in range(0, size, half):
                value = paired(codes, i64(2 * begin), half, half)
                parts.append(Scratch.store(self.codes, base + i64(begin), value, half))
            return tirx.stmt_seq(*parts)
        for begin, lanes in runs(self.width):
            value = Scratch.load(codes, i64(begin), lanes)
            parts.append(Scratch.store(self.codes, base + i64(begin), value, lanes))
        return tirx.stmt_seq(*parts)


def _zeros(row: Any, begin: int, end: int) -> list[Stmt]:
    """Columns `begin` to `end` of a row."""
    out = []
    for first, lanes in runs(end - begin):
        value = f32(0.0) if lanes == 1 else tirx.Broadcast(f32(0.0), lanes)
        out.append(Scratch.store(row, i64(begin + first), value, lanes))
    return out

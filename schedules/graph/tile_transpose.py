"""Transposes as squares of eight by eight in registers.

A copy whose target runs along one axis and whose source runs along another reads or writes one
element per cache line. In squares both sides move whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, sym, tirx

from apq_tvm.schedules.graph.exprs import collect, substitute, uses
from apq_tvm.schedules.graph.panel import SQUARE, transpose_block
from apq_tvm.schedules.graph.rewrites.loops import fuse_outer, nest
from apq_tvm.schedules.graph.rewrites.split_guards import is_guard
from apq_tvm.schedules.graph.rewrites.vectorize import Loop
from apq_tvm.tensorize.exprs import Expr, Stmt

KINDS = ("float32", "int32", "uint8", "int8")
"""Element types whose squares are worth it."""


_Rows = tuple[list[Stmt], list[Expr]]
"""What comes before a square, and its rows."""


def _stride(index: Expr, loop: Any) -> int | None:
    found = Loop(loop.loop_var, 1).stride(index)
    return int(found) if isinstance(found, tirx.IntImm) else None


def _pair(loops: list[Any], store: Any) -> tuple[Any, Any] | None:
    """The loop along what is read and the loop along the target, where they differ."""
    target = _widest([x for x in loops if _stride(store.indices[0], x) == 1])
    loads = _loads(store)
    if target is None or any(len(load.indices) != 1 for load in loads):
        return None
    for load in loads:
        index = load.indices[0]
        source = _widest([x for x in loops if _stride(index, x) == 1])
        if source is None or source.same_as(target):
            continue
        if uses(index, target.loop_var) and uses(store.indices[0], source.loop_var):
            return source, target
    return None


def _loads(store: Any) -> list[Any]:
    """What is read along loops; where an index is itself read, no loop runs along it."""
    return [
        e for e in collect(store.value, ir.TensorLoad) if not collect(e.indices[0], ir.TensorLoad)
    ]


def _guards(value: Expr) -> int:
    """Conditions under which parts of it are read: each cuts every row of a square, and several the
    parts of each other, which takes minutes to compile."""
    return sum(map(is_guard, collect(value, ir.Call)))


def _widest(loops: list[Any]) -> Any | None:
    return next((x for x in reversed(loops) if not _shorter(x)), None)


def _shorter(loop: Any) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) < SQUARE


def _ramp(start: Expr) -> Expr:
    return tirx.Ramp(start, tirx.const(1, str(start.ty)), SQUARE)


class _Squares:
    """The copy of a store whose loop `i` runs along what is read, and `j` along the target."""

    def __init__(self, store: Any, i: Any, j: Any) -> None:
        self.store, self.i, self.j = store, i, j
        self.dtype = str(i.extent.ty)
        self.side = self.int(SQUARE)
        self.whole_i, self.whole_j = (x.extent // self.side for x in (i, j))
        self.scratch = tirx.decl_buffer((SQUARE * SQUARE,), str(store.value.ty), "square")

    def int(self, value: int) -> Expr:
        return tirx.const(value, self.dtype)

    def loop(self, extent: Expr, body: Callable[[Expr], Stmt], name: str) -> Any:
        var, kind = tirx.Var(name, self.dtype), tirx.ForKind.SERIAL
        return tirx.For(var, self.int(0), sym.Analyzer().simplify(extent), kind, body(var))

    def strips(self) -> Any:
        """A loop over eights of `i`."""
        copied = isinstance(self.store.value, ir.TensorLoad)
        rows = self._copied if copied else self._computed

        def strip(block: Expr) -> Stmt:
            x = block * self.side
            squares = self.loop(self.whole_j, lambda b: self._square(x, b * self.side, rows), "jb")
            done = self.whole_j * self.side
            tail = self.loop(
                self.j.extent - done,
                lambda y: self.loop(self.side, lambda r: self._one(x + r, done + y), "r"),
                "y",
            )
            made = [] if copied else [tirx.AllocBuffer(self.scratch)]
            return tirx.stmt_seq(*made, squares, tail)

        return self.loop(self.whole_i, strip, "ib")

    def edge(self) -> Stmt:
        """What is behind the last eight of `i`."""
        done = self.whole_i * self.side
        return self.loop(
            self.i.extent - done,
            lambda x: self.loop(self.j.extent, lambda y: self._one(done + x, y), "y"),
            "x",
        )

    def _at(self, e: Expr, x: Expr, y: Expr) -> Expr:
        return substitute(substitute(e, self.i.loop_var, x), self.j.loop_var, y)

    def _one(self, x: Expr, y: Expr) -> Stmt:
        store = self.store
        place = self._at(store.indices[0], x, y)
        return tirx.BufferStore(store.buffer, self._at(store.value, x, y), [place])

    def _square(self, x: Expr, y: Expr, rows: Callable[[Expr, Expr], _Rows]) -> Stmt:
        before, vectors = rows(x, y)

        def put(r: int, vector: Expr) -> Stmt:
            start = self._at(self.store.indices[0], x + self.int(r), y)
            return tirx.BufferStore(self.store.buffer, vector, [_ramp(start)])

        return tirx.stmt_seq(*before, transpose_block(vectors, put))

    def _copied(self, x: Expr, y: Expr) -> _Rows:
        value = self.store.value

        def row(r: int) -> Expr:
            start = self._at(value.indices[0], x, y + self.int(r))
            return tirx.BufferLoad(value.source, [_ramp(start)])

        return [], [row(r) for r in range(SQUARE)]

    def _computed(self, x: Expr, y: Expr) -> _Rows:
        def row(r: int) -> Stmt:
            def element(at: Expr) -> Stmt:
                value = self._at(self.store.value, x + at, y + self.int(r))
                return tirx.BufferStore(self.scratch, value, [self.int(r * SQUARE) + at])

            return self.loop(self.side, element, "l")

        places = [_ramp(self.int(r * SQUARE)) for r in range(SQUARE)]
        vectors = [tirx.BufferLoad(self.scratch, [place]) for place in places]
        return [row(r) for r in range(SQUARE)], vectors


def tile_transpose(stmt: Stmt) -> Stmt | None:
    """Rewrite a lowered nest that copies elements across axes, or computes with them.

    What is computed goes through scratch, in the order of what it reads.

    Parameters
    ----------
    stmt : Stmt

    Returns
    -------
    Stmt or None
        Parallel over the other axes and strips of squares; None if the nest is no such copy.
    """
    loops, store = nest(stmt)
    if not isinstance(store, tirx.BufferStore):
        return None
    if str(store.value.ty) not in KINDS or len(loops) < 2 or _guards(store.value) > 1:
        return None
    if not all(isinstance(x.min, tirx.IntImm) and int(x.min) == 0 for x in loops):
        return None
    pair = _pair(loops, store)
    if pair is None:
        return None
    squares = _Squares(store, *pair)
    outer = [x for x in loops if not any(x.same_as(y) for y in pair)]
    strips, edge = squares.strips(), squares.edge()
    return tirx.stmt_seq(
        fuse_outer([*outer, strips], strips.body), fuse_outer(outer, edge) if outer else edge
    )

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
from apq_tvm.schedules.graph.rewrites.vectorize import Loop
from apq_tvm.tensorize.exprs import Expr, Stmt

KINDS = ("float32", "int32", "uint8", "int8")
"""Element types whose squares are worth it."""


def _stride(index: Expr, loop: Any) -> int | None:
    found = Loop(loop.loop_var, 1).stride(index)
    return int(found) if isinstance(found, tirx.IntImm) else None


def _at(e: Expr, a: Any, x: Expr, b: Any, y: Expr) -> Expr:
    return substitute(substitute(e, a.loop_var, x), b.loop_var, y)


def _pair(loops: list[Any], store: Any) -> tuple[Any, Any] | None:
    """The loop along what is read and the loop along the target, where they differ."""
    target = _widest([x for x in loops if _stride(store.indices[0], x) == 1])
    if target is None or any(len(load.indices) != 1 for load in _loads(store)):
        return None
    for load in _loads(store):
        index = load.indices[0]
        source = _widest([x for x in loops if _stride(index, x) == 1])
        if source is None or source.same_as(target):
            continue
        if uses(index, target.loop_var) and uses(store.indices[0], source.loop_var):
            return source, target
    return None


def _loads(store: Any) -> list[Any]:
    return [
        e for e in collect(store.value, ir.TensorLoad) if not collect(e.indices[0], ir.TensorLoad)
    ]


def _widest(loops: list[Any]) -> Any | None:
    return next((x for x in reversed(loops) if not _shorter(x)), None)


def _shorter(loop: Any) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) < SQUARE


def _ramp(start: Expr) -> Expr:
    return tirx.Ramp(start, tirx.const(1, str(start.ty)), SQUARE)


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
    if str(store.value.ty) not in KINDS or len(loops) < 2:
        return None
    if not all(isinstance(x.min, tirx.IntImm) and int(x.min) == 0 for x in loops):
        return None
    pair = _pair(loops, store)
    if pair is None:
        return None
    i, j = pair
    copied = isinstance(store.value, ir.TensorLoad)
    outer = [x for x in loops if not x.same_as(i) and not x.same_as(j)]
    dtype = str(i.extent.ty)
    side, zero = tirx.const(SQUARE, dtype), tirx.const(0, dtype)
    simplify = sym.Analyzer().simplify

    def serial(extent: Expr, body: Any, name: str) -> Stmt:
        var = tirx.Var(name, dtype)
        return tirx.For(var, zero, simplify(extent), tirx.ForKind.SERIAL, body(var))

    def one(x: Expr, y: Expr) -> Stmt:
        return tirx.BufferStore(
            store.buffer, _at(store.value, i, x, j, y), [_at(store.indices[0], i, x, j, y)]
        )

    def square(x: Expr, y: Expr) -> Stmt:
        def row(r: int) -> Expr:
            start = _at(store.value.indices[0], i, x, j, y + tirx.const(r, dtype))
            return tirx.BufferLoad(store.value.source, [_ramp(start)])

        return transposed(x, y, row)

    def transposed(x: Expr, y: Expr, row: Callable[[int], Expr]) -> Stmt:
        def put(r: int, vector: Expr) -> Stmt:
            start = _at(store.indices[0], i, x + tirx.const(r, dtype), j, y)
            return tirx.BufferStore(store.buffer, vector, [_ramp(start)])

        return transpose_block([row(r) for r in range(SQUARE)], put)

    scratch = tirx.decl_buffer((SQUARE * SQUARE,), str(store.value.ty), "square")

    def computed(x: Expr, y: Expr) -> Stmt:
        def row(r: int) -> Stmt:
            def element(at: Expr) -> Stmt:
                value = _at(store.value, i, x + at, j, y + tirx.const(r, dtype))
                return tirx.BufferStore(scratch, value, [tirx.const(r * SQUARE, dtype) + at])

            return serial(side, element, "l")

        def kept(r: int) -> Expr:
            return tirx.BufferLoad(scratch, [_ramp(tirx.const(r * SQUARE, dtype))])

        return tirx.stmt_seq(*(row(r) for r in range(SQUARE)), transposed(x, y, kept))

    whole_i, whole_j = i.extent // side, j.extent // side
    rest_i, rest_j = i.extent - whole_i * side, j.extent - whole_j * side

    def strip(block: Expr) -> Stmt:
        x = block * side
        squares = serial(whole_j, lambda b: (square if copied else computed)(x, b * side), "jb")
        tail = serial(
            rest_j, lambda y: serial(side, lambda r: one(x + r, whole_j * side + y), "r"), "y"
        )
        made = [] if copied else [tirx.AllocBuffer(scratch)]
        return tirx.stmt_seq(*made, squares, tail)

    block = tirx.Var("ib", dtype)
    strips = tirx.For(block, zero, simplify(whole_i), tirx.ForKind.SERIAL, strip(block))
    parts = [fuse_outer([*outer, strips], strips.body)]
    edge = serial(
        rest_i, lambda x: serial(j.extent, lambda y: one(whole_i * side + x, y), "y"), "x"
    )
    parts.append(fuse_outer(outer, edge) if outer else edge)
    return tirx.stmt_seq(*parts)

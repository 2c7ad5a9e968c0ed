"""Transposes as squares of eight by eight in registers.

A copy whose target runs along one axis and whose source runs along another reads or writes one
element per cache line. In squares both sides move whole vectors.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, sym, tirx

from apq_tvm.schedules.graph.exprs import substitute, uses
from apq_tvm.schedules.graph.panel import SQUARE, transpose_block
from apq_tvm.schedules.graph.rewrites.loops import fuse_outer, nest
from apq_tvm.schedules.graph.rewrites.vectorize import Loop
from apq_tvm.tensorize.exprs import Expr, Stmt


def _stride(index: Expr, loop: Any) -> int | None:
    found = Loop(loop.loop_var, 1).stride(index)
    return int(found) if isinstance(found, tirx.IntImm) else None


def _at(e: Expr, a: Any, x: Expr, b: Any, y: Expr) -> Expr:
    return substitute(substitute(e, a.loop_var, x), b.loop_var, y)


def _pair(loops: list[Any], store: Any) -> tuple[Any, Any] | None:
    """The loop along the source and the loop along the target, where they differ."""
    source = [x for x in loops if _stride(store.value.indices[0], x) == 1]
    target = [x for x in loops if _stride(store.indices[0], x) == 1]
    wide = [next((x for x in reversed(side) if not _shorter(x)), None) for side in (source, target)]
    if wide[0] is None or wide[1] is None or wide[0].same_as(wide[1]):
        return None
    along = uses(store.value.indices[0], wide[1].loop_var) and uses(
        store.indices[0], wide[0].loop_var
    )
    return (wide[0], wide[1]) if along else None


def _shorter(loop: Any) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) < SQUARE


def tile_transpose(stmt: Stmt) -> Stmt | None:
    """Rewrite a lowered nest that copies 32-bit elements across axes.

    Parameters
    ----------
    stmt : Stmt

    Returns
    -------
    Stmt or None
        Parallel over the other axes and strips of squares; None if the nest is no such copy.
    """
    loops, store = nest(stmt)
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, ir.TensorLoad):
        return None
    if str(store.value.ty) not in ("float32", "int32") or len(loops) < 2:
        return None
    if not all(isinstance(x.min, tirx.IntImm) and int(x.min) == 0 for x in loops):
        return None
    pair = _pair(loops, store)
    if pair is None:
        return None
    i, j = pair
    outer = [x for x in loops if not x.same_as(i) and not x.same_as(j)]
    dtype = str(i.extent.ty)
    side, zero = tirx.const(SQUARE, dtype), tirx.const(0, dtype)
    simplify = sym.Analyzer().simplify

    def serial(extent: Expr, body: Any, name: str) -> Stmt:
        var = tirx.Var(name, dtype)
        return tirx.For(var, zero, simplify(extent), tirx.ForKind.SERIAL, body(var))

    def one(x: Expr, y: Expr) -> Stmt:
        value = tirx.BufferLoad(store.value.source, [_at(store.value.indices[0], i, x, j, y)])
        return tirx.BufferStore(store.buffer, value, [_at(store.indices[0], i, x, j, y)])

    def square(x: Expr, y: Expr) -> Stmt:
        one_step = tirx.const(1, dtype)

        def row(r: int) -> Expr:
            start = _at(store.value.indices[0], i, x, j, y + tirx.const(r, dtype))
            return tirx.BufferLoad(store.value.source, [tirx.Ramp(start, one_step, SQUARE)])

        def put(r: int, vector: Expr) -> Stmt:
            start = _at(store.indices[0], i, x + tirx.const(r, dtype), j, y)
            return tirx.BufferStore(store.buffer, vector, [tirx.Ramp(start, one_step, SQUARE)])

        return transpose_block([row(r) for r in range(SQUARE)], put)

    whole_i, whole_j = i.extent // side, j.extent // side
    rest_i, rest_j = i.extent - whole_i * side, j.extent - whole_j * side

    def strip(block: Expr) -> Stmt:
        x = block * side
        squares = serial(whole_j, lambda b: square(x, b * side), "jb")
        tail = serial(
            rest_j, lambda y: serial(side, lambda r: one(x + r, whole_j * side + y), "r"), "y"
        )
        return tirx.stmt_seq(squares, tail)

    block = tirx.Var("ib", dtype)
    strips = tirx.For(block, zero, simplify(whole_i), tirx.ForKind.SERIAL, strip(block))
    parts = [fuse_outer([*outer, strips], strips.body)]
    edge = serial(
        rest_i, lambda x: serial(j.extent, lambda y: one(whole_i * side + x, y), "y"), "x"
    )
    parts.append(fuse_outer(outer, edge) if outer else edge)
    return tirx.stmt_seq(*parts)

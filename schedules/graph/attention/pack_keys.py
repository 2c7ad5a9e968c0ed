"""Packing of keys: squares of 8 or 16 tokens and columns are transposed in registers."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.attention import PACK
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.panel import (
    bind_all,
    flat_views,
    is_const,
    loop,
    strides,
    transpose_block,
)
from apq_tvm.schedules.graph.rewrites.lowering import finish
from apq_tvm.tensorize.exprs import Expr, Stmt, i64
from apq_tvm.types import DeviceProfile


def schedule_pack_keys(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Write the body of `apq_tvm.ops.graph.caches.pack_keys.pack_keys`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``side`` of the squares.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    k, packed = func.params
    order = [int(p) for p in func.attrs["apq.order"]]
    steps = [strides(k.shape)[p] for p in order]
    steps = [*steps[:2], *(steps[2:-1] or [i64(0)]), steps[-1]]
    total, size = k.shape[order[0]], int(packed.shape[3])
    side = decide("side", (16, 8) if str(k.dtype) == "float16" else (8, 16))
    blocks, batch, heads = (packed.shape[i] for i in range(3))
    views, (source, target) = flat_views(func)

    def task(t: Expr) -> Stmt:
        block, head = t // heads // batch, t % heads
        first = block * i64(PACK)
        where = first * steps[0] + t // heads % batch * steps[1] + head * steps[2]
        bases = [where, t * i64(size * PACK), tirx.min(i64(PACK), total - first)]
        binds, (base, to, count) = bind_all(bases, "base")
        piece = _Piece(source, target, base, to, steps[0], steps[-1], size, side)
        edge = piece.edge(count)
        if is_const(steps[-1], 1):
            edge = tirx.IfThenElse(count >= i64(PACK), piece.squares(), edge)
        return tirx.stmt_seq(*binds, edge)

    body = loop(blocks * batch * heads, task, tirx.ForKind.PARALLEL)
    return finish(func.with_body(tirx.stmt_seq(*views, body)))


class _Piece:
    """16 tokens of one head."""

    def __init__(
        self, source: Any, target: Any, base: Expr, to: Expr, token: Expr, column: Expr, size: int,
        side: int,
    ) -> None:  # fmt: skip
        self.source, self.target, self.base, self.to = source, target, base, to
        self.token, self.column, self.size, self.side = token, column, size, side

    def _element(self, j: Expr, d: Expr) -> Stmt:
        value = tirx.BufferLoad(self.source, [self.base + j * self.token + d * self.column])
        return tirx.BufferStore(self.target, value, [self.to + d * i64(PACK) + j])

    def edge(self, count: Expr) -> Stmt:
        """Element by element; 0 from `count` on: what multiplies q should be no denormal."""
        zero = tirx.const(0.0, self.source.dtype)
        size = i64(self.size)

        def empty(j: Expr) -> Stmt:
            return loop(
                size,
                lambda d: tirx.BufferStore(
                    self.target, zero, [self.to + d * i64(PACK) + count + j]
                ),
            )

        filled = loop(count, lambda j: loop(size, lambda d: self._element(j, d)))
        return tirx.stmt_seq(filled, loop(i64(PACK) - count, empty))

    def squares(self) -> Stmt:
        """All 16."""
        side, whole = i64(self.side), self.size // self.side * self.side
        parts = [
            loop(
                i64(whole // self.side),
                lambda x: loop(i64(PACK // self.side), lambda y: self._square(y * side, x * side)),
            )
        ]
        if whole < self.size:
            beside = i64(self.size - whole)
            parts.append(
                loop(i64(PACK), lambda j: loop(beside, lambda d: self._element(j, d + i64(whole))))
            )
        return tirx.stmt_seq(*parts)

    def _square(self, j: Expr, d: Expr) -> Stmt:
        at = [self.base + (j + i64(i)) * self.token + d for i in range(self.side)]
        tokens = [tirx.BufferLoad(self.source, [tirx.Ramp(a, i64(1), self.side)]) for a in at]

        def store(i: int, row: Expr) -> Stmt:
            to = self.to + (d + i64(i)) * i64(PACK) + j
            return tirx.BufferStore(self.target, row, [tirx.Ramp(to, i64(1), self.side)])

        return transpose_block(tokens, store)

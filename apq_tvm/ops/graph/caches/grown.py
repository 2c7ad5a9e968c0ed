"""A cache of keys or values that grows in place: in a session only what is new of it is written.

Tokens lie outermost, so that a cache of some capacity begins with every shorter one. Keys lie 16
tokens interleaved (`KEYS`): scores of 16 keys are then sums of products without a horizontal step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.blocks import argument
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.shapes import Dim, Symbols, stored_index
from apq_tvm.tensorize.exprs import Expr, PrimFunc, i64

KEYS, ROWS = "keys", "rows"
"""Layouts: ``[ceil(T / 16), B, N, H, 16]`` and ``[T, B, N, H]``."""


def cache(
    past: Sequence[Dim],
    new: Sequence[Dim],
    orders: Sequence[Sequence[int]],
    layout: str,
    dtype: str = "float32",
    starts: bool = False,
) -> PrimFunc:
    """Build ``(past, new, [start], kept, T, y)``: tokens ``kept .. T - 1`` of y are written.

    Parameters
    ----------
    past, new : sequence of int or str
        Shapes as stored, four axes; strings are dynamic dimensions.
    orders : two sequences of int
        As ONNX Transpose, of `past` and of `new` to ``[T, B, N, H]``.
    layout : str
        `KEYS` or `ROWS`, of y.
    dtype : str
        Of y, ``"float32"`` or ``"float16"``; the others are float32.
    starts : bool
        Whether ``start`` is there, int64 [B]: where `new` begins in each sequence. Else it begins
        where `past` ends.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``kept``, the tokens that y holds already, and ``T`` are int64; tokens that neither `past`
        nor `new` has are 0. Attr ``apq.op`` = "cache".
    """
    symbols = Symbols()
    old_shape, new_shape = symbols.shape(past), symbols.shape(new)
    held, batch, heads, width = (old_shape[axis] for axis in orders[0])
    fresh = new_shape[orders[1][0]]
    shape = [symbols.dim("blocks"), batch, heads, width, i64(PACK)]
    if layout == ROWS:
        shape = [symbols.dim("tokens"), batch, heads, width]
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("cache")
        b.func_attr({"apq.op": "cache", "op_pattern": 8, "tirx.noalias": True})
        old = argument("past", old_shape, "float32")
        added = argument("new", new_shape, "float32")
        start = argument("start", [batch], "int64") if starts else None
        kept, total = (b.arg(name, tirx.Var(name, "int64")) for name in ("kept", "total"))
        y = argument("y", shape, dtype)
        with b.sblock("root"):
            b.reads()
            b.writes()
            with (
                b.parallel(i64(0), total - kept) as behind,
                b.serial(i64(0), batch) as seq,
                b.serial(i64(0), heads) as head,
            ):
                token = b.bind(behind + kept)
                at = b.bind(token - (held if start is None else start[seq]))

                def write(value: Any) -> None:
                    with b.serial(i64(0), width) as d:
                        b.buffer_store(
                            y, value(d).astype(dtype), place(layout, (token, seq, head, d))
                        )

                def stored(buffer: Any, order: Sequence[int], t: Expr) -> Any:
                    return lambda d: buffer[tuple(stored_index(order, (t, seq, head, d)))]

                with b.If(tirx.And(at >= i64(0), at < fresh)):
                    with b.Then():
                        write(stored(added, orders[1], at))
                    with b.Else(), b.If(tirx.And(at < i64(0), token < held)):
                        with b.Then():
                            write(stored(old, orders[0], token))
                        with b.Else():
                            write(lambda d: tirx.const(0.0, "float32"))
    return builder.get()


def place(layout: str, at: Sequence[Expr]) -> list[Expr]:
    """Where y has token, sequence, head and column."""
    token, *rest = at
    if layout == ROWS:
        return [token, *rest]
    return [token // i64(PACK), *rest, token % i64(PACK)]

"""What attention reads of a decoder, laid out by a GPU: caches that grow, and keys side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.gpu.team import WARP
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.caches.grown import KEYS, ROWS, place
from apq_tvm.ops.graph.shapes import Dim, Symbols, stored_index
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i64

THREADS = 256
"""Of a block, at most: they share the columns of a head."""

TYPES = ("float32", "float16")
"""Of caches that attention on a GPU reads."""


def cache(
    past: Sequence[Dim],
    new: Sequence[Dim],
    orders: Sequence[Sequence[int]],
    layout: str,
    dtype: str = "float32",
    starts: bool = False,
) -> PrimFunc:
    """Build what `apq_tvm.ops.graph.caches.grown.cache` is, with a block for a token and a head.

    Tokens ``kept .. T - 1`` are written, and nothing else of y is touched.

    Raises
    ------
    NotApplicable
        Caches of another type.
    """
    if dtype not in TYPES:
        raise NotApplicable(f"caches of {dtype} are not for GPUs, but {' and '.join(TYPES)} are")
    symbols = Symbols()
    old_shape, new_shape = symbols.shape(past), symbols.shape(new)
    held, batch, heads, width = (old_shape[axis] for axis in orders[0])
    fresh = new_shape[orders[1][0]]
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("cache")
        b.func_attr({"apq.op": "cache", "op_pattern": 8, "tirx.noalias": True})
        b.func_attr({"tirx.is_scheduled": True})
        old = argument("past", old_shape, "float32")
        added = argument("new", new_shape, "float32")
        start = argument("start", [batch], "int64") if starts else None
        kept, total = (b.arg(name, tirx.Var(name, "int64")) for name in ("kept", "total"))
        lanes = [] if layout == ROWS else [i64(PACK)]
        y = argument("y", [symbols.dim("tokens"), batch, heads, width, *lanes], dtype)

        def write(behind: Expr, seq: Expr, head: Expr, column: Expr) -> None:
            token = b.bind(behind + kept)
            at = b.bind(token - (held if start is None else start[seq]))

            def put(value: Expr) -> None:
                at_y = place(layout, (token, seq, head, column))
                b.buffer_store(y, value.astype(dtype), at_y)

            def stored(buffer: Any, order: Sequence[int], t: Expr) -> Expr:
                return buffer[tuple(stored_index(order, (t, seq, head, column)))]

            with b.If(tirx.And(at >= i64(0), at < fresh)):
                with b.Then():
                    put(stored(added, orders[1], at))
                with b.Else(), b.If(tirx.And(at < i64(0), token < held)):
                    with b.Then():
                        put(stored(old, orders[0], token))
                    with b.Else():
                        put(f32(0.0))

        _by_heads((total - kept, batch, heads, width), write)
    return builder.get()


def pack_keys(shape: Sequence[Dim], order: Sequence[int], dtype: str = "float32") -> PrimFunc:
    """Build what `apq_tvm.ops.graph.caches.pack_keys.pack_keys` declares.

    Raises
    ------
    NotApplicable
        As there.
    """
    if len(order) not in (3, 4) or len(shape) != len(order):
        raise NotApplicable(f"keys {tuple(shape)} are no heads of tokens")
    if not all(isinstance(shape[p], int) for p in order[2:]):
        raise NotApplicable(f"keys {tuple(shape)} have heads that only a run knows")
    stored = Symbols().shape(shape)
    total, batch, *some, width = (stored[p] for p in order)
    heads = some[0] if some else i64(1)
    blocks = (total + i64(PACK - 1)) // i64(PACK)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("pack_keys")
        b.func_attr({"apq.op": "pack_keys", "op_pattern": 8, "tirx.noalias": True})
        b.func_attr({"tirx.is_scheduled": True})
        k = argument("k", stored, dtype)
        y = argument("packed", (blocks, batch, heads, width, i64(PACK)), dtype)

        def write(token: Expr, seq: Expr, head: Expr, column: Expr) -> None:
            at = stored_index(order, (token, seq, *([head] if some else []), column))
            value = tirx.if_then_else(token < total, k[tuple(at)], tirx.const(0.0, dtype))
            b.buffer_store(y, value, place(KEYS, (token, seq, head, column)))

        _by_heads((blocks * i64(PACK), batch, heads, width), write)
    return builder.get()


def _by_heads(extents: Sequence[Expr], write: Callable[..., None]) -> None:
    """A block of threads for each token and head; each of them has columns."""
    tokens, batch, heads, width = extents
    columns = int(width)
    threads = min(THREADS, -(-columns // WARP) * WARP)
    with (
        b.thread_binding(0, tokens, "blockIdx.x") as behind,
        b.thread_binding(0, heads, "blockIdx.y") as head,
        b.thread_binding(0, batch, "blockIdx.z") as seq,
        b.thread_binding(0, threads, "threadIdx.x") as thread,
        b.sblock("columns"),
    ):
        b.reads()
        b.writes()
        with b.serial(0, -(-columns // threads)) as turn:
            column = (turn * threads + thread).astype("int64")
            with b.If(column < i64(columns)), b.Then():
                write(*(i.astype("int64") for i in (behind, seq, head)), column)

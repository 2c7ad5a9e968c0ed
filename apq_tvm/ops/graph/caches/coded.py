"""A cache of keys or values in int8 that grows in place, with a scale for each head and token.

The token's columns of one head share one scale, symmetric: ``code = round(x * 127 / max|x|)``. What
is written once is never touched again, so a session, a rewind and a run over all tokens at once
give the same codes. Keys are quantized as they come: what makes their channels equally large (a
balance between q and k, ABQ-LLM, arXiv:2408.08554) is two factors of the same columns, of k here
before codes are made and of q's rows in `apq_tvm.ops.graph.attention`, or one in the weights that
make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.graph.attention import FOURS, PACK, WIDEST
from apq_tvm.ops.graph.caches.grown import KEYS
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import PrimFunc, i32, i64


def coded_shapes(dims: Sequence[Any], layout: str) -> tuple[list[Any], list[Any]]:
    """Shapes of codes and of scales.

    Parameters
    ----------
    dims : sequence
        ``ceil(T / 16)``, T, B, N, H: integers, names or expressions; H is an integer.
    layout : str
        ``"keys"`` or ``"rows"``.

    Returns
    -------
    list, list
        Codes are ``[ceil(T / 16), B, N, ceil(H / 4), 64]``, four columns of a token side by side
        and 16 tokens of those, or ``[T, B, N, H]``; scales ``[ceil(T / 16), B, N, 16]``.
    """
    blocks, tokens, batch, heads, width = dims
    scales = [blocks, batch, heads, PACK]
    if layout == KEYS:
        return [blocks, batch, heads, -(-int(width) // FOURS), PACK * FOURS], scales
    return [tokens, batch, heads, width], scales


def coded_cache(
    past: Sequence[Dim],
    new: Sequence[Dim],
    orders: Sequence[Sequence[int]],
    layout: str,
    starts: bool = False,
) -> PrimFunc:
    """Declare ``(past, new, [start], kept, T, scales, codes)``: tokens ``kept .. T - 1``.

    Parameters
    ----------
    past, new, orders, layout, starts
        As of `apq_tvm.ops.graph.caches.grown.cache`.

    Returns
    -------
    tvm.tirx.PrimFunc
        A declaration, attr ``apq.op`` = "coded_cache"; `scales` float32 and `codes` int8 are as
        `coded_shapes` says. Lanes of scales and of keys past T hold anything.

    Raises
    ------
    NotApplicable
        Heads, or their columns, of a number that only a run knows, or too many columns.
    """
    symbols = Symbols()
    old, added = symbols.shape(past), symbols.shape(new)
    _, batch, heads, width = (past[axis] for axis in orders[0])
    if not isinstance(heads, int) or not isinstance(width, int) or width > WIDEST:
        raise NotApplicable(
            f"{heads} heads of {width} columns: int8 wants numbers, {WIDEST} columns at most"
        )
    codes, scales = coded_shapes(("blocks", "tokens", batch, heads, width), layout)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("coded_cache")
        argument("past", old, "float32")
        argument("new", added, "float32")
        if starts:
            argument("start", symbols.shape([batch]), "int64")
        for name in ("kept", "total"):
            b.arg(name, tirx.Var(name, "int64"))
        argument("scales", symbols.shape(scales), "float32")
        argument("codes", symbols.shape(codes), "int8")
        b.func_attr({"apq.op": "coded_cache", "op_pattern": 8, "tirx.noalias": True})
        b.func_attr({"apq.work": i64(4), "apq.layout": layout})
        b.func_attr({"apq.past": list(orders[0]), "apq.new": list(orders[1])})
        b.evaluate(i32(0))
    return builder.get()

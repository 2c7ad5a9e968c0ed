"""A cache of keys or values in int8 or int4 that grows in place, scaled head by head of a token.

The columns of one head of a token share one scale in int8, symmetric: ``code = round(x * 127 /
max|x|)``. In int4 each group of them (`apq_tvm.formats.caches`) has a scale and a least: ``code =
round((x - least) / scale)``, both rounded to bfloat16 so that codes from 0 to 15 hold all of it.
What is written once is never touched again, so a session, a rewind and a run over all tokens at
once give the same codes. Keys are quantized as they come: what makes their channels equally large
(a balance between q and k, ABQ-LLM, arXiv:2408.08554) is two factors of the same columns, of k here
before codes are made and of q's rows in `apq_tvm.ops.graph.attention`, or one in the weights that
make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.formats.caches import CODED, check_heads, group_size
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.graph.attention import FOURS, PACK
from apq_tvm.ops.graph.caches.grown import KEYS
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import PrimFunc, i32, i64


def coded_shapes(
    dims: Sequence[Any], layout: str, dtype: str = "int8"
) -> tuple[list[Any], list[Any]]:
    """Shapes of codes and of scales.

    Parameters
    ----------
    dims : sequence
        ``ceil(T / 16)``, T, B, N, H: integers, names or expressions; H is an integer.
    layout : str
        ``"keys"`` or ``"rows"``.
    dtype : {"int8", "int4"}

    Returns
    -------
    list, list
        Codes are ``[ceil(T / 16), B, N, ceil(H / 4), 64]``, four columns of a token side by side
        and 16 tokens of those, or ``[T, B, N, H]``; scales ``[ceil(T / 16), B, N, 16]``. Of int4 a
        byte of keys holds a column and, in its upper half, the fourth after it, of ``[..,
        H / 8, 64]``; one of rows a column and the one half a group after it, of ``[.., H / 2]``;
        scales are ``[.., 2 groups, 16]``, a group's scale and its least one after the other.
    """
    blocks, tokens, batch, heads, width = dims
    halves, scaled = 1, [blocks, batch, heads, PACK]
    if dtype == "int4":
        halves, groups = 2, int(width) // group_size(int(width))
        scaled.insert(3, 2 * groups)
    if layout == KEYS:
        return [blocks, batch, heads, -(-int(width) // (FOURS * halves)), PACK * FOURS], scaled
    return [tokens, batch, heads, width if halves == 1 else int(width) // halves], scaled


def coded_cache(
    past: Sequence[Dim],
    new: Sequence[Dim],
    orders: Sequence[Sequence[int]],
    layout: str,
    starts: bool = False,
    dtype: str = "int8",
) -> PrimFunc:
    """Declare ``(past, new, [start], kept, T, scales, codes)``: tokens ``kept .. T - 1``.

    Parameters
    ----------
    past, new, orders, layout, starts
        As of `apq_tvm.ops.graph.caches.grown.cache`.
    dtype : {"int8", "int4"}

    Returns
    -------
    tvm.tirx.PrimFunc
        A declaration, attr ``apq.op`` = "coded_cache"; `scales` float32 and `codes` int8, of int4
        uint16 (the bits of bfloat16) and uint8, are as `coded_shapes` says. Lanes of scales and of
        keys past T hold anything.

    Raises
    ------
    NotApplicable
        Heads, or their columns, of a number that only a run knows, or too many columns; of int4
        columns that are no groups.
    """
    symbols = Symbols()
    old, added = symbols.shape(past), symbols.shape(new)
    _, batch, heads, width = (past[axis] for axis in orders[0])
    check_heads(heads, width, dtype)
    codes, scales = coded_shapes(("blocks", "tokens", batch, heads, width), layout, dtype)
    of_codes, of_scales = CODED[dtype]
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("coded_cache")
        argument("past", old, "float32")
        argument("new", added, "float32")
        if starts:
            argument("start", symbols.shape([batch]), "int64")
        for name in ("kept", "total"):
            b.arg(name, tirx.Var(name, "int64"))
        argument("scales", symbols.shape(scales), of_scales)
        argument("codes", symbols.shape(codes), of_codes)
        b.func_attr({"apq.op": "coded_cache", "op_pattern": 8, "tirx.noalias": True})
        b.func_attr({"apq.work": i64(4), "apq.layout": layout})
        b.func_attr({"apq.past": list(orders[0]), "apq.new": list(orders[1])})
        b.evaluate(i32(0))
    return builder.get()

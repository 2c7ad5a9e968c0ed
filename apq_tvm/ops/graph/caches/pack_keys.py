"""Keys as `apq_tvm.ops.graph.attention` reads them: 16 tokens side by side."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.graph.attention import PACK
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import PrimFunc, i32, i64


def pack_keys(shape: Sequence[Dim], order: Sequence[int], dtype: str = "float32") -> PrimFunc:
    """Declare ``(k, packed)``.

    Parameters
    ----------
    shape : sequence of int or str
        Of k as stored; strings are dynamic dimensions.
    order : sequence of int
        As ONNX Transpose, to ``[T, B, Nkv, H]``, or ``[T, B, H]`` where Nkv is 1.
    dtype : str
        Of both.

    Returns
    -------
    tvm.tirx.PrimFunc
        A declaration, attr ``apq.op`` = "pack_keys"; `packed` is ``[ceil(T / 16), B, Nkv, H, 16]``,
        0 past T.

    Raises
    ------
    NotApplicable
        Heads, or their columns, of a number that only a run knows.
    """
    if len(order) not in (3, 4) or len(shape) != len(order):
        raise NotApplicable(f"keys {tuple(shape)} are no heads of tokens")
    symbols = Symbols()
    stored = symbols.shape(shape)
    total, batch, *heads, size = (stored[p] for p in order)
    if not all(isinstance(shape[p], int) for p in order[2:]):
        raise NotApplicable(f"keys {tuple(shape)} have heads that only a run knows")
    blocks = (total + i64(PACK - 1)) // i64(PACK)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("pack_keys")
        argument("k", stored, dtype)
        argument("packed", (blocks, batch, *(heads or [i64(1)]), size, i64(PACK)), dtype)
        b.func_attr({"apq.op": "pack_keys", "apq.order": [int(p) for p in order]})
        b.func_attr({"op_pattern": 8, "apq.work": i64(1), "tirx.noalias": True})
        b.evaluate(i32(0))
    return builder.get()

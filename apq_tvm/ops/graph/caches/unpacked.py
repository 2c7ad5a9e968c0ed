"""Packed keys and kept values as plain floats again, for attention that no kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.ops.graph.attention import FOURS, PACK
from apq_tvm.ops.graph.shapes import Dim, Symbols, stored_index
from apq_tvm.tensorize.exprs import PrimFunc


def unpacked_keys(
    keys: Sequence[Dim],
    tokens: Dim,
    size: int,
    dtype: str = "float32",
    scales: Sequence[Dim] | None = None,
) -> PrimFunc:
    """Build ``(keys, [scales], y)`` with y float32 [T, B, Nkv, H].

    Parameters
    ----------
    keys : sequence of int or str
        As `apq_tvm.ops.graph.attention.attention` reads them, of `dtype`.
    tokens, size : int or str, int
        T and H.
    dtype : str
    scales : sequence of int or str, optional
        Of int8.
    """

    def element(kept: Any, t: Any, rest: Sequence[Any]) -> Any:
        *head, d = rest
        if scales is None:
            return kept(t // PACK, *head, d, t % PACK)
        return kept(t // PACK, *head, d // FOURS, t % PACK * FOURS + d % FOURS)

    return _floats(keys, (tokens, keys[1], keys[2], size), element, dtype, scales)


def unpacked_values(
    values: Sequence[Dim],
    order: Sequence[int],
    dtype: str = "float32",
    scales: Sequence[Dim] | None = None,
) -> PrimFunc:
    """Build ``(values, [scales], y)`` with y float32 [T, B, Nkv, Hv].

    Parameters
    ----------
    values : sequence of int or str
        As stored, of `dtype`.
    order : sequence of int
        As ONNX Transpose, to ``[T, B, Nkv, Hv]``, or ``[T, B, Hv]`` where Nkv is 1.
    dtype, scales
        As of `unpacked_keys`.
    """
    spread = [values[axis] for axis in order]
    if len(order) == 3:
        spread.insert(2, 1)

    def element(kept: Any, t: Any, rest: Sequence[Any]) -> Any:
        logical = [t, *rest] if len(order) == 4 else [t, rest[0], rest[2]]
        return kept(*stored_index(order, logical))

    return _floats(values, spread, element, dtype, scales)


def _floats(
    kept: Sequence[Dim],
    shape: Sequence[Dim],
    element: Callable[..., Any],
    dtype: str,
    scales: Sequence[Dim] | None,
) -> PrimFunc:
    symbols = Symbols()
    stored = te.placeholder(symbols.shape(kept), dtype, "kept")
    args = [stored]
    if scales is not None:
        args.append(te.placeholder(symbols.shape(scales), "float32", "scales"))

    def value(t: Any, *rest: Any) -> Any:
        found = tirx.Cast("float32", element(stored, t, rest))
        if scales is None:
            return found
        return found * args[1](t // PACK, *rest[:2], t % PACK)

    y = te.compute(symbols.shape(shape), value, "y")
    return te.create_prim_func([*args, y]).with_attrs({"apq.op": "unpacked", "op_pattern": 8})

"""Packed keys and kept values as plain floats again, for attention that no kernel computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.formats.caches import CODED, group_size
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
    dtype : {"float32", "float16", "int8", "int4"}
    scales : sequence of int or str, optional
        Of int8 and int4.
    """

    def element(kept: Any, t: Any, rest: Sequence[Any]) -> Any:
        *head, d = rest
        if scales is None:
            return kept(t // PACK, *head, d, t % PACK)
        lane = t % PACK * FOURS + d % FOURS
        if dtype == "int4":
            byte = kept(t // PACK, *head, d // (2 * FOURS), lane)
            return _nibble(byte, d // FOURS % 2)
        return kept(t // PACK, *head, d // FOURS, lane)

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
    if dtype == "int4":
        spread[-1] = 2 * int(spread[-1])
        half = group_size(spread[-1]) // 2

    def element(kept: Any, t: Any, rest: Sequence[Any]) -> Any:
        if dtype == "int4":
            *head, d = rest
            rest = [*head, d // (2 * half) * half + d % half]
        logical = [t, *rest] if len(order) == 4 else [t, rest[0], rest[2]]
        found = kept(*stored_index(order, logical))
        return _nibble(found, d // half % 2) if dtype == "int4" else found

    return _floats(values, spread, element, dtype, scales)


def _nibble(byte: Any, upper: Any) -> Any:
    """Half of a byte; `upper` is 1 or 0."""
    return tirx.bitwise_and(tirx.shift_right(byte.astype("int32"), upper * 4), tirx.const(15))


def _floats(
    kept: Sequence[Dim],
    shape: Sequence[Dim],
    element: Callable[..., Any],
    dtype: str,
    scales: Sequence[Dim] | None,
) -> PrimFunc:
    symbols = Symbols()
    lies, scaled = CODED.get(dtype, (dtype, ""))
    stored = te.placeholder(symbols.shape(kept), lies, "kept")
    args = [stored]
    if scales is not None:
        args.append(te.placeholder(symbols.shape(scales), scaled, "scales"))

    def value(t: Any, *rest: Any) -> Any:
        found = tirx.Cast("float32", element(stored, t, rest))
        if scales is None:
            return found
        block, head, lane = t // PACK, rest[:2], t % PACK
        if dtype != "int4":
            return found * args[1](block, *head, lane)
        span = rest[2] // group_size(shape[-1]) * 2
        scale, least = (args[1](block, *head, span + i, lane) for i in range(2))
        return found * _float(scale) + _float(least)

    y = te.compute(symbols.shape(shape), value, "y")
    return te.create_prim_func([*args, y]).with_attrs({"apq.op": "unpacked", "op_pattern": 8})


def _float(half: Any) -> Any:
    """What a bfloat16 is, given as uint16."""
    bits = tirx.shift_left(half.astype("uint32"), tirx.const(16, "uint32"))
    return tirx.reinterpret("float32", bits)

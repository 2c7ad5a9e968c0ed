"""Operands of attention and of the packing of its keys, and what they must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import sym, tirx

from apq_tvm.ops.graph.attention import PACK, Attended
from apq_tvm.ops.graph.shapes import substituted
from apq_tvm.schedules.graph.attention.maker import maker_of, shape_at
from apq_tvm.tune.functions.plain import plain_function
from apq_tvm.tune.program import Expected
from apq_tvm.types import Array

ERROR = 1e-5
"""Of a result, against the largest value that it is a mean of: exponentials are approximated, and
sums are float32."""

Shape = tuple[int, ...]


def consistent(func: Any, shapes: Sequence[Shape]) -> tuple[Shape, ...] | None:
    """Shapes with as many blocks of packed keys as there are tokens; None where that cannot be."""
    if str(func.attrs["apq.op"]) == "pack_keys":
        order = [int(p) for p in func.attrs["apq.order"]]
        packed = (-(-shapes[0][order[0]] // PACK), *shapes[1][1:])
        return (shapes[0], packed) if packed[1] == shapes[0][order[1]] else None
    spec, first = Attended.of(func), _keys_at(func)
    q, keys, values, *rest = _with_q(func, shapes)
    tokens, blocks = values[spec.order_values[0]], keys[0]
    if blocks != -(-tokens // PACK) and isinstance(_const(func.params[first].shape[0]), int):
        return None
    keys = (-(-tokens // PACK), *keys[1:])
    logical = [q[p] for p in spec.order]
    same = keys[1] == logical[0] == values[spec.order_values[1]]
    if spec.masked:
        mask = rest[0]
        scores = (*logical[:-1], tokens)[-len(mask) :]
        same = same and all(m in (1, s) for m, s in zip(mask, scores, strict=True))
    out = [(*logical[:-1], values[spec.order_values[-1]])[p] for p in spec.order_out]
    fitting = (*shapes[:first], keys, *shapes[first + 1 :])
    return fitting if same and tuple(out) == tuple(shapes[-1]) else None


def _keys_at(func: Any) -> int:
    """Which argument packed keys are: in front of them is q, or what it is made of."""
    made = maker_of(func)
    return len(made[0].params) - 1 if made else 1


def _with_q(func: Any, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Shapes with that of q in the place of what it is made of."""
    sizes = {
        dim: tirx.const(size, "int64")
        for param, shape in zip(func.params, shapes, strict=True)
        for dim, size in zip(param.shape, shape, strict=True)
        if isinstance(dim, tirx.Var)
    }
    q = [substituted(extent, list(sizes.items())) for extent in shape_at(func, 0)]
    known = tuple(int(sym.Analyzer().simplify(extent)) for extent in q)
    return (known, *shapes[_keys_at(func) :])


def _const(extent: Any) -> Any:
    return getattr(extent, "value", None)


def inputs_of(func: Any, shapes: Sequence[Shape], seed: int) -> list[list[Array]]:
    """Of every argument but the last, its array in each set of inputs.

    Random ones; scores so large that one key has all the weight, and none; rows that see few keys
    or none but the first, and what lies behind the last token is NaN.
    """
    rng = np.random.default_rng(seed)
    dtypes = [str(p.dtype) for p in func.params[:-1]]
    if str(func.attrs["apq.op"]) == "pack_keys":
        return [[(size * rng.standard_normal(shapes[0])).astype(dtypes[0]) for size in (1, 60)]]
    spec, first = Attended.of(func), _keys_at(func)
    of_keys, of_values, *rest = shapes[first:]
    sets = []
    for size, kind in ((1.0, "some"), (20.0, "causal"), (0.0, "all"), (1.0, "first")):
        # Of what makes q the first is as large; products with rotations' cosines stay so.
        arrays = [rng.standard_normal(shape) for shape in shapes[:first]]
        arrays[0] *= size
        values = rng.standard_normal(of_values)
        tokens = of_values[spec.order_values[0]]
        keys = rng.standard_normal((of_keys[0] * PACK, *of_keys[1:-1]))
        keys[tokens:] = np.nan
        packed = keys.reshape(-1, PACK, *of_keys[1:-1]).transpose(0, 2, 3, 4, 1)
        arrays += [packed, values]
        if spec.masked:
            arrays.append(_mask(kind, rest[0], rng))
        if spec.sink:
            arrays.append(rng.standard_normal(shapes[-2]))
        sets.append([np.ascontiguousarray(a, d) for a, d in zip(arrays, dtypes, strict=True)])
    return [list(arrays) for arrays in zip(*sets, strict=True)]


def _mask(kind: str, shape: Shape, rng: np.random.Generator) -> Array:
    """What is added to scores; every row sees its first key."""
    queries, tokens = shape[-2] if len(shape) > 1 else 1, shape[-1]
    if kind == "some":
        return 2 * rng.standard_normal(shape)
    mask = np.zeros(shape)
    at, row = np.arange(tokens), np.arange(queries)[:, None] + max(0, tokens - queries)
    hidden = {"causal": at > row, "all": at < 0, "first": at > 0}[kind]
    low = -np.inf if kind == "causal" else float(np.finfo(np.float32).min)
    return mask + np.where(np.broadcast_to(hidden, (queries, tokens)), low, 0.0).reshape(
        (queries, tokens) if len(shape) > 1 else (tokens,)
    )


def expected_of(func: Any, arrays: Sequence[Array], shape: Shape) -> Expected:
    """What one set of inputs gives."""
    if str(func.attrs["apq.op"]) == "pack_keys":
        return _packed([int(p) for p in func.attrs["apq.order"]], arrays[0], shape)
    spec, first = Attended.of(func), _keys_at(func)
    q = _made(func, arrays[:first])
    packed, values, *rest = (np.asarray(a, np.float64) for a in arrays[first:])
    mask = rest.pop(0) if spec.masked else np.zeros(())
    rows, columns = q.transpose(spec.order), values.transpose(spec.order_values)
    logical = rows.shape[:-1]
    if columns.ndim == 3:
        columns = columns[:, :, None]
    tokens, batch, heads, width = columns.shape
    keys = packed.transpose(0, 4, 1, 2, 3).reshape(-1, batch, heads, packed.shape[3])[:tokens]
    grouped = rows.reshape(batch, heads, spec.group, -1, rows.shape[-1])
    scores = np.einsum("bngsd,tbnd->bngst", grouped, keys) * (spec.scale or 1.0)
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    with np.errstate(over="ignore"):
        scores = scores.reshape(*logical, tokens) + mask
    scores = scores.reshape(batch, heads, spec.group, -1, tokens)
    most = scores.max(-1, keepdims=True)
    if spec.sink:
        sink = rest[0].reshape(1, heads, spec.group, 1, 1)
        most = np.maximum(most, sink)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    total = total + np.exp(sink - most) if spec.sink else total
    y = np.einsum("bngst,tbnw->bngsw", weights / total, columns).reshape(*logical, width)
    y = y.transpose(spec.order_out).reshape(-1, shape[-1])
    reach = float(np.abs(values).max())
    return Expected(y.astype(np.float32), np.full(len(y), ERROR * reach, np.float32))


def _made(func: Any, arrays: Sequence[Array]) -> Array:
    """q, which is given, or made by the plain function."""
    made = maker_of(func)
    if made is None:
        return np.asarray(arrays[0], np.float64)
    shapes = [a.shape for a in arrays]
    rest = [tuple(1 for _ in param.shape) for param in func.params[len(arrays) :]]
    q = np.zeros(_with_q(func, (*shapes, *rest))[0], np.float32)
    plain_function(made[0])([np.ascontiguousarray(a, np.float32) for a in arrays], q)
    return q.astype(np.float64)


def _packed(order: Sequence[int], keys: Array, shape: Shape) -> Expected:
    """Exactly the keys, 16 tokens side by side; 0 behind the last."""
    rows = keys.astype(np.float32).transpose(order)
    if rows.ndim == 3:
        rows = rows[:, :, None]
    whole = np.zeros((shape[0] * PACK, *rows.shape[1:]), np.float32)
    whole[: len(rows)] = rows
    want = whole.reshape(-1, PACK, *rows.shape[1:]).transpose(0, 2, 3, 4, 1).reshape(-1, PACK)
    return Expected(np.ascontiguousarray(want), np.full(len(want), 1e-30, np.float32))

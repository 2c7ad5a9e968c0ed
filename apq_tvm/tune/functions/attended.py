"""Operands of attention and of the packing of its keys, and what they must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from apq_tvm.ops.graph.attention import PACK, Attended
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
    spec = Attended.of(func)
    tokens, blocks = shapes[2][spec.order_values[0]], shapes[1][0]
    if blocks != -(-tokens // PACK) and isinstance(_const(func.params[1].shape[0]), int):
        return None
    made = [*shapes]
    made[1] = (-(-tokens // PACK), *shapes[1][1:])
    logical = [shapes[0][p] for p in spec.order]
    same = made[1][1] == logical[0] == shapes[2][spec.order_values[1]]
    if spec.masked:
        mask = shapes[3]
        scores = (*logical[:-1], tokens)[-len(mask) :]
        same = same and all(m in (1, s) for m, s in zip(mask, scores, strict=True))
    out = [(*logical[:-1], shapes[2][spec.order_values[-1]])[p] for p in spec.order_out]
    return tuple(made) if same and tuple(out) == tuple(shapes[-1]) else None


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
    spec = Attended.of(func)
    sets = []
    for size, kind in ((1.0, "some"), (20.0, "causal"), (0.0, "all"), (1.0, "first")):
        q = size * rng.standard_normal(shapes[0])
        values = rng.standard_normal(shapes[2])
        tokens = shapes[2][spec.order_values[0]]
        keys = rng.standard_normal((shapes[1][0] * PACK, *shapes[1][1:-1]))
        keys[tokens:] = np.nan
        packed = keys.reshape(-1, PACK, *shapes[1][1:-1]).transpose(0, 2, 3, 4, 1)
        arrays = [q, packed, values]
        if spec.masked:
            arrays.append(_mask(kind, shapes[3], rng))
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
    spec = Attended.of(func)
    q, packed, values = (np.asarray(a, np.float64) for a in arrays[:3])
    rest = [np.asarray(a, np.float64) for a in arrays[3:]]
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


def _packed(order: Sequence[int], keys: Array, shape: Shape) -> Expected:
    """Exactly the keys, 16 tokens side by side; 0 behind the last."""
    rows = keys.astype(np.float32).transpose(order)
    if rows.ndim == 3:
        rows = rows[:, :, None]
    whole = np.zeros((shape[0] * PACK, *rows.shape[1:]), np.float32)
    whole[: len(rows)] = rows
    want = whole.reshape(-1, PACK, *rows.shape[1:]).transpose(0, 2, 3, 4, 1).reshape(-1, PACK)
    return Expected(np.ascontiguousarray(want), np.full(len(want), 1e-30, np.float32))

"""softmax(q kᵀ scale + mask) v of heads that share keys, as one kernel of a processor.

Keys are packed, 16 tokens side by side, so that the scores of 16 keys are one number of q times a
vector, without sums across lanes. Keys and values have tokens as their first axis: where they are a
cache it grows at its end. A function here says what is computed of what; how, is up to
`apq_tvm.schedules.graph.attention.tasks`, which knows the device's registers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.formats.caches import CODED, WIDEST, group_size
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.ops.graph.softmax import broadcast_index
from apq_tvm.tensorize.exprs import PrimFunc, i32, i64

PACK = 16
"""Tokens side by side in packed keys."""

FOURS = 4
"""Columns of a token side by side in packed keys of int8, as products of bytes take them."""


@dataclass(frozen=True)
class Attended:
    """What a function of `attention` computes, for its schedule.

    Parameters
    ----------
    order, order_out, order_values : tuple of int
        See `attention`.
    group : int
        Rows of heads of q that share keys.
    scale, softcap : float
    zero_masked, masked, sink : bool
        Of the function's arguments; the last two whether they are there.
    coded : bool
        Whether keys and values are codes, and their scales arguments.
    nibbles : bool
        Whether these are of int4, two of them a byte.
    """

    order: tuple[int, ...]
    order_out: tuple[int, ...]
    order_values: tuple[int, ...]
    group: int
    scale: float
    softcap: float
    zero_masked: bool
    masked: bool
    sink: bool
    coded: bool = False
    nibbles: bool = False

    def told(self) -> dict[str, Any]:
        """What the attribute says; of floats the same as ever."""
        fields = asdict(self)
        for name in ("coded", "nibbles"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def of(cls, func: PrimFunc) -> Attended:
        """That of a function."""
        found: dict[str, Any] = json.loads(str(func.attrs["apq.attention"]))
        lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
        return cls(**{**found, **lists})


def attention(
    q: Sequence[Dim],
    keys: Sequence[Dim],
    values: Sequence[Dim],
    mask: Sequence[Dim] | None = None,
    *,
    order: Sequence[int],
    order_out: Sequence[int],
    order_values: Sequence[int] = (0, 1, 2, 3),
    scale: float = 1.0,
    softcap: float = 0.0,
    zero_masked: bool = False,
    sink: bool = False,
    dtype: str = "float32",
    scales: Sequence[Sequence[Dim]] = (),
) -> PrimFunc:
    """Declare ``(q, keys, values, [key scales, value scales], [mask], [sink], y)``.

    Streaming softmax after Milakov and Gimelshein, arXiv:1805.02867, in blocks of keys as Dao et
    al., "FlashAttention", arXiv:2205.14135; grouped heads of Ainslie et al., arXiv:2305.13245.

    Parameters
    ----------
    q : sequence of int or str
        Shape as stored, float32; strings are dynamic dimensions.
    keys : sequence of int or str
        ``[ceil(T / 16), B, Nkv, H, 16]`` of `dtype`; lanes past T hold anything. Of int8 and int4
        as `apq_tvm.ops.graph.caches.coded.coded_shapes` has them.
    values : sequence of int or str
        As stored, of `dtype`, of int4 as there; no value past T is read.
    mask : sequence of int or str, optional
        float32; added to scores, broadcasts to the logical ``[*batch, S, T]`` of q.
    order : sequence of int
        As ONNX Transpose, from q to its logical axes: ``[B, N, S, H]`` with N a multiple of Nkv,
        ``[B, Nkv, G, S, H]``, or ``[B, S, H]`` where Nkv is 1.
    order_out : sequence of int
        From the same axes with Hv for H to y, whose last axis is Hv.
    order_values : sequence of int
        From values to ``[T, B, Nkv, Hv]``, or ``[T, B, Hv]`` where Nkv is 1; Hv is their last axis.
    scale, softcap : float
        Scores are ``softcap * tanh(q k * scale / softcap)``; 0 is no softcap.
    zero_masked, sink : bool
        A row whose scores are all -inf is 0 instead of NaN; there is float32 [N], a score per head
        that has no value (arXiv:2309.17453).
    dtype : {"float32", "float16", "int8", "int4"}
        Of keys and values.
    scales : two sequences of int or str
        Shapes of what scales keys and values that are codes, as there.

    Returns
    -------
    tvm.tirx.PrimFunc
        A declaration, attr ``apq.op`` = "attention".

    Raises
    ------
    NotApplicable
        Dimensions that do not match or are dynamic where they must not be.
    """
    logical = [q[p] for p in order]
    spread = [values[p] for p in order_values]
    nibbles = dtype == "int4"
    if nibbles:
        spread[-1] *= 2
    _check_scales(keys, scales, dtype, (logical[-1], spread[-1]))
    group, width = _group(logical, keys, spread, dtype), spread[-1]
    result = [*logical[:-1], width]
    if order_out[-1] != len(result) - 1 or order_values[-1] != len(values) - 1:
        raise NotApplicable("columns of values are not the last axis of values and result")
    if mask is not None:
        _check_mask((*logical[:-1], spread[0]), mask)
    orders = (tuple(order), tuple(order_out), tuple(order_values))
    there = (mask is not None, sink)
    spec = Attended(*orders, group, scale, softcap, zero_masked, *there, dtype in CODED, nibbles)
    operands = _operands(q, (keys, values), scales, mask, dtype)
    if sink:
        operands["sink"] = ((int(keys[2]) * group,), "float32")
    operands["y"] = ([result[p] for p in order_out], "float32")
    return _declared(operands, spec, _work(int(logical[-1]), width, order_values))


def _operands(
    q: Sequence[Dim],
    kept: Sequence[Sequence[Dim]],
    scales: Sequence[Sequence[Dim]],
    mask: Sequence[Dim] | None,
    dtype: str,
) -> dict[str, tuple[Sequence[Dim], str]]:
    """By name: shapes and types of q, of what caches hold and of a mask."""
    lies, scaled = CODED.get(dtype, (dtype, ""))
    found = {"q": (q, "float32"), "keys": (kept[0], lies), "values": (kept[1], lies)}
    named = zip(("key_scales", "value_scales"), scales, strict=False)
    found |= {name: (shape, scaled) for name, shape in named}
    return found if mask is None else {**found, "mask": (mask, "float32")}


def _declared(
    operands: Mapping[str, tuple[Sequence[Dim], str]], spec: Attended, work: Mapping[str, Any]
) -> PrimFunc:
    symbols = Symbols()
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("attention")
        for name, (shape, dtype) in operands.items():
            argument(name, symbols.shape(shape), dtype)
        b.func_attr({"apq.op": "attention", "op_pattern": 8, "tirx.noalias": True})
        b.func_attr({"apq.attention": json.dumps(spec.told())})
        b.func_attr(dict(work))
        b.evaluate(i32(0))
    return builder.get()


def _check_scales(
    keys: Sequence[Dim], scales: Sequence[Sequence[Dim]], dtype: str, columns: Sequence[Dim]
) -> None:
    """What scales keys and values, of `columns`, is as many as they are."""
    if (dtype in CODED) != (len(scales) == 2):
        raise NotApplicable(f"keys of {dtype} with {len(scales)} scales")
    for shape, each in zip(scales, columns, strict=False):
        groups = (2 * int(each) // group_size(each),) if dtype == "int4" else ()
        if tuple(shape[1:]) != (*keys[1:3], *groups, PACK):
            raise NotApplicable(f"scales {tuple(shape)} and keys {tuple(keys)} do not match")


def _work(size: int, width: Dim, order_values: Sequence[int]) -> dict[str, Any]:
    """Of an element of y and a key: a product, its share of the score's; twice as fast as others.

    An axis counts the keys: an expression would make every layer's function another.
    """
    each = max(1, (size + int(width)) // int(width))
    return {"apq.work": each, "apq.work_along": [2, int(order_values[0])]}


def _check_mask(scores: Sequence[Dim], mask: Sequence[Dim]) -> None:
    """A mask broadcasts to the scores, and has a column for every key."""
    broadcast_index(scores, mask, [i64(0)] * len(scores))
    if not mask or mask[-1] != scores[-1]:
        raise NotApplicable(f"mask {tuple(mask)} has no column for each key")


def _group(logical: Sequence[Dim], keys: Sequence[Dim], values: Sequence[Dim], dtype: str) -> int:
    """Heads of q that share a head of keys, where everything matches."""
    beside = FOURS if dtype in CODED else 1
    together = 2 * beside if dtype == "int4" else beside  # columns in an element of keys' 4th axis
    if len(keys) != 5 or keys[4] != PACK * beside or len(values) not in (3, 4):
        raise NotApplicable(f"keys {tuple(keys)} and values {tuple(values)} are not packed")
    _, batch, heads, size, _ = keys
    if together > 1 and isinstance(logical[-1], int) and -(-logical[-1] // together) == size:
        size = logical[-1]
    wide = tuple(values) if len(values) == 4 else (*values[:2], 1, values[2])
    if not isinstance(heads, int) or wide[1:3] != (batch, heads):
        raise NotApplicable(f"keys {tuple(keys)} and values {wide} do not match")
    for columns in (size, wide[3]):
        if not isinstance(columns, int) or columns > WIDEST:
            raise NotApplicable(f"heads of {columns} columns: wanted at most {WIDEST}")
    if logical[0] != batch or logical[-1] != size:
        raise NotApplicable(f"q {tuple(logical)} and keys {tuple(keys)} do not match")
    if int(wide[3]) % 4:
        raise NotApplicable(f"heads of {wide[3]} columns: wanted fours")
    shared = logical[1:-2] if len(logical) > 3 else (1,)
    if not all(isinstance(d, int) for d in shared):
        raise NotApplicable(f"q {tuple(logical)} has heads of a number that only a run knows")
    count = 1
    for extent in shared:
        count *= int(extent)
    if count % heads or (len(shared) == 2 and shared[0] != heads) or len(shared) > 2:
        raise NotApplicable(f"{shared} heads of q do not share {heads} heads of keys")
    return count // heads

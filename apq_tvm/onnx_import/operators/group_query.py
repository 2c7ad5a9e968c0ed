"""``com.microsoft.GroupQueryAttention``: grouped heads, rotary positions and a cache that grows.

The operator's positions depend on data: ``seqlens_k[b] + 1`` keys of sequence b are valid once this
step's are appended, so its queries stand at ``past[b] .. past[b] + S - 1`` with ``past[b] =
max(seqlens_k[b] + 1 - S, 0)``; in a first prompt that is padded on the right it is 0. Keys go where
they stand (``apq.AppendCache``), and a query reads the keys up to itself.

How long ``present`` is, ONNX Runtime decides at run time: ``max(P, total_sequence_length)``. Here
it must be a function of the input shapes: the total where it is a dimension of an input (exporters
take it from the attention mask), else P where the file gives the output the past's length (a buffer
for both), else P + S.
"""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.attend import Heads, added, additive, attend, outside
from apq_tvm.onnx_import.operators.rotary import rotate, table_rows
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, Expr, as_attr, maximum
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node

QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, SEQLENS, TOTAL, COS, SIN = range(9)
POSITIONS, BIAS, SINK, K_SCALE, V_SCALE, Q_NORM, K_NORM = range(9, 16)


def group_query_attention(graph: Graph, node: Node) -> list[Node]:
    """GroupQueryAttention as products, softmax and ``apq.AppendCache``.

    Raises
    ------
    UnsupportedModel
        Quantized caches, caches of a window, output of the scores; shapes that do not fit.
    """
    steps = Steps(graph, node)
    _check(steps)
    heads = Heads(int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"]))
    if heads.kv < 1 or heads.count % heads.kv:
        raise steps.refuse(f"kv_num_heads={heads.kv} does not divide num_heads={heads.count}")
    q, k, v = _split(steps, heads)
    batch, length, _, size = steps.shape(q, 4)
    past = _past(steps, length)
    rows = steps("Add", steps.reshape(past, batch, 1), steps.range(length))
    q, k = _normalised(steps, q, k)
    if node.attrs.get("do_rotary", 0):
        ids = steps.input(POSITIONS) or rows
        cos, sin = (table_rows(steps, steps.input(i), ids) for i in (COS, SIN))
        interleaved = bool(node.attrs.get("rotary_interleaved", 0))
        q, k = (rotate(steps, x, cos, sin, interleaved) for x in (q, k))
    total = _total(steps, length)
    keys = _append(steps, steps.input(PAST_KEY), k, past, total)
    values = _append(steps, steps.input(PAST_VALUE), v, past, total)
    mask = _mask(steps, past, rows, batch, length, total)
    sink = steps.input(SINK)
    if not sink and node.attrs.get("smooth_softmax", -1) == 1:
        sink = steps.constant(np.zeros(heads.count, np.float32))
    scale = float(node.attrs.get("scale", 0.0)) or 1 / sqrt(steps.size(size, "head size"))
    softcap = float(node.attrs.get("softcap", 0.0))
    found = attend(steps, q, keys, values, heads, scale, mask, softcap, sink)
    return steps.done(found.output, keys, values)


def _check(steps: Steps) -> None:
    """Refuse what has no meaning here."""
    attrs = steps.node.attrs
    for key in ("k_quant_type", "v_quant_type"):
        if attrs.get(key, "NONE") != "NONE":
            raise steps.refuse(f"a quantized cache ({key}={attrs[key]}) cannot be compiled")
    if steps.input(K_SCALE) or steps.input(V_SCALE) or attrs.get("kv_cache_bit_width", 0):
        raise steps.refuse("a quantized cache (k_scale, v_scale) cannot be compiled")
    if attrs.get("sliding_window_cache", 0):
        raise steps.refuse(
            "a cache that drops old keys by itself (sliding_window_cache) cannot be compiled; "
            "local_window_size with a whole cache can"
        )
    if steps.wants(3) or attrs.get("qk_output", 0):
        raise steps.refuse("its output of scores (qk_output) cannot be compiled")
    for key in ("num_heads", "kv_num_heads"):
        if not isinstance(attrs.get(key), int) or attrs[key] < 1:
            raise steps.refuse(f"its attribute {key} is {attrs.get(key)!r}, but must be positive")
    if not steps.input(SEQLENS):
        raise steps.refuse("its input seqlens_k is missing")
    if bool(steps.input(PAST_KEY)) != bool(steps.input(PAST_VALUE)):
        raise steps.refuse("it has one of past_key and past_value, but needs both or none")
    if attrs.get("do_rotary", 0) and not (steps.input(COS) and steps.input(SIN)):
        raise steps.refuse("do_rotary needs cos_cache and sin_cache")


def _split(steps: Steps, heads: Heads) -> tuple[str, str, str]:
    """Queries, keys and values [B, S, heads, H], from three inputs or a packed one."""
    query = steps.input(QUERY)
    batch, length, hidden = steps.shape(query, 3)
    width = steps.size(hidden, "hidden size")
    count = heads.count if steps.input(KEY) else heads.count + 2 * heads.kv
    if width % count:
        raise steps.refuse(f"its {count} heads do not divide the hidden size {width}")
    q = steps.reshape(query, batch, length, count, width // count)
    if steps.input(KEY):
        return q, _kv(steps, steps.input(KEY), heads), _kv(steps, steps.input(VALUE), heads)
    ends = (0, heads.count, heads.count + heads.kv, count)
    first, second, third = (steps.slice(q, 2, a, b) for a, b in pairwise(ends))
    return first, second, third


def _kv(steps: Steps, value: str, heads: Heads) -> str:
    batch, length, hidden = steps.shape(value, 3)
    width = steps.size(hidden, "hidden size of keys")
    if width % heads.kv:
        raise steps.refuse(f"its {heads.kv} key heads do not divide the hidden size {width}")
    return steps.reshape(value, batch, length, heads.kv, width // heads.kv)


def _past(steps: Steps, length: Dim) -> str:
    """How many keys of each sequence precede this step's: int64 [B]."""
    seqlens = steps.input(SEQLENS)
    if len(steps.shape(seqlens, 1, 2)) == 2:
        seqlens = steps.reshape(seqlens, steps.shape(seqlens)[0])
    known = steps("Add", steps("Cast", seqlens, to=7), steps.number(1, "int64"))
    before = steps("Sub", known, steps.dim(length))
    return steps("Max", before, steps.number(0, "int64"))


def _normalised(steps: Steps, q: str, k: str) -> tuple[str, str]:
    """RMS normalisation of each head, if it has weights."""
    weights = (steps.input(Q_NORM), steps.input(K_NORM))
    if not any(weights):
        return q, k
    if not all(weights):
        raise steps.refuse("it has one of q_norm_weight and k_norm_weight, but needs both or none")
    epsilon = float(steps.node.attrs.get("qk_norm_epsilon", 1e-6))
    pairs = zip((q, k), weights, strict=True)
    first, second = (steps("RMSNormalization", x, w, axis=-1, epsilon=epsilon) for x, w in pairs)
    return first, second


def _total(steps: Steps, length: Dim) -> Dim:
    """Length of ``present``; see the head of this file."""
    graph, past_key = steps.graph, steps.input(PAST_KEY)
    past: Dim = steps.shape(past_key, 4)[2] if past_key else 0
    total = elements(contents(graph, steps.input(TOTAL))) if steps.input(TOTAL) else None
    declared = _declared(steps)
    if total is not None:
        if declared == total[0] or not past_key:
            return total[0]
        return maximum(past, total[0])
    if declared is not None and declared == past:
        return past
    return past + length


def _declared(steps: Steps) -> Dim | None:
    """The length that the file gives ``present_key``, if that is an output of the graph."""
    for spec in steps.graph.outputs:
        if steps.wants(1) and spec.name == steps.node.outputs[1] and len(spec.shape) == 4:
            dim = spec.shape[2]
            return steps.graph.input_dim(dim) if isinstance(dim, str) else dim
    return None


def _append(steps: Steps, past: str, new: str, start: str, total: Dim) -> str:
    """The cache [B, Nkv, total, H] with the new keys or values at `start`."""
    batch, length, heads, size = steps.shape(new, 4)
    if not past and total == length:
        return steps.transpose(new, 0, 2, 1, 3)
    shape = tuple(as_attr(d) for d in (batch, heads, total, size))
    return steps("apq.AppendCache", past, new, start, shape=shape, dtype="float32")


def _mask(steps: Steps, past: str, rows: str, batch: Dim, length: Dim, total: Dim) -> str:
    """What is added to the scores, of four dimensions."""
    attrs, keys = steps.node.attrs, steps.range(total)
    window = int(attrs.get("local_window_size", -1))
    if attrs.get("causal", 1):
        queries = steps.reshape(rows, batch, 1, length, 1)
        hidden = outside(steps, queries, keys, window - 1 if window > 0 else -1)
    else:
        # Past the end of each sequence; `past` counts from this step's first token.
        end = steps("Add", steps.reshape(past, batch, 1, 1, 1), steps.dim(length - 1))
        hidden = outside(steps, end, keys)
    bias = steps.input(BIAS)
    if bias and len(steps.shape(bias, 4)) == 4 and not isinstance(total, Expr):
        width = steps.shape(bias)[3]
        if isinstance(width, int) and width != total:
            raise steps.refuse(f"attention_bias has {width} columns for {total} keys")
    return added(steps, additive(steps, hidden), bias)

"""``Attention`` of ONNX opsets 23 to 25 (ONNX operator specification)."""

from __future__ import annotations

from math import sqrt

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.attend import Heads, added, additive, attend, outside
from apq_tvm.onnx_import.operators.rotary import split_heads
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node

Q, K, V, MASK, PAST_KEY, PAST_VALUE, LENGTHS = range(7)


def onnx_attention(graph: Graph, node: Node) -> list[Node]:
    """Attention as products and softmax. Rows that are masked altogether give 0.

    Raises
    ------
    UnsupportedModel
        Shapes that do not fit, masks that are shorter than the keys by an unknown number.
    """
    steps = Steps(graph, node)
    attrs = node.attrs
    q, four = split_heads(steps, steps.input(Q), int(attrs.get("q_num_heads", 0)))
    kv_heads = int(attrs.get("kv_num_heads", 0))
    k, v = (_keys(steps, steps.input(i), kv_heads) for i in (K, V))
    if bool(steps.input(PAST_KEY)) != bool(steps.input(PAST_VALUE)):
        raise steps.refuse("it has one of past_key and past_value, but needs both or none")
    batch, length, count, size = steps.shape(q, 4)
    offset: Dim = 0
    if steps.input(PAST_KEY):
        offset = steps.shape(steps.input(PAST_KEY), 4)[2]
        k = steps("Concat", steps.input(PAST_KEY), k, axis=2)
        v = steps("Concat", steps.input(PAST_VALUE), v, axis=2)
    heads = Heads(*(steps.size(n, "number of heads") for n in (count, steps.shape(k, 4)[1])))
    if heads.count % heads.kv:
        raise steps.refuse(f"{heads.kv} key heads do not divide {heads.count} query heads")
    total = steps.shape(k, 4)[2]
    scale = float(attrs.get("scale", 0.0)) or 1 / sqrt(steps.size(size, "head size"))
    rows = _rows(steps, batch, length, offset)
    mask = added(
        steps,
        _given_mask(steps, total),
        _position_mask(steps, rows, total),
        _length_mask(steps, batch, total),
    )
    softcap = float(attrs.get("softcap", 0.0))
    found = attend(steps, q, k, v, heads, scale, mask, softcap, zero_masked=True)
    y = found.output
    if four:
        width = steps.shape(v, 4)[3]
        y = steps.transpose(steps.reshape(y, batch, length, heads.count, width), 0, 2, 1, 3)
    stages = (found.scores, found.capped, found.masked, found.probabilities)
    return steps.done(y, k, v, stages[int(attrs.get("qk_matmul_output_mode", 0))])


def _keys(steps: Steps, x: str, heads: int) -> str:
    """Keys or values as [B, N, L, H]."""
    if len(steps.shape(x, 3, 4)) == 4:
        return x
    return steps.transpose(split_heads(steps, x, heads)[0], 0, 2, 1, 3)


def _rows(steps: Steps, batch: Dim, length: Dim, offset: Dim) -> str:
    """Positions of the queries among the keys: int64 [1 or B, 1, S, 1]."""
    lengths, rows = steps.input(LENGTHS), steps.range(length)
    if not lengths:
        return steps.reshape(steps("Add", rows, steps.dim(offset)), 1, 1, length, 1)
    first = steps("Sub", steps.reshape(lengths, batch, 1), steps.dim(length))
    return steps.reshape(steps("Add", first, rows), batch, 1, length, 1)


def _position_mask(steps: Steps, rows: str, total: Dim) -> str:
    """-inf for keys after their query, or outside its window."""
    attrs = steps.node.attrs
    left, right = (int(attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    if attrs.get("is_causal", 0):
        right = 0
    hidden = outside(steps, rows, steps.range(total), left, right)
    return additive(steps, hidden) if hidden else ""


def _length_mask(steps: Steps, batch: Dim, total: Dim) -> str:
    """-inf for keys past the end of their sequence (``nonpad_kv_seqlen``)."""
    lengths = steps.input(LENGTHS)
    if not lengths:
        return ""
    last = steps("Sub", steps.reshape(lengths, batch, 1, 1, 1), steps.number(1, "int64"))
    return additive(steps, outside(steps, last, steps.range(total)))


def _given_mask(steps: Steps, total: Dim) -> str:
    """``attn_mask`` as numbers of four dimensions, with -inf for the keys it does not reach."""
    mask = steps.input(MASK)
    if not mask:
        return ""
    shape = steps.shape(mask, 1, 2, 3, 4)
    if steps.graph.dtype(mask) == "bool":
        mask = steps("Where", mask, steps.number(0.0), steps.number(float("-inf")))
    if len(shape) < 4:
        shape = ((1,) * (4 - len(shape)) + shape)[-4:]
        mask = steps.reshape(mask, *shape)
    missing = total - shape[3]
    if isinstance(missing, int) and missing > 0 and shape[3] != 1:
        tail = steps.expand(steps.number(float("-inf")), *shape[:3], missing)
        return steps("Concat", mask, tail, axis=3)
    if isinstance(missing, int) and missing < 0 and not same_shape((shape[3],), (total,)):
        raise steps.refuse(f"its mask has {shape[3]} columns for {total} keys")
    return mask

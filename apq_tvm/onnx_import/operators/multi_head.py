"""``com.microsoft.MultiHeadAttention`` in the forms that ONNX Runtime computes on CPUs."""

from __future__ import annotations

from math import sqrt

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.attend import Heads, added, additive, attend, outside
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.types import Node

QUERY, KEY, VALUE, QKV_BIAS, PADDING, BIAS, PAST_KEY, PAST_VALUE, PAST_LENGTH, BEAMS = range(10)


def multi_head_attention(graph: Graph, node: Node) -> list[Node]:
    """MultiHeadAttention as biases, products and softmax.

    Keys and values come as [B, L, N * H], or as [B, N, L, H] where a cross attention kept them.

    Raises
    ------
    UnsupportedModel
        Packed projections, buffers shared between past and present, beams; masks of other shapes.
    """
    steps = Steps(graph, node)
    count = int(node.attrs.get("num_heads", 0))
    if count < 1:
        raise steps.refuse(f"its attribute num_heads is {count}, but must be positive")
    _check(steps)
    cached = len(steps.shape(steps.input(KEY), 3, 4)) == 4
    inputs = [steps.input(i) for i in (QUERY, KEY, VALUE)]
    q, k, v = inputs if cached else _biased(steps, inputs)
    q = split_heads(steps, q, count)
    if not cached:
        k, v = (steps.transpose(split_heads(steps, x, count), 0, 2, 1, 3) for x in (k, v))
    offset: Dim = 0
    if steps.input(PAST_KEY):
        offset = steps.shape(steps.input(PAST_KEY), 4)[2]
        k = steps("Concat", steps.input(PAST_KEY), k, axis=2)
        v = steps("Concat", steps.input(PAST_VALUE), v, axis=2)
    batch, length, _, size = steps.shape(q, 4)
    total = steps.shape(k, 4)[2]
    scale = float(node.attrs.get("scale", 0.0)) or 1 / sqrt(steps.size(size, "head size"))
    mask = added(
        steps,
        padding(steps, steps.input(PADDING), batch, total),
        causal(steps, length, total, offset),
        steps.input(BIAS),
    )
    found = attend(steps, q, k, v, Heads(count, count), scale, mask)
    return steps.done(found.output, k, v, found.probabilities)


def _check(steps: Steps) -> None:
    if not steps.input(KEY) or not steps.input(VALUE):
        raise steps.refuse(
            "queries, keys and values in one tensor cannot be compiled (nor does ONNX Runtime "
            "compute them on CPUs); split them in the model"
        )
    if steps.input(PAST_LENGTH) or steps.input(BEAMS):
        raise steps.refuse(
            "a past that shares its buffer with the present (past_sequence_length, "
            "cache_indirection) cannot be compiled"
        )
    if bool(steps.input(PAST_KEY)) != bool(steps.input(PAST_VALUE)):
        raise steps.refuse("it has one of past_key and past_value, but needs both or none")


def _biased(steps: Steps, inputs: list[str]) -> list[str]:
    """Queries, keys and values with their part of the bias [D + D + Dv]."""
    bias = steps.input(QKV_BIAS)
    if not bias:
        return inputs
    sizes = [steps.size(steps.shape(x, 3)[2], "hidden size") for x in inputs]
    (width,) = steps.shape(bias, 1)
    if width != sum(sizes):
        raise steps.refuse(f"its bias has {width} entries for {' + '.join(map(str, sizes))}")
    start, result = 0, []
    for x, size in zip(inputs, sizes, strict=True):
        result.append(steps("Add", x, steps.slice(bias, 0, start, start + size)))
        start += size
    return result


def split_heads(steps: Steps, x: str, count: int) -> str:
    """``[B, S, N * H]`` as ``[B, S, N, H]``."""
    batch, length, hidden = steps.shape(x, 3)
    width = steps.size(hidden, "hidden size")
    if width % count:
        raise steps.refuse(f"num_heads={count} does not divide the hidden size {width}")
    return steps.reshape(x, batch, length, count, width // count)


def padding(steps: Steps, mask: str, batch: Dim, total: Dim) -> str:
    """``mask_filter_value`` where the padding mask forbids a key: [B, 1, 1 or S, T]."""
    if not mask:
        return ""
    low = float(steps.node.attrs.get("mask_filter_value", -10000.0))
    shape = steps.shape(mask, 1, 2, 3)
    zero = steps.number(0, steps.graph.dtype(mask) or "int32")
    if len(shape) == 1:
        if shape[0] != batch:
            raise steps.refuse(
                f"its mask {steps.graph.describe(mask)} holds starts and ends (3 * batch + "
                "2 numbers); only lengths, one per sequence, and masks can be compiled"
            )
        last = steps("Sub", steps("Cast", mask, to=7), steps.number(1, "int64"))
        past_end = outside(steps, steps.reshape(last, batch, 1, 1, 1), steps.range(total))
        return additive(steps, past_end, low)
    allowed = steps("Greater", mask, zero)
    value = steps("Where", allowed, steps.number(0.0), steps.number(low))
    middle = (1, 1) if len(shape) == 2 else (1, shape[1])
    return steps.reshape(value, shape[0], *middle, shape[-1])


def causal(steps: Steps, length: Dim, total: Dim, offset: Dim) -> str:
    """-inf where a key comes after its query, if the operator is unidirectional."""
    if not steps.node.attrs.get("unidirectional", 0):
        return ""
    rows = steps("Add", steps.range(length), steps.dim(offset))
    hidden = outside(steps, steps.reshape(rows, 1, 1, length, 1), steps.range(total))
    return additive(steps, hidden)

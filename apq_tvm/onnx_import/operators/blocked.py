"""``QuantizeLinear`` and ``DequantizeLinear`` with a scale per block of values (ONNX opset 21).

Weights keep their codes (`apq_tvm.onnx_import.integers.codes`); this is of what a run computes.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph, np_dtype, type_number
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

CODES = ("int8", "uint8", "int16", "uint16")
"""What values are rounded to here."""


def quantize(graph: Graph, node: Node) -> list[Node] | None:
    """``QuantizeLinear``: ``clip(round(x / scale) + zero)``; None where it has no blocks.

    Raises
    ------
    UnsupportedModel
        The codes are of other types than `CODES`, or of an axis whose size only a run knows.
    """
    if not node.attrs.get("block_size", 0):
        return None
    steps = Steps(graph, node)
    zero = steps.input(2)
    kind = str(graph.dtype(zero)) if zero else np_dtype(node.attrs.get("output_dtype", 0) or 2)
    if kind not in CODES:
        raise steps.refuse(
            f"blocks of a run's values are rounded to {', '.join(CODES)}, not to {kind}"
        )
    x, scale = node.inputs[:2]
    real = str(graph.dtype(scale))
    wide = steps("Round", steps("Div", x, _spread(steps, scale, x)))
    if zero:
        wide = steps("Add", wide, _spread(steps, steps("Cast", zero, to=type_number(real)), x))
    ends = np.iinfo(kind)
    above = steps("Max", wide, steps.number(ends.min, real))  # what NaN becomes in ONNX Runtime
    wide = steps("Min", above, steps.number(ends.max, real))
    return steps.done(steps("Cast", wide, to=type_number(kind)))


def dequantize(graph: Graph, node: Node) -> list[Node] | None:
    """``DequantizeLinear`` of codes that a run makes; None of others, or where it has no blocks.

    Raises
    ------
    UnsupportedModel
        Blocks lie along an axis whose size only a run knows.
    """
    if not node.attrs.get("block_size", 0) or node.inputs[0] in graph.weights:
        return None
    steps = Steps(graph, node)
    x, scale = node.inputs[:2]
    real = type_number(str(graph.dtype(scale)))
    value = steps("Cast", x, to=real)
    if steps.input(2):
        value = steps("Sub", value, _spread(steps, steps("Cast", steps.input(2), to=real), x))
    return steps.done(steps("Mul", value, _spread(steps, scale, x)))


def _spread(steps: Steps, blocks: str, x: str) -> str:
    """A number per block of `x` as one per value."""
    size, sizes = int(steps.node.attrs["block_size"]), steps.shape(x)
    axis = int(steps.node.attrs.get("axis", 1)) % len(sizes)
    extent = steps.size(sizes[axis], "quantized axis")
    have = steps.shape(blocks, len(sizes))
    count = -(-extent // size)
    if size < 1 or have[axis] != count:
        raise ValueError(f"{extent} values in blocks of {size} have {have[axis]} scales")
    head, tail = have[:axis], have[axis + 1 :]
    wide = steps.expand(steps.reshape(blocks, *head, count, 1, *tail), *head, count, size, *tail)
    wide = steps.reshape(wide, *head, count * size, *tail)
    return wide if count * size == extent else steps.slice(wide, axis, 0, extent)

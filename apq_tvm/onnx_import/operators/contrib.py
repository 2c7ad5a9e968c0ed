"""Small operators of ONNX Runtime's own (its ContribOperators.md), in ONNX's."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.fused import fused_matmul
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node


def cdist(graph: Graph, node: Node) -> list[Node]:
    """``CDist``: distances of the rows of two matrices, as scikit-learn's converters write them.

    Raises
    ------
    UnsupportedModel
        Another metric than ``euclidean`` and ``sqeuclidean``.
    """
    steps, metric = Steps(graph, node), str(node.attrs.get("metric", "sqeuclidean"))
    if metric not in ("euclidean", "sqeuclidean"):
        raise steps.refuse(f"its metric {metric!r} is neither euclidean nor sqeuclidean")
    a, b = (steps.unsqueeze(value, axis) for value, axis in zip(node.inputs, (1, 0), strict=True))
    apart = steps("Sub", a, b)
    squares = reduced(steps, "ReduceSum", steps("Mul", apart, apart), (2,), keep=False)
    return steps.done(steps("Sqrt", squares) if metric == "euclidean" else squares)


def expand_dims(graph: Graph, node: Node) -> list[Node] | None:
    """``ExpandDims``: a new axis, which is a constant."""
    axis = graph.scalar(node.inputs[1])
    if axis is None:
        return None
    steps = Steps(graph, node)
    rank = len(steps.shape(node.inputs[0])) + 1
    return steps.done(steps.unsqueeze(node.inputs[0], int(axis) % rank))


def nhwc_max_pool(graph: Graph, node: Node) -> list[Node]:
    """``NhwcMaxPool``: MaxPool of 8-bit codes whose channels come last."""
    steps = Steps(graph, node)
    x = steps.transpose(node.inputs[0], 0, 3, 1, 2)
    return steps.done(steps.transpose(steps("MaxPool", x, **node.attrs), 0, 2, 3, 1))


def quick_gelu(graph: Graph, node: Node) -> list[Node]:
    """``x * sigmoid(alpha * x)``."""
    steps, (x,) = Steps(graph, node), node.inputs
    alpha = steps.number(float(node.attrs.get("alpha", 1.702)), str(graph.dtype(x)))
    return steps.done(steps("Mul", x, steps("Sigmoid", steps("Mul", x, alpha))))


CONTRIB = {
    "CDist": cdist,
    "ExpandDims": expand_dims,
    "NhwcMaxPool": nhwc_max_pool,
    "QuickGelu": quick_gelu,
    "TransposeMatMul": fused_matmul,
    "Trilu": lambda graph, node: [replace(node, op="Trilu")],
}
"""By names in the domain ``com.microsoft``."""

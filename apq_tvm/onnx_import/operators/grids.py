"""``AffineGrid`` (ONNX operator specification, opset 20) of sizes that symbols are part of."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, product
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node


def affine_grid(graph: Graph, node: Node) -> list[Node] | None:
    """Every place, with a 1 beside it, times the matrix of its image.

    Returns
    -------
    list of Node or None
        None: the sizes are constants, which TVM knows, or nobody knows them.
    """
    theta, given = node.inputs
    sizes = elements(contents(graph, given))
    if sizes is None or given in graph.weights or len(sizes) not in (4, 5):
        return None
    steps, corners = Steps(graph, node), bool(node.attrs.get("align_corners", 0))
    spatial = list(sizes[2:])
    rank = len(spatial)
    parts = []
    for axis in reversed(range(rank)):  # x comes first, which is the last axis
        shape = [spatial[axis] if other == axis else 1 for other in range(rank)]
        place = steps.reshape(_places(steps, spatial[axis], corners), *shape, 1)
        parts.append(steps.expand(place, *spatial, 1))
    ones = steps.expand(steps.number(1.0), *spatial, 1)
    base = steps("Concat", *parts, ones, axis=rank)
    base = steps.reshape(base, 1, product(spatial), rank + 1)
    kind = str(graph.dtype(theta))
    if kind != "float32":
        theta = steps("Cast", theta, to=1)
    y = steps("MatMul", base, steps.transpose(theta, 0, 2, 1))
    y = steps.reshape(y, sizes[0], *spatial, rank)
    return steps.done(y if kind == "float32" else steps("CastLike", y, node.inputs[0]))


def _places(steps: Steps, extent: Dim, corners: bool) -> str:
    """The middles of so many pixels between -1 and 1, or the ends at the first and last middle."""
    number = steps("Cast", steps.range(extent), to=1)
    count = steps("Cast", steps.dim(extent), to=1)
    if corners:
        last = steps("Max", steps("Sub", count, steps.number(1.0)), steps.number(1.0))
        ratio = steps("Div", number, last)
    else:
        middle = steps("Add", number, steps.number(0.5))
        ratio = steps("Div", middle, count)
    return steps("Sub", steps("Mul", ratio, steps.number(2.0)), steps.number(1.0))

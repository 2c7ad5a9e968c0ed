"""An ``If`` that selects by its data, or gives nothing where there is nothing to select from.

As torchvision's ``batched_nms`` is exported: a size that is computed inside of a branch cannot
leave it. The selection is made in any case, and cut to nothing where a run takes the other one.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.control.bodies import Body, captures, copied_in, splice
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.run_sizes.selections import SELECTIONS
from apq_tvm.types import Node


def nothing_or_selection(graph: Graph, node: Node) -> list[Node] | None:
    """The nodes of such an If; None of others."""
    bodies: list[Body] = [node.attrs[f"{name}_branch"] for name in ("then", "else")]
    for taken, (empty, other) in enumerate((bodies[::-1], bodies)):
        axes = [_empty_axis(empty, out) for out in empty.outputs]
        if all(axis is not None for axis in axes) and _selects(other):
            nodes, results = splice(graph, other, captures(node))
            pairs = zip(results, axes, node.outputs, strict=False)
            cuts = [_cut(graph, node, *pair, bool(taken)) for pair in pairs]
            return [*nodes, *(one for cut in cuts for one in cut)]
    return None


def _empty_axis(body: Body, output: str) -> int | None:
    """The first axis without entries of a constant that a branch gives; None of everything else."""
    array = body.weights.get(copied_in(body, output))
    return array.shape.index(0) if array is not None and 0 in array.shape else None


def _selects(body: Body) -> bool:
    """Whether some size in a branch depends on data."""
    inner = (a for node in body.nodes for a in node.attrs.values() if isinstance(a, Body))
    return any(node.op in SELECTIONS for node in body.nodes) or any(map(_selects, inner))


def _cut(
    graph: Graph, node: Node, result: str, axis: int | None, output: str, empty_then: bool
) -> list[Node]:
    """What was selected, or nothing of it where the other branch is taken."""
    steps, made = Steps(graph, node), list[Node]()

    def step(op: str, *inputs: str) -> str:
        value = graph.fresh(f"{node.name}.{output}.{op.lower()}")
        made.append(Node(op, value, inputs, (value,)))
        return value

    def number(value: int | None) -> str:
        return steps.constant(np.array([value], np.int64))

    zero, along = number(0), number(axis)
    condition = step("Reshape", node.inputs[0], number(1))
    size = step("Gather", step("Shape", result), along)
    end = step("Where", condition, *((zero, size) if empty_then else (size, zero)))
    cut = Node(
        "Slice", graph.fresh(f"{node.name}.{output}.cut"), (result, zero, end, along), (output,)
    )
    return [*made, cut] if output else []

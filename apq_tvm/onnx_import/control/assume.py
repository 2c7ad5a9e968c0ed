"""Conditions on shapes that are taken for granted, and checked when the module runs.

torch writes ``x.squeeze(d)`` of a dynamic dimension as an If: Squeeze where it is 1, else x. What
follows has one rank, so only one of the two can be meant, and whoever squeezes means the first.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.control.bodies import Body, captures, copied_in
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, Expr, as_attr
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node


def assumed_squeeze(graph: Graph, node: Node) -> list[Node] | None:
    """The nodes of an If that squeezes a dimension if it is 1, with that dimension taken as 1."""
    first, second = node.attrs["then_branch"], node.attrs["else_branch"]
    found = _squeezed(graph, node, first)
    if found is None or len(second.outputs) != 1 or len(node.outputs) != 1:
        return None
    value, axis = captures(node)[found[0]], found[1]
    other = captures(node).get(copied_in(second, second.outputs[0]))
    shape = graph.known_shape(value)
    if other != value or shape is None or not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    if not isinstance(shape[axis], Expr) or not _compares(graph, node.inputs[0], shape[axis]):
        return None
    steps = Steps(graph, node)
    whole = tuple(1 if i == axis else dim for i, dim in enumerate(shape))
    sure = steps("apq.AssumeHere", value, shape=tuple(as_attr(dim) for dim in whole))
    return steps.done(steps.reshape(sure, *whole[:axis], *whole[axis + 1 :]))


def _squeezed(graph: Graph, node: Node, body: Body) -> tuple[str, int] | None:
    """The captured value and the one axis, if a body is a Squeeze and nothing else."""
    if len(body.outputs) != 1:
        return None
    last = copied_in(body, body.outputs[0])
    maker = next((n for n in body.nodes if last in n.outputs), None)
    if maker is None or maker.op != "Squeeze":
        return None
    given = maker.inputs[1] if len(maker.inputs) > 1 else ""
    stored = body.weights.get(given, graph.weights.get(captures(node).get(given, ""), ()))
    axes = np.asarray(maker.attrs.get("axes", ()) if graph.opset < 13 else stored)
    value = copied_in(body, maker.inputs[0])
    if axes.size != 1 or value not in body.captured:
        return None
    return value, int(axes.reshape(-1)[0])


def _compares(graph: Graph, condition: str, dim: Dim) -> bool:
    """Whether a condition is that a dimension is 1."""
    maker = graph.maker.get(condition)
    if maker is None or maker.op != "Equal":
        return False
    sides = [elements(contents(graph, value)) for value in maker.inputs]
    return sides in ([[dim], [1]], [[1], [dim]])

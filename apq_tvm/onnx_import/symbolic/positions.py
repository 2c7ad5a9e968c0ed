"""Values that count up: how far they reach, and comparisons with them that are decided."""

from __future__ import annotations

from math import ceil, isfinite

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.passes.moves import RESHAPES
from apq_tvm.onnx_import.symbolic.carry import full
from apq_tvm.onnx_import.symbolic.dims import Dim, not_negative, parse


def span(graph: Graph, value: str) -> tuple[Dim, Dim] | None:
    """``(first, end)`` of numbers that count up by 1 from first to end - 1, however arranged."""
    node, offset = graph.maker.get(value), 0
    while node is not None and node.op != "apq.Range":
        plus = graph.constant_operand(node) if node.op == "Add" else None
        if plus is not None:
            offset += int(plus)
            node = next((graph.maker.get(v) for v in node.inputs if v not in graph.weights), None)
        elif node.op in (*RESHAPES, "apq.Expand", "apq.Slice", "Cast", "Transpose"):
            node = graph.maker.get(node.inputs[0])
        else:
            node = None
    if node is None or node.attrs["delta"] != 1:
        return None
    first = parse(node.attrs["start"]) + offset
    return first, first + parse(node.attrs["shape"][0])


def decide_comparisons(graph: Graph) -> None:
    """``positions >= 0`` is true everywhere: torch's mask functions ask it."""
    for node in graph.each():
        if node.op not in ("GreaterOrEqual", "Less"):
            continue
        reach, number = span(graph, node.inputs[0]), graph.scalar(node.inputs[1])
        shape = graph.known_shape(node.outputs[0])
        if reach is None or number is None or shape is None or not isfinite(number):
            continue
        if not_negative(reach[0] - ceil(number)):
            graph.replace(node, full(node, shape, np.asarray(node.op == "GreaterOrEqual")))

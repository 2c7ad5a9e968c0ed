"""Values that a loop collects, of sizes that are computed inside of it and have a largest one.

Every round's is as large, or they could not be collected: it is taken for the largest, which each
round checks. So are the masks that torchvision's Mask R-CNN pastes into images, cut to their size.
"""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph, defined
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import LONGEST, Dim, as_attr, bounds, run_symbols
from apq_tvm.types import Node


def largest_entries(graph: Graph, node: Node) -> list[Node] | None:
    """An ``apq.EndLoop`` whose entries have such sizes; None of others."""
    start = next(i for i, n in enumerate(graph.nodes) if node.inputs[0] in n.outputs)
    inner = {name for n in graph.nodes[start:] for name in defined(n)}
    steps, inputs = Steps(graph, node), list(node.inputs)
    for place in range(1 + int(node.attrs["carried"]), len(inputs)):
        shape = graph.known_shape(inputs[place])
        whole = None if shape is None else tuple(_largest(dim, inner) for dim in shape)
        if shape is not None and whole != shape:
            attrs = {"shape": tuple(as_attr(dim) for dim in whole or ())}
            inputs[place] = steps("apq.AssumeHere", inputs[place], **attrs)
    if tuple(inputs) == node.inputs:
        return None
    return [*steps.nodes, Node(node.op, node.name, tuple(inputs), node.outputs, node.attrs)]


def _largest(dim: Dim, inner: set[str]) -> Dim:
    most = bounds(dim)[1] if run_symbols(dim) & inner else None
    return dim if most is None or most >= LONGEST else most

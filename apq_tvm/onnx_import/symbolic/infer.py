"""Shapes and element types of values, symbolically: by ONNX's inference, then by our rules."""

from __future__ import annotations

from apq_tvm.onnx_import.checks.attributes import check_attributes
from apq_tvm.onnx_import.checks.sizes import check_sizes
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.onnx_inference import infer_by_onnx
from apq_tvm.onnx_import.symbolic.shape_rules import RULES
from apq_tvm.types import Node


def infer(graph: Graph, node: Node) -> None:
    """Record what is known of the outputs of `node`.

    Raises
    ------
    ImportFailed
        The shapes of its inputs contradict each other, or its attributes; the message names the
        node.
    """
    check_attributes(graph, node)
    if not node.op.startswith("apq.") and "." not in node.op:
        infer_by_onnx(graph, node)
    rule = RULES.get(node.op)
    shapes = rule(graph, node) if rule else None
    for value, shape in zip(node.outputs, shapes or (), strict=False):
        if shape is not None:
            graph.shapes[value] = shape
    check_sizes(graph, node)


def infer_inputs(graph: Graph) -> None:
    """Record the types of the graph inputs."""
    for spec in graph.inputs:
        graph.dtypes[spec.name] = spec.dtype
        graph.shapes[spec.name] = tuple(
            graph.input_dim(dim) if isinstance(dim, str) else dim for dim in spec.shape
        )

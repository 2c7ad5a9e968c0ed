"""Encoders that ONNX Runtime's tools first fused and then quantized (its ContribOperators.md).

Codes of weights and tables stay the file's; activations are rounded by the scheme.
"""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.quantized import matrix_of, unrounded
from apq_tvm.types import Node


def quantized_attention(graph: Graph, node: Node) -> list[Node]:
    """``QAttention``: ``Attention`` of an input and a weight in 8 bits.

    Raises
    ------
    UnsupportedModel
        A weight that is no constant matrix with one scale per column.
    """
    x, weight, bias, x_scale, scale, mask, x_zero, zero, past = (*node.inputs, *[""] * 9)[:9]
    matrix = matrix_of(graph, node, weight, scale, zero)
    given, nodes = unrounded(graph, node, x, x_scale, x_zero)
    inputs = (given, matrix, bias, mask, past)
    return [*nodes, Node("com.microsoft.Attention", node.name, inputs, node.outputs, node.attrs)]


def quantized_embeddings(graph: Graph, node: Node) -> list[Node]:
    """``QEmbedLayerNormalization``: ``EmbedLayerNormalization`` of tables in 8 bits.

    Raises
    ------
    UnsupportedModel
        A table that is no constant matrix with one scale.
    """
    ids, segments, *quantized = (*node.inputs, *[""] * 18)[:18]
    arrays, mask, scales, zeros = quantized[:5], quantized[5], quantized[6:11], quantized[11:16]
    floats, nodes = list[str](), list[Node]()
    for number, (array, scale, zero) in enumerate(zip(arrays, scales, zeros, strict=True)):
        if not array:
            floats.append("")
        elif number < 3:  # words, positions and segments; then what scales and shifts
            floats.append(matrix_of(graph, node, array, scale, zero))
        else:
            floats.append(graph.fresh(f"{array}.float"))
            given = (array, scale, zero) if zero else (array, scale)
            name = graph.fresh(f"{array}.dequantized")
            nodes.append(Node("DequantizeLinear", name, given, (floats[-1],)))
    inputs = (ids, segments, *floats, mask)
    op = "com.microsoft.EmbedLayerNormalization"
    return [*nodes, Node(op, node.name, inputs, node.outputs, node.attrs)]

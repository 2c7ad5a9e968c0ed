"""Integer divisions of what may be less than 0, decided by the windows of the same model.

Exporters write the size of a convolution's output as ``(length - 3) / 2 + 1``: a division that ONNX
rounds towards 0, and the size itself, which is rounded down. The two differ for images that are
smaller than the kernel alone, which the convolution refuses.
"""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import Call, Dim, calls, floordiv, positive

WINDOWS = ("AveragePool", "Conv", "ConvInteger", "LpPool", "MaxPool", "QLinearConv")


def decided(graph: Graph, a: Dim, b: Dim) -> Dim | None:
    """``a / b`` where windows say that it is not negative; notes on `graph` what they may say."""
    if not positive(b):
        return None
    quotient = floordiv(a, b)
    unknown = calls(quotient) - graph.floors
    graph.undecided |= unknown
    return None if unknown else quotient


def found(graph: Graph) -> frozenset[Call]:
    """Quotients that were asked for in vain and are the sizes of windows."""
    if not graph.undecided:
        return frozenset()
    shapes = [graph.shape(node.outputs[0]) for node in graph.nodes if node.op in WINDOWS]
    dims = (dim for shape in shapes for dim in shape or () if dim is not None)
    return frozenset().union(*map(calls, dims)) & graph.undecided

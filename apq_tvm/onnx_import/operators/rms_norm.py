"""RMS normalisation (arXiv:1910.07467) in its many names: one ``RMSNormalization`` each."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node


def simplified_layer_norm(graph: Graph, node: Node) -> list[Node]:
    """``SimplifiedLayerNormalization``, which ONNX Runtime keeps in the default domain.

    Raises
    ------
    UnsupportedModel
        Its second output, the inverse deviation, is read.
    """
    steps = Steps(graph, node)
    if steps.wants(1):
        raise steps.refuse("its second output (inv_std_var) is for training only")
    return steps.done(rms_norm(steps, *node.inputs[:2]))


def skip_simplified_layer_norm(graph: Graph, node: Node) -> list[Node]:
    """``SkipSimplifiedLayerNormalization`` of ``input + skip + bias``; output 3 is that sum.

    Raises
    ------
    UnsupportedModel
        Its outputs for training are read.
    """
    steps = Steps(graph, node)
    if steps.wants(1) or steps.wants(2):
        raise steps.refuse("its second and third outputs (mean, inv_std_var) are for training only")
    x, skip, gamma, bias = (*node.inputs, "")[:4]
    total = steps("Add", x, skip)
    if bias:
        total = steps("Add", total, bias)
    return steps.done(rms_norm(steps, total, gamma), "", "", total)


def rms_norm(steps: Steps, x: str, scale: str) -> str:
    """``x / sqrt(mean(x * x) + epsilon) * scale`` over the axes from `axis` on."""
    attrs = steps.node.attrs
    shape, axis = steps.shape(x), int(attrs.get("axis", -1))
    epsilon = float(attrs.get("epsilon", 1e-5))
    if axis >= 0:
        axis -= len(shape)
    return steps("RMSNormalization", x, scale, axis=axis, epsilon=epsilon)

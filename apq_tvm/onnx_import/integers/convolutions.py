"""``ConvInteger`` behind ``DynamicQuantizeLinear`` as the convolution of floats that it stands for.

Two spellings of onnxruntime's dynamic quantization: ``Cast``, ``Mul`` by the scales and a float
bias behind the integers; and, until its version 1.6, an integer bias ``floor(bias / scales)`` added
to them, whose rounding is dropped.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.codes import check_scales, of_integers
from apq_tvm.onnx_import.integers.packed import meaning
from apq_tvm.types import Node


def dynamic_convolution(graph: Graph, node: Node) -> bool:
    """Write one ``ConvInteger`` as ``Conv``, its weights with codes; False where the pattern is
    unknown."""
    x, weight, x_zero, w_zero = (*node.inputs, "", "")[:4]
    rounding = graph.made_by(x, "DynamicQuantizeLinear")
    if rounding is None or rounding.outputs[2] != x_zero:
        return False
    added, bias = _only_reader(graph, node.outputs[0]), ""
    cast = added
    if added is not None and added.op == "Add":
        cast = _only_reader(graph, added.outputs[0])
    if cast is None or cast.op != "Cast":
        return False
    found = _scaled(graph, cast.outputs[0], rounding.outputs[1])
    if found is None:
        return False
    last, scale, product = found
    if added is not None and added is not cast:
        bias = _integer_bias(graph, added, node.outputs[0], product)
        if not bias:
            return False
    floats = _floats(graph, weight, scale, w_zero, node)
    if not floats:
        return False
    graph.notes[node.name] = (
        "activations are rounded by the scheme, not by the file's DynamicQuantizeLinear"
    )
    inputs = (rounding.inputs[0], floats, bias) if bias else (rounding.inputs[0], floats)
    graph.replace(last, Node("Conv", node.name, inputs, last.outputs, node.attrs))
    return True


def _only_reader(graph: Graph, value: str) -> Node | None:
    if not graph.only_use(value):
        return None
    return next((n for n in graph.nodes if value in n.inputs), None)


def _scaled(graph: Graph, value: str, x_scale: str) -> tuple[Node, str, str] | None:
    """The Mul by both scales, the constant one, and their product; or by one after the other."""
    first = _only_reader(graph, value)
    if first is None or first.op != "Mul":
        return None
    by = next((v for v in first.inputs if v != value), "")
    both = graph.made_by(by, "Mul")
    if both is not None and x_scale in both.inputs:
        return first, next((v for v in both.inputs if v != x_scale), ""), by
    second = _only_reader(graph, first.outputs[0])
    if second is None or second.op != "Mul":
        return None
    pair = [by, next((v for v in second.inputs if v != first.outputs[0]), "")]
    if x_scale not in pair:
        return None
    pair.remove(x_scale)
    return second, pair[0], ""


def _integer_bias(graph: Graph, added: Node, value: str, product: str) -> str:
    """The bias of ``integers + reshape(cast(floor(bias / product)))``, as a weight, or ``""``."""
    at, division = next((v for v in added.inputs if v != value), ""), added
    for op in ("Reshape", "Cast", "Floor", "Div"):
        node = graph.made_by(at, op, "apq.Reshape" if op == "Reshape" else op)
        if node is None:
            return ""
        at, division = node.inputs[0], node
    bias = graph.weights.get(at)
    if bias is None or not product or product not in division.inputs or bias.dtype != np.float32:
        return ""
    return graph.add_weight(f"{at}.flat", bias.reshape(-1))


def _floats(graph: Graph, weight: str, scale: str, zero: str, node: Node) -> str:
    """Name of the float weights, stored with their codes, or ``""``."""
    array, factor = graph.weights.get(weight), graph.weights.get(scale)
    offset = graph.weights.get(zero) if zero else np.zeros((), np.int32)
    if array is None or factor is None or offset is None or array.ndim < 3:
        return ""
    rows = array.reshape(array.shape[0], -1)
    codes = of_integers(rows, f"ConvInteger of {array.dtype.name}")
    sizes = (1, len(rows))
    if codes is None or factor.size not in sizes or offset.size not in sizes:
        return ""
    check_scales(factor, f"{scale} of {node.op} {node.name!r}")
    kept = replace(
        codes,
        scale=np.broadcast_to(factor.reshape(-1, 1), (len(rows), 1)).astype(np.float32),
        zero=np.broadcast_to(offset.reshape(-1, 1), (len(rows), 1)).astype(np.int32),
        block=(1, rows.shape[1]),
    )
    name = graph.add_weight(f"{weight}.float", meaning(kept).reshape(array.shape))
    graph.codes[name] = kept
    return name


__all__ = ["dynamic_convolution"]

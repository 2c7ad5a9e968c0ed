"""What scales and shifts the channels of a convolution's result moves into its weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.types import Array, Node

CONVOLUTIONS = ("Conv", "ConvTranspose")


def fold_affine(graph: Graph) -> None:
    """Fold BatchNormalization and constants per channel into the convolution before them.

    A BatchNormalization that no convolution takes in becomes a product and a sum.
    """
    for node in graph.each():
        found = _affine(graph, node)
        if found is None:
            continue
        x, scale, shift = found
        conv = graph.made_by(x, *CONVOLUTIONS)
        if conv is not None and graph.only_use(x) and _into(graph, conv, node, scale, shift):
            continue
        if node.op == "BatchNormalization":
            _spelled(graph, node, scale, shift)
    graph.sweep()


def _affine(graph: Graph, node: Node) -> tuple[str, Array, Array] | None:
    """``(x, scale, shift)``, float64 [C] or of one entry: what `node` does to the channels of x."""
    if node.op == "BatchNormalization":
        return _batch_norm(graph, node)
    if node.op not in ("Mul", "Div", "Add", "Sub"):
        return None
    sides = [node.inputs] if node.op in ("Div", "Sub") else [node.inputs, node.inputs[::-1]]
    for x, c in sides:
        if x in graph.weights or c not in graph.weights or graph.made_by(x, *CONVOLUTIONS) is None:
            continue
        values = _per_channel(graph, x, c)
        if values is None:
            continue
        one, zero = np.ones(1), np.zeros(1)
        if node.op == "Div":
            return (x, 1 / values, zero) if bool((values != 0).all()) else None
        if node.op == "Mul":
            return x, values, zero
        return x, one, values if node.op == "Add" else -values
    return None


def _per_channel(graph: Graph, x: str, c: str) -> Array | None:
    """A constant that differs along the channels alone, as float64 [C] or [1]."""
    array, rank = graph.weights[c], graph.rank(x)
    if rank is None or array.ndim > rank or array.dtype.name not in FLOATS:
        return None
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    if wide.size != wide.shape[1] or not bool(np.isfinite(wide).all()):
        return None
    return wide.reshape(-1).astype(np.float64)


def _batch_norm(graph: Graph, node: Node) -> tuple[str, Array, Array] | None:
    x, *given = node.inputs
    if node.attrs.get("training_mode", 0) or any(v not in graph.weights for v in given):
        return None
    if graph.dtype(x) != "float32" or len(node.outputs) > 1:
        return None
    scale, shift, mean, variance = (graph.weights[v].astype(np.float64) for v in given)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + node.attrs.get("epsilon", 1e-5))
        offset = shift - mean * factor
    if not bool(np.isfinite(factor).all() and np.isfinite(offset).all()):
        return None
    return x, factor, offset


def _into(graph: Graph, conv: Node, node: Node, scale: Array, shift: Array) -> bool:
    """Give `conv` the scaled weights and the bias; False if it cannot take them."""
    w = graph.weights.get(conv.inputs[1])
    bias = conv.inputs[2] if len(conv.inputs) > 2 else ""
    if w is None or w.dtype != np.float32 or (bias and bias not in graph.weights):
        return False
    changed = bool((scale != 1).any())
    group = int(conv.attrs.get("group", 1))
    turned = conv.op == "ConvTranspose"
    channels = w.shape[1] * group if turned else w.shape[0]
    factor = np.broadcast_to(scale, (channels,))
    name, codes = conv.inputs[1], graph.codes.get(conv.inputs[1])
    if changed and codes is not None:
        codes = None if turned else codes.times(factor.astype(np.float32).reshape(-1, 1))
        if codes is None:
            return False
    if changed:
        if turned:  # [Cin, Cout / group, ...]: a group's rows make its own channels
            parts = w.reshape(group, -1, *w.shape[1:])
            by = factor.reshape(group, 1, -1, *(1,) * (w.ndim - 2))
            scaled = (parts * by).reshape(w.shape)
        else:
            scaled = w * factor.reshape(-1, *(1,) * (w.ndim - 1))
        name = graph.add_weight(f"{conv.inputs[1]}.scaled", scaled.astype(np.float32))
        if codes is not None:
            graph.codes[name] = codes
    old = graph.weights[bias].astype(np.float64) if bias else np.zeros(channels)
    total = (old * factor + np.broadcast_to(shift, (channels,))).astype(np.float32)
    inputs = (conv.inputs[0], name, graph.add_weight(f"{conv.name}.bias", total))
    graph.replace(node, replace(conv, inputs=inputs, outputs=node.outputs))
    return True


def _spelled(graph: Graph, node: Node, scale: Array, shift: Array) -> None:
    rank = graph.rank(node.inputs[0])
    if rank is None:
        return
    shape = (-1, *(1,) * (rank - 2))
    by = graph.add_weight(f"{node.name}.scale", scale.astype(np.float32).reshape(shape))
    add = graph.add_weight(f"{node.name}.shift", shift.astype(np.float32).reshape(shape))
    scaled = graph.fresh(f"{node.outputs[0]}.scaled")
    mul = Node("Mul", graph.fresh(f"{node.name}.mul"), (node.inputs[0], by), (scaled,))
    infer(graph, mul)
    graph.replace(node, mul, Node("Add", node.name, (scaled, add), node.outputs))

"""Normalisation that an exporter took apart becomes one operator again.

``LayerNormalization``, or ``RMSNormalization`` where no mean is subtracted.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.types import Node

# What is normalised, its first normalised axis, whether its mean is subtracted, epsilon.
Normalised = tuple[str, int, bool, float]


def fuse_layer_norm(graph: Graph) -> None:
    """Find ``(x - mean) / sqrt(mean((x - mean)**2) + epsilon) * scale + bias``, and without mean.

    Scale and bias are constants over the normalised axes; either may be missing. The source of the
    formulas are the function bodies of LayerNormalization and RMSNormalization in the ONNX operator
    specification.
    """
    for node in graph.each():
        if node.op not in ("Div", "Mul"):
            continue
        found = _normalised(graph, node)
        if found is None:
            continue
        x, axis, centred, epsilon = found
        shape = graph.known_shape(x)
        if shape is None or not all(isinstance(d, int) for d in shape[axis:]):
            continue
        sizes = tuple(int(d) for d in shape[axis:])  # type: ignore[arg-type]
        last, scale = _affine(graph, node, "Mul", sizes)
        last, bias = _affine(graph, last, "Add", sizes) if centred else (last, None)
        base = graph.fresh(f"{node.name}.scale") if scale is None else ""
        gamma = _stored(graph, scale, sizes) if scale else base
        if base:
            graph.weights[base] = np.ones(sizes, np.float32)
        inputs = (x, gamma, _stored(graph, bias, sizes)) if bias else (x, gamma)
        attrs = {"axis": axis - len(shape), "epsilon": epsilon}
        name = last.name
        op = "LayerNormalization" if centred else "RMSNormalization"
        graph.replace(last, Node(op, name, inputs, last.outputs, attrs))
    graph.sweep()


def _normalised(graph: Graph, node: Node) -> Normalised | None:
    """Match ``d / sqrt(var + epsilon)`` at `node`."""
    if graph.dtype(node.outputs[0]) != "float32":
        return None
    if node.op == "Div":
        pairs = [(node.inputs[0], graph.made_by(node.inputs[1], "Sqrt"))]
    else:
        pairs = []
        for d, inverse in (node.inputs, node.inputs[::-1]):
            maker = graph.made_by(inverse, "Reciprocal", "Div")
            if maker is None or (maker.op == "Div" and graph.scalar(maker.inputs[0]) != 1.0):
                continue
            pairs.append((d, graph.made_by(maker.inputs[-1], "Sqrt")))
    for d, root in pairs:
        total = graph.made_by(root.inputs[0], "Add") if root is not None else None
        if total is None:
            continue
        for var, eps in (total.inputs, total.inputs[::-1]):
            epsilon = graph.scalar(eps)
            if epsilon is not None:
                found = _centred(graph, d, var)
                if found is not None:
                    return (*found, True, epsilon)
                axis = _mean_of_squares(graph, d, var)
                if axis is not None:
                    return d, axis, False, epsilon
    return None


def _mean_of_squares(graph: Graph, d: str, var: str) -> int | None:
    """The axis from which on ``var = mean(d * d)``, else None."""
    mean = graph.made_by(var, "ReduceMean")
    square = None if mean is None else graph.made_by(mean.inputs[0], "Pow", "Mul")
    if mean is None or square is None or square.inputs[0] != d:
        return None
    if square.op == "Mul" and square.inputs[1] != d:
        return None
    if square.op == "Pow" and graph.scalar(square.inputs[1]) != 2.0:
        return None
    return _trailing_axes(graph, mean)


def _centred(graph: Graph, d: str, var: str) -> tuple[str, int] | None:
    """``(x, axis)`` where ``d = x - mean(x)`` and ``var = mean(d * d)`` from `axis` on."""
    difference, outer = graph.made_by(d, "Sub"), _mean_of_squares(graph, d, var)
    if difference is None or outer is None:
        return None
    x, mean = difference.inputs
    inner = graph.made_by(mean, "ReduceMean")
    if inner is None or inner.inputs[0] != x:
        return None
    axis = _trailing_axes(graph, inner)
    return (x, axis) if axis is not None and axis == outer else None


def _trailing_axes(graph: Graph, node: Node) -> int | None:
    """First of the axes a ReduceMean with kept dimensions runs over, if they are the last ones."""
    rank = graph.rank(node.inputs[0])
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1] in graph.weights:
        axes = graph.weights[node.inputs[1]].reshape(-1).tolist()
    if rank is None or not axes or not node.attrs.get("keepdims", 1):
        return None
    given = sorted(int(a) % rank for a in axes)
    return given[0] if given == list(range(given[0], rank)) else None


def _affine(graph: Graph, node: Node, op: str, sizes: tuple[int, ...]) -> tuple[Node, str | None]:
    """The `op` that alone reads `node`, with a constant over the normalised axes."""
    value = node.outputs[0]
    reader = next((n for n in graph.nodes if value in n.inputs), None)
    if reader is None or reader.op != op or not graph.only_use(value):
        return node, None
    other = reader.inputs[1] if reader.inputs[0] == value else reader.inputs[0]
    weight = graph.weights.get(other)
    rank = graph.rank(value)
    if weight is None or rank is None or weight.ndim > rank:
        return node, None
    padded = (1,) * (rank - weight.ndim) + weight.shape
    inner = padded[rank - len(sizes) :]
    fits = all(d == 1 for d in padded[: rank - len(sizes)]) and all(
        d in (1, size) for d, size in zip(inner, sizes, strict=True)
    )
    return (reader, other) if fits else (node, None)


def _stored(graph: Graph, value: str, sizes: tuple[int, ...]) -> str:
    """A constant with exactly the normalised shape."""
    weight = graph.weights[value]
    if weight.shape == sizes:
        return value
    name = f"{value}.{'x'.join(map(str, sizes))}"
    if name not in graph.weights:
        inner = weight.reshape(weight.shape[max(0, weight.ndim - len(sizes)) :])
        graph.weights[name] = np.ascontiguousarray(np.broadcast_to(inner, sizes))
    return name

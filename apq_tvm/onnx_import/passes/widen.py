"""Half precision becomes float32 inside; inputs and outputs keep their ONNX element type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.onnx_import.control.bodies import Body
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.infer import infer, infer_inputs
from apq_tvm.types import Node

HALF = {10: "float16", 16: "bfloat16"}  # ONNX element types
FLOAT32, FLOAT16 = 1, 10


def widen(graph: Graph) -> None:
    """Replace float16 and bfloat16 by float32 in weights, attributes and casts.

    Results can only become more accurate: what overflowed or was rounded in half precision is not.
    """
    halves = tuple(HALF.values())
    if not _has_half(graph):
        return
    _complete_outputs(graph)
    for name, array in graph.weights.items():
        if array.dtype.name in halves:
            graph.weights[name] = array.astype(np.float32)
    graph.nodes = [_node(n) for n in graph.nodes]
    before: list[Node] = []
    inner: dict[str, str] = {}
    for spec in graph.inputs:
        if spec.dtype in halves:
            inner[spec.name] = graph.fresh(f"{spec.name}.f32")
            name = graph.fresh(f"{spec.name}.widen")
            given, made = (spec.name,), (inner[spec.name],)
            if spec.dtype == "bfloat16":
                before.append(Node("apq.FromBfloat16", name, given, made))
            else:
                before.append(Node("Cast", name, given, made, {"to": FLOAT32}))
    after: list[Node] = []
    for spec in graph.outputs:
        if spec.dtype in halves and spec.name not in inner:
            inner[spec.name] = graph.fresh(f"{spec.name}.f32")
            name = graph.fresh(f"{spec.name}.narrow")
            given, made = (inner[spec.name],), (spec.name,)
            if spec.dtype == "bfloat16":
                after.append(Node("apq.ToBfloat16", name, given, made))
            else:
                after.append(Node("Cast", name, given, made, {"to": FLOAT16}))
            if spec.name in graph.weights:
                graph.weights[inner[spec.name]] = graph.weights.pop(spec.name)
    renamed = [
        replace(
            node,
            inputs=tuple(inner.get(v, v) for v in node.inputs),
            outputs=tuple(inner.get(v, v) for v in node.outputs),
        )
        for node in graph.nodes
    ]
    graph.nodes = [*before, *renamed, *after]
    graph.index()


def _has_half(graph: Graph) -> bool:
    """Whether half precision occurs anywhere."""
    halves = tuple(HALF.values())
    nodes, weights = list(graph.nodes), list(graph.weights.values())
    for node in nodes:  # grows on the way
        for body in (a for a in node.attrs.values() if isinstance(a, Body)):
            nodes += body.nodes
            weights += body.weights.values()
    tensors = [a for n in nodes for a in n.attrs.values() if isinstance(a, np.ndarray)]
    return (
        any(array.dtype.name in halves for array in (*weights, *tensors))
        or any(spec.dtype in halves for spec in (*graph.inputs, *graph.outputs))
        or any(n.attrs.get(key) in HALF for n in nodes for key in ("to", "dtype"))
    )


def _complete_outputs(graph: Graph) -> None:
    """Element types of outputs that the file does not state, inferred before the change."""
    if all(spec.dtype for spec in graph.outputs):
        return
    scratch = Graph("", graph.opset, graph.inputs, graph.outputs, graph.nodes, graph.weights)
    infer_inputs(scratch)
    for node in scratch.nodes:
        infer(scratch, node)
    graph.outputs = [
        replace(spec, dtype=spec.dtype or scratch.dtype(spec.name) or "") for spec in graph.outputs
    ]


def _node(node: Node) -> Node:
    attrs = {key: widen_attr(key, value) for key, value in node.attrs.items()}
    return replace(node, attrs=attrs)


def widen_attr(key: str, value: Any) -> Any:
    """An attribute without half precision."""
    if isinstance(value, Body):
        weights = {name: widen_attr(name, array) for name, array in value.weights.items()}
        return replace(value, nodes=tuple(map(_node, value.nodes)), weights=weights)
    if key in ("to", "dtype") and value in HALF:
        return FLOAT32
    if isinstance(value, np.ndarray) and value.dtype.name in HALF.values():
        return value.astype(np.float32)
    return value

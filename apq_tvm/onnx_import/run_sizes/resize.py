"""Resize to sizes, or by scales, that depend on data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apq_tvm.onnx_import.graph import Graph, type_number
from apq_tvm.onnx_import.operators.resize import resize as by_matrices
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.run_sizes.shape_inputs import entries, numbers, sized
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr
from apq_tvm.onnx_import.symbolic.resize import CROP, resize_attributes
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node

WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

POSITIONS = {"Resize": (2, 3), "Upsample": (1, 4)}
"""Where scales and sizes are among the inputs."""


def resize(graph: Graph, node: Node) -> list[Node] | None:
    """Resize and Upsample; None where their sizes follow from shapes."""
    if graph.dtype(node.inputs[0]) in WHOLE and node.attrs.get("mode", "nearest") != "nearest":
        return _as_floats(graph, node)
    steps = Steps(graph, node)
    scales, sizes = (steps.input(at) for at in POSITIONS[node.op])
    if sizes and None in (known := entries(graph, sizes)):
        if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise steps.refuse("sizes that depend on data need the policy 'stretch'")
        wide = sizes if graph.dtype(sizes) == "int64" else steps("Cast", sizes, to=7)
        token = sized(steps, wide, known)
        at = POSITIONS[node.op][1]
        inputs = (*node.inputs[:at], token)
        return [*steps.nodes, Node(node.op, node.name, inputs, node.outputs, node.attrs)]
    if scales and scales not in graph.weights:
        told = contents(graph, scales)
        entries_told = [None] if told is None else told.ravel().tolist()
        if None in entries_told:
            return _by_scales(steps, scales, entries_told)
    return by_matrices(graph, node) if node.op == "Resize" else None


def _as_floats(graph: Graph, node: Node) -> list[Node]:
    """Of integers: rounded once, towards zero as ONNX Runtime does, and not along each axis."""
    x, y = (graph.fresh(f"{node.name}.{name}") for name in ("float", "resized"))
    to = type_number(str(graph.dtype(node.inputs[0])))
    return [
        Node("Cast", graph.fresh(f"{x}.cast"), node.inputs[:1], (x,), {"to": 1}),
        Node(node.op, node.name, (x, *node.inputs[1:]), (y,), node.attrs),
        Node("Cast", graph.fresh(f"{y}.cast"), (y,), node.outputs, {"to": to}),
    ]


def _by_scales(steps: Steps, scales: str, told: Sequence[Any]) -> list[Node]:
    """As long as the scales say, rounded down; places are divided by the scales as they are."""
    node, graph = steps.node, steps.graph
    shape: list[Dim] = list(steps.shape(node.inputs[0]))
    axes = [int(a) % len(shape) for a in node.attrs.get("axes", ())] or list(range(len(shape)))
    if graph.shape(scales) != (len(axes),):
        raise ValueError(f"{graph.describe(scales)} for {len(axes)} axes")
    attrs = resize_attributes(node)
    if attrs["coordinates"] == CROP:
        raise steps.refuse(f"scales that depend on data cannot go with {CROP}")
    late = [i for i in range(len(axes)) if len(told) < len(axes) or told[i] != 1]
    extents = tuple(as_attr(shape[axes[i]]) for i in late)
    factors = scales if graph.dtype(scales) == "float32" else steps("Cast", scales, to=1)
    places = {"extents": extents, "positions": tuple(late)}
    made = numbers(steps, "scaled", len(late), factors, **places)
    found = elements(graph.values[sized(steps, made, [None] * len(late))])
    assert found is not None
    for i, size in zip(late, found, strict=True):
        shape[axes[i]] = size
    attrs |= {
        "axes": tuple(axes[i] for i in late),
        "scales": (0.0,) * len(late),
        "told": tuple(late),
        "roi": (0.0, 1.0) * len(late),
        "shape": tuple(as_attr(dim) for dim in shape),
    }
    inputs = (node.inputs[0], factors)
    return [*steps.nodes, Node("apq.ResizeAxes", node.name, inputs, node.outputs, attrs)]

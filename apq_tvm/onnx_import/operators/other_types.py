"""Operators at types that TVM's converters of them, or ours, do not take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from apq_tvm.onnx_import.graph import Graph, np_dtype, type_number
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

Rule = Callable[[Graph, Node], list[Node] | None]

SELU = (1.67326319217681884765625, 1.05070102214813232421875)
"""Its alpha and gamma, where a file leaves them out."""


def eye_like(graph: Graph, node: Node) -> list[Node] | None:
    """EyeLike of another type than its input: of float32, and cast."""
    steps, x = Steps(graph, node), node.inputs[0]
    kind = node.attrs.get("dtype")
    if kind is None or np_dtype(kind) == graph.dtype(x):
        return None
    like = steps("Cast", x, to=type_number("float32"))
    eye = steps("EyeLike", like, k=node.attrs.get("k", 0))
    return steps.done(steps("Cast", eye, to=kind))


def elu(graph: Graph, node: Node) -> list[Node] | None:
    """Elu of float64."""
    return _exponential(graph, node, float(node.attrs.get("alpha", 1.0)), 1.0)


def selu(graph: Graph, node: Node) -> list[Node] | None:
    """Selu of float64."""
    alpha, gamma = node.attrs.get("alpha", SELU[0]), node.attrs.get("gamma", SELU[1])
    return _exponential(graph, node, float(alpha), float(gamma))


def _exponential(graph: Graph, node: Node, alpha: float, gamma: float) -> list[Node] | None:
    steps, x = Steps(graph, node), node.inputs[0]
    if graph.dtype(x) != "float64":
        return None
    zero, one, factor, whole = (steps.number(v, "float64") for v in (0.0, 1.0, alpha, gamma))
    below = steps("Mul", factor, steps("Sub", steps("Exp", x), one))
    made = steps("Where", steps("Less", x, zero), below, x)
    return steps.done(made if gamma == 1.0 else steps("Mul", whole, made))


def thresholded_relu(graph: Graph, node: Node) -> list[Node] | None:
    """ThresholdedRelu of float64."""
    steps, x = Steps(graph, node), node.inputs[0]
    if graph.dtype(x) != "float64":
        return None
    least, zero = (steps.number(v, "float64") for v in (float(node.attrs.get("alpha", 1.0)), 0.0))
    return steps.done(steps("Where", steps("Greater", x, least), x, zero))


def prelu(graph: Graph, node: Node) -> list[Node] | None:
    """PRelu of integers."""
    steps, (x, slope) = Steps(graph, node), node.inputs
    dtype = str(graph.dtype(x))
    if "int" not in dtype:
        return None
    below = steps("Less", x, steps.number(0, dtype))
    return steps.done(steps("Where", below, steps("Mul", x, slope), x))


def in_float32(rule: Rule | None = None, outputs: tuple[int, ...] = (0,)) -> Rule:
    """An operator that is compiled for float32 alone: of float64 it is that, between casts.

    Parameters
    ----------
    rule : callable, optional
        What it is written as of other types.
    outputs : tuple of int
        Those of its input's type; statistics are float32 anyway (ONNX's ``stash_type``).
    """

    def narrowed(graph: Graph, node: Node) -> list[Node] | None:
        if all(graph.dtype(value) != "float64" for value in node.inputs):
            return rule(graph, node) if rule else None
        steps, single, double = Steps(graph, node), type_number("float32"), type_number("float64")
        inputs = tuple(
            steps("Cast", value, to=single) if graph.dtype(value) == "float64" else value
            for value in node.inputs
        )
        asked = [node.outputs[i] for i in outputs if steps.wants(i)]
        made = {value: graph.fresh(f"{value}.f32") for value in asked}
        kept = tuple(made.get(value, value) for value in node.outputs)
        casts = (
            Node("Cast", graph.fresh(f"{node.name}.cast"), (narrow,), (value,), {"to": double})
            for value, narrow in made.items()
        )
        return [*steps.nodes, replace(node, inputs=inputs, outputs=kept), *casts]

    return narrowed


OTHER_TYPES: dict[str, Rule] = {
    "Elu": elu,
    "EyeLike": eye_like,
    "LRN": in_float32(),
    "MeanVarianceNormalization": in_float32(),
    "PRelu": prelu,
    "Selu": selu,
    "ThresholdedRelu": thresholded_relu,
}

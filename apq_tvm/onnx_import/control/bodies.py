"""Graphs inside of nodes: the branches of an If, the body of a Loop or Scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.types import Array, Node

BODIES = {"If": (1, "then_branch else_branch"), "Loop": (2, "body"), "Scan": (0, "body")}
"""Operators with graphs inside: how many inputs come before any others, and the attributes."""

CAPTURES = "captures"
"""Attribute of a node with bodies: what they read from around them, as they call it. The node's
last inputs are those values."""


@dataclass(frozen=True)
class Body:
    """A graph inside of a node.

    Parameters
    ----------
    inputs, outputs : tuple of str
    nodes : tuple of Node
        In topological order.
    weights : mapping of str to ndarray
    captured : tuple of str
        Values from outside that the nodes read, or that are outputs.
    listed : bool
        The first input is declared to be a list of one: so older exporters of torch have the number
        of a Loop's round, which ONNX calls a scalar, and ONNX Runtime gives it as it is declared.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    weights: Mapping[str, Array]
    captured: tuple[str, ...]
    listed: bool = False


def captured_by(
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    nodes: list[Node],
    weights: Mapping[str, Array],
) -> tuple[str, ...]:
    """Values that a body reads and does not make."""
    own = {*inputs, *weights, "", *(out for node in nodes for out in node.outputs)}
    read = (*(v for node in nodes for v in node.inputs), *outputs)
    return tuple(dict.fromkeys(v for v in read if v not in own))


def with_captures(node: Node, count: int) -> Node:
    """`node` with what its bodies capture behind its own inputs, padded to `count` of them."""
    bodies = [a for a in node.attrs.values() if isinstance(a, Body)]
    names = tuple(dict.fromkeys(v for body in bodies for v in body.captured))
    own = (*node.inputs, *[""] * (count - len(node.inputs)))
    return replace(node, inputs=(*own, *names), attrs={**node.attrs, CAPTURES: names})


def own_inputs(node: Node) -> tuple[str, ...]:
    """The inputs of a node without what its bodies capture."""
    return node.inputs[: len(node.inputs) - len(node.attrs[CAPTURES])]


def captures(node: Node) -> dict[str, str]:
    """What bodies capture: as they call it, and as the graph calls it by now."""
    names = node.attrs[CAPTURES]
    return dict(zip(names, node.inputs[len(node.inputs) - len(names) :], strict=True))


def constant_of(graph: Graph, node: Node, value: str) -> Array | None:
    """A value of a node's body that is known before any run: of the body, or captured."""
    body: Body = node.attrs["body"]
    inside = body.weights.get(value)
    return graph.weights.get(captures(node).get(value, "")) if inside is None else inside


def splice(graph: Graph, body: Body, given: Mapping[str, str]) -> tuple[list[Node], list[str]]:
    """The nodes of a body as nodes of the graph.

    Parameters
    ----------
    graph : Graph
        Gets the weights.
    body : Body
    given : mapping of str to str
        Value of the graph by input or captured name.

    Returns
    -------
    list of Node
        Every name unique, in order.
    list of str
        The body's outputs.
    """
    names = {"": "", **given}
    for name, array in body.weights.items():
        there = graph.weights.get(name)
        names[name] = name if there is array else graph.add_weight(name, array)
    nodes = []
    for node in body.nodes:
        inputs = tuple(names[v] for v in node.inputs)
        names |= {out: graph.fresh(out) for out in node.outputs if out}
        outputs = tuple(names[v] for v in node.outputs)
        nodes.append(Node(node.op, graph.fresh(node.name), inputs, outputs, node.attrs))
    return nodes, [names[v] for v in body.outputs]


def each_body(node: Node, change: Callable[[Body], Body]) -> Node:
    """`node` with every body of it changed; nodes without bodies stay themselves."""
    if CAPTURES not in node.attrs:
        return node
    attrs = {k: change(v) if isinstance(v, Body) else v for k, v in node.attrs.items()}
    return replace(node, attrs=attrs)


def copied_in(body: Body, value: str) -> str:
    """What a value of a body is a copy of."""
    makers = {out: node for node in body.nodes for out in node.outputs}
    while value in makers and makers[value].op == "Identity":
        value = makers[value].inputs[0]
    return value

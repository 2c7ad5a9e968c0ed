"""``If``: one branch where the condition is known, else both, between markers."""

from __future__ import annotations

from apq_tvm.onnx_import.control.assume import assumed_squeeze
from apq_tvm.onnx_import.control.bodies import Body, captures, splice
from apq_tvm.onnx_import.control.nothing import nothing_or_selection
from apq_tvm.onnx_import.control.sequences import flattened, rebuilt
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node


def branch(graph: Graph, node: Node) -> list[Node]:
    """The nodes of an If.

    Raises
    ------
    UnsupportedModel
        The condition is no single boolean.
    """
    steps = Steps(graph, node)
    condition = node.inputs[0]
    known = graph.weights.get(condition)
    first, second = (node.attrs[f"{name}_branch"] for name in ("then", "else"))
    if known is not None:
        if known.size != 1:
            raise steps.refuse(f"its condition {graph.describe(condition)} is not one value")
        nodes, results = splice(graph, first if known.item() else second, captures(node))
        return [*nodes, *_results(graph, node, results)]
    assumed = assumed_squeeze(graph, node)
    if assumed is not None:
        return assumed
    selected = nothing_or_selection(graph, node) if graph.opset >= 10 else None
    if selected is not None:
        return selected
    token = graph.fresh(f"{node.name}.then")
    start, then, given = _inside(graph, node, "Then", first, condition, token)
    other = graph.fresh(f"{node.name}.else")
    graph.other_branch |= {token: other, other: token}
    middle, otherwise, made = _inside(graph, node, "Else", second, token, other)
    pairs = [i for i, out in enumerate(node.outputs) if out]
    inputs = (token, other, *(given[i] for i in pairs), *(made[i] for i in pairs))
    outputs = tuple(node.outputs[i] for i in pairs)
    name = graph.fresh(f"{node.name}.end")
    end = Node("apq.EndIf", name, inputs, outputs, {"results": len(outputs)})
    return [start, *then, middle, *otherwise, end]


def _inside(
    graph: Graph, node: Node, kind: str, body: Body, given: str, token: str
) -> tuple[Node, list[Node], list[str]]:
    """The marker before a branch, its nodes, and its outputs."""
    outer = {name: value for name, value in captures(node).items() if name in body.captured}
    inside = {v: graph.fresh(f"{token}.{i}") for i, v in enumerate(flattened(graph, outer))}
    inputs = (given, *inside)
    name = node.name if kind == "Then" else graph.fresh(f"{node.name}.{kind.lower()}")
    equal = graph.equal_in((*graph.inside, token))
    attrs = {"equal": tuple(equal.items())} if equal else {}
    start = Node(f"apq.{kind}", name, inputs, (token, *inside.values()), attrs)
    nodes, outputs = splice(graph, body, rebuilt(graph, outer, inside))
    return start, nodes, outputs


def _results(graph: Graph, node: Node, results: list[str]) -> list[Node]:
    return [
        Node("Identity", graph.fresh(f"{node.name}.{out}"), (value,), (out,))
        for value, out in zip(results, node.outputs, strict=False)
        if out
    ]

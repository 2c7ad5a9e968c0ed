"""Slices of one entry in a loop, ``x[i:i + 1]`` where i counts its rounds: such an entry is always
there, so that its size depends on nothing that only a run knows."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.onnx_import.control.bodies import Body, captures
from apq_tvm.onnx_import.control.counting import ROUND, Counted
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import Dim, compare, symbols
from apq_tvm.types import Node


def single_entries(graph: Graph, node: Node, rounds: Dim) -> Node:
    """A Loop of at most so many rounds, whose body gathers such entries instead."""
    body: Body = node.attrs["body"]
    if not any(inner.op == "Slice" for inner in body.nodes):
        return node
    values, outer = Counted(graph, node), captures(node)
    nodes = []
    for inner in body.nodes:
        shape = graph.known_shape(outer.get(inner.inputs[0], "")) if inner.op == "Slice" else None
        axis = None if shape is None else _axis(values, inner, shape, rounds)
        if axis is not None:
            inputs, attrs = inner.inputs[:2], {"axis": axis}
            inner = Node("Gather", inner.name, inputs, inner.outputs, attrs)
        nodes.append(inner)
    changed = replace(body, nodes=tuple(nodes))
    return replace(node, attrs={**node.attrs, "body": changed})


def _axis(values: Counted, node: Node, shape: tuple[Dim, ...], rounds: Dim) -> int | None:
    """The axis along which a Slice takes one entry that is there; None of others."""
    words = [*node.inputs[1:], "", ""]
    first, end = (values.number(value) for value in words[:2])
    axis = values.number(words[2]) if words[2] else 0
    step = values.number(words[3]) if words[3] else 1
    if first is None or end is None or end - first != 1 or step != 1 or not isinstance(axis, int):
        return None
    before = first - ROUND
    if not -len(shape) <= axis < len(shape) or symbols(before) & symbols(ROUND):
        return None
    there = compare(before, 0) in (0, 1) and compare(shape[axis], before + rounds) in (0, 1)
    return axis % len(shape) if there else None

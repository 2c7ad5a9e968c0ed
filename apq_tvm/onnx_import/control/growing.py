"""Loops that append to a value every round: what they append is collected instead."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from apq_tvm.onnx_import.control.bodies import Body, captures, own_inputs
from apq_tvm.onnx_import.graph import Graph, Part
from apq_tvm.types import Node


def collecting(graph: Graph, node: Node) -> tuple[Node, list[Node]]:
    """A Loop without the states that its body only appends to: what it appends is a result more.

    Those are states that nothing in the body reads but one ``SequenceInsert`` at the end, or one
    ``Concat`` that puts them first.

    Parameters
    ----------
    graph : Graph
    node : Node
        A Loop out of `apq_tvm.onnx_import.control.counting.settled`.

    Returns
    -------
    Node
        The new Loop.
    list of Node
        What gives the outputs of those states behind it.
    """
    body: Body = node.attrs["body"]
    own = own_inputs(node)
    count = len(own) - 2
    added = {i: maker for i in range(count) if (maker := _appends(body, i)) is not None}
    if not added:
        return node, []
    kept = [i for i in range(count) if i not in added]
    inner = replace(
        body,
        inputs=(*body.inputs[:2], *(body.inputs[2 + i] for i in kept)),
        nodes=tuple(n for n in body.nodes if all(n is not maker for maker in added.values())),
        outputs=(
            body.outputs[0],
            *(body.outputs[1 + i] for i in kept),
            *body.outputs[1 + count :],
            *(maker.inputs[1] for maker in added.values()),
        ),
    )
    outputs = (*node.outputs, *[""] * (len(body.outputs) - 1 - len(node.outputs)))
    stacks = {i: graph.fresh(f"{node.name}.added_{i}") for i in added}
    new = replace(
        node,
        inputs=(*own[:2], *(own[2 + i] for i in kept), *captures(node).values()),
        outputs=(*(outputs[i] for i in kept), *outputs[count:], *stacks.values()),
        attrs={**node.attrs, "body": inner},
    )
    behind = []
    for i, maker in added.items():
        start, sequence = own[2 + i], graph.fresh(f"{stacks[i]}.sequence")
        before = graph.sequences.get(start, (Part(start),))
        graph.sequences[sequence] = (*before, Part(stacks[i], 0))
        joins = {} if maker.op == "SequenceInsert" else {"axis": maker.attrs["axis"]}
        op = "ConcatFromSequence" if joins else "Identity"
        name = graph.fresh(f"{node.name}.appended_{i}")
        behind += [Node(op, name, (sequence,), (outputs[i],), joins)] if outputs[i] else []
    return new, behind


def _appends(body: Body, state: int) -> Node | None:
    """The node that appends to a state of a body, if nothing else reads it."""
    before, after = body.inputs[2 + state], body.outputs[1 + state]
    read = Counter(v for inner in body.nodes for v in inner.inputs) + Counter(body.outputs)
    maker = next((n for n in body.nodes if after in n.outputs), None)
    if maker is None or maker.op not in ("SequenceInsert", "Concat") or len(maker.inputs) != 2:
        return None
    alone = read[before] == read[after] == 1
    return maker if alone and maker.inputs[0] == before else None

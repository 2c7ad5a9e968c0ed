"""Loops that append to a value every round: what they append is collected instead."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from apq_tvm.onnx_import.control.bodies import Body, captures, own_inputs
from apq_tvm.onnx_import.graph import Graph, Part, np_dtype
from apq_tvm.types import Node


def collecting(graph: Graph, node: Node) -> tuple[Node, list[Node]]:
    """A Loop without the states that its body only appends to: what it appends is a result more.

    Those are states that nothing in the body reads but one ``SequenceInsert`` at the end, or one
    ``Concat`` that puts them first, perhaps behind a Cast to the type that they have.

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
    chains = {i: _appends(body, i, str(graph.dtype(own[2 + i]))) for i in range(count)}
    added = {i: chain[-1] for i, chain in chains.items() if chain}
    if not added:
        return node, []
    gone = [id(one) for i in added for one in chains[i]]
    kept = [i for i in range(count) if i not in added]
    inner = replace(
        body,
        inputs=(*body.inputs[:2], *(body.inputs[2 + i] for i in kept)),
        nodes=tuple(n for n in body.nodes if id(n) not in gone),
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


def _appends(body: Body, state: int, dtype: str) -> list[Node]:
    """Copies of a state of a body, and the node that appends to it, if nothing else reads it."""
    before, after = body.inputs[2 + state], body.outputs[1 + state]
    read = Counter(v for inner in body.nodes for v in inner.inputs) + Counter(body.outputs)
    chain = list[Node]()
    while read[before] == 1:
        reader = next((n for n in body.nodes if before in n.inputs), None)
        if reader is None:
            return []
        chain.append(reader)
        if after in reader.outputs:
            appends = reader.op in ("SequenceInsert", "Concat") and len(reader.inputs) == 2
            return chain if appends and reader.inputs[0] == before and read[after] == 1 else []
        copies = reader.op == "Cast" and np_dtype(reader.attrs["to"]) == dtype
        if not copies and reader.op != "Identity":
            return []
        (before,) = reader.outputs
    return []

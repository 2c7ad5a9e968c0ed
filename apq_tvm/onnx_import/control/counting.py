"""What TensorFlow makes of recurrent layers: ``while i < n``, with weights as states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from apq_tvm.onnx_import.control.bodies import (
    CAPTURES,
    Body,
    captures,
    constant_of,
    copied_in,
    own_inputs,
)
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import Dim, maximum, minimum, symbol, symbols
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node

ROUND = symbol("this round")  # a space: no dimension of a model is called that
COPIES = frozenset("Cast CastLike Identity Reshape Squeeze Unsqueeze".split())
ORDERS = {
    "Less": (0, 1, 0),
    "LessOrEqual": (0, 1, 1),
    "Greater": (1, 0, 0),
    "GreaterOrEqual": (1, 0, 1),
}
"""Which operand is the smaller one, which the larger, and whether they may be equal."""


def settled(graph: Graph, node: Node) -> tuple[Node, list[Node]]:
    """A Loop whose states that its body hands on as they came are read from around it instead.

    Returns
    -------
    Node
        The Loop without them.
    list of Node
        What gives their outputs.
    """
    body: Body = node.attrs["body"]
    own = own_inputs(node)
    same = [
        i for i in range(len(own) - 2) if copied_in(body, body.outputs[1 + i]) == body.inputs[2 + i]
    ]
    if not same:
        return node, []
    copies = [
        Node("Identity", graph.fresh(f"{node.name}.state{i}"), (own[2 + i],), (node.outputs[i],))
        for i in same
        if i < len(node.outputs) and node.outputs[i]
    ]

    def without(values: tuple[str, ...], before: int) -> tuple[str, ...]:
        return tuple(v for i, v in enumerate(values) if i - before not in same)

    names = tuple(body.inputs[2 + i] for i in same)
    inner = replace(
        body,
        inputs=without(body.inputs, 2),
        outputs=without(body.outputs, 1),
        captured=(*body.captured, *names),
    )
    outer = (*captures(node).values(), *(own[2 + i] for i in same))
    attrs = {**node.attrs, "body": inner, CAPTURES: (*node.attrs[CAPTURES], *names)}
    inputs = (*without(own, 2), *outer)
    return replace(node, inputs=inputs, outputs=without(node.outputs, 0), attrs=attrs), copies


def rounds_of_condition(graph: Graph, node: Node) -> Dim | None:
    """How many rounds a Loop's condition allows, if it is true at first and compares counters.

    Parameters
    ----------
    graph : Graph
    node : Node
        A Loop out of `settled`.

    Returns
    -------
    int or Expr or None
        None: the condition depends on data.
    """
    body: Body = node.attrs["body"]
    values = Counted(graph, node)
    limits: list[Dim] = []
    waiting = [copied_in(body, body.outputs[0])]
    while waiting:
        value = waiting.pop()
        maker = values.makers.get(value)
        always = constant_of(graph, node, value)
        if value in body.inputs[1:2] or (always is not None and always.all()):
            continue  # what it was before: true
        if maker is not None and maker.op == "And":
            waiting += (copied_in(body, v) for v in maker.inputs)
            continue
        limit = values.limit(maker) if maker is not None else None
        if limit is None:
            return None
        limits.append(limit)
    if not limits:
        return None
    least = limits[0]
    for limit in limits[1:]:
        least = minimum(least, limit)
    return maximum(least, 0) + 1


class Counted:
    """Numbers of a body that count up by one a round, as dimensions over `ROUND`."""

    def __init__(self, graph: Graph, node: Node) -> None:
        body: Body = node.attrs["body"]
        self.graph, self.body = graph, body
        self.makers = {out: inner for inner in body.nodes for out in inner.outputs}
        self.known: dict[str, Dim | None] = {body.inputs[0]: ROUND}
        outer = captures(node)
        self._outside(outer)
        for state, made, before in zip(
            body.inputs[2:], body.outputs[1:], own_inputs(node)[2:], strict=False
        ):
            # What it is at the start, one more after every round.
            start = elements(contents(graph, before))
            now = start[0] + ROUND if start is not None and len(start) == 1 else None
            self.known[state] = now
            after = self.number(made)
            if now is None or after is None or after - now != 1:
                self.known[state] = None

    def _outside(self, outer: Mapping[str, str]) -> None:
        for inner, value in outer.items():
            entries = elements(contents(self.graph, value))
            self.known[inner] = entries[0] if entries is not None and len(entries) == 1 else None

    def number(self, value: str) -> Dim | None:
        """One number of the body."""
        if value in self.known:
            return self.known[value]
        weight, maker = self.body.weights.get(value), self.makers.get(value)
        if weight is not None:
            whole = weight.size == 1 and float(weight.reshape(())).is_integer()
            return int(weight.reshape(())) if whole else None
        if maker is None:
            return None
        if maker.op in COPIES:
            return self.number(maker.inputs[0])
        if maker.op not in ("Add", "Sub"):
            return None
        a, b = (self.number(v) for v in maker.inputs)
        if a is None or b is None:
            return None
        return a + b if maker.op == "Add" else a - b

    def limit(self, comparison: Node) -> Dim | None:
        """``n`` if a comparison is ``ROUND < n``."""
        if comparison.op not in ORDERS:
            return None
        small, large, equal = ORDERS[comparison.op]
        a, b = self.number(comparison.inputs[small]), self.number(comparison.inputs[large])
        if a is None or b is None:
            return None
        limit = b - a + ROUND + equal
        return None if symbols(limit) & symbols(ROUND) else limit

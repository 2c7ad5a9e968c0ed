"""``Loop`` and ``Scan``: written out where there are few rounds, else nodes between markers."""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.control.bodies import (
    Body,
    captures,
    constant_of,
    copied_in,
    own_inputs,
    splice,
)
from apq_tvm.onnx_import.control.counting import rounds_of_condition, settled
from apq_tvm.onnx_import.control.growing import collecting
from apq_tvm.onnx_import.control.regions import Looped, end_loop, start_loop
from apq_tvm.onnx_import.control.sequences import flattened, rebuilt
from apq_tvm.onnx_import.control.single import single_entries
from apq_tvm.onnx_import.graph import SIZES, Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, compare, minimum
from apq_tvm.onnx_import.symbolic.unify import unify
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node

FEW_NODES = 256
"""A loop is written out if that makes no more nodes than this."""

MANY_NODES = 2048
"""So many for all loops of a model: rounds that hold loops multiply."""

ENDLESS = (1 << 63) - 1


class _Deferred(Steps):
    """Steps that are inferred once `fold` meets them: bodies hold operators yet to be expanded."""

    def add(self, node: Node) -> None:
        self.nodes.append(node)


def loop(graph: Graph, node: Node) -> list[Node]:
    """The nodes of a Loop (ONNX operator specification, opsets 11 to 25).

    Raises
    ------
    UnsupportedModel
        The number of rounds, and so the size of an output, depends on data.
    """
    node, copies = settled(graph, node)
    steps = _Deferred(graph, node)
    steps.nodes += copies
    body: Body = node.attrs["body"]
    limit, condition, *states = (*own_inputs(node), "", "")[: max(len(own_inputs(node)), 2)]
    rounds = _rounds(graph, limit)
    runs, conditional = _runs(graph, node, condition)
    if not runs:
        rounds, conditional = 0, False
    elif (
        conditional
        and condition in graph.weights
        and (rounds is not None or _endless(graph, limit))
    ):
        allowed = rounds_of_condition(graph, node)
        if allowed is not None:
            rounds = allowed if rounds is None else minimum(rounds, allowed)
            conditional = False
    if isinstance(rounds, int) and not conditional and _is_small(graph, body, rounds, len(states)):
        return _written_out(steps, body, rounds, states)
    if rounds is not None:
        node = single_entries(graph, node, rounds)
    node, behind = collecting(graph, node)
    body, states = node.attrs["body"], list(own_inputs(node)[2:])
    steps.node = node
    collects = len(body.outputs) - 1 > len(states)
    if collects and rounds is None and limit not in graph.weights:
        rounds = _counted(steps, limit)
    if collects and rounds is None:
        raise steps.refuse(
            "it collects a value of each round, but nothing limits their number; give it a largest "
            "number of rounds"
        )
    always = steps.constant(np.asarray(True))
    flags = [condition or always] if conditional else []
    if collects and conditional:
        flags.append(steps.constant(np.zeros(1, np.int64)))  # the rounds that were run
    outer = captures(node)
    sources = flattened(graph, outer)
    looped = Looped(
        [*flags, *states],
        sources,
        trip=rounds,
        limit=limit if rounds is None else "",
        conditional=conditional,
    )
    start = start_loop(steps, node.name, looped)
    inner = start.carried[len(flags) :]
    given = rebuilt(graph, outer, dict(zip(sources, start.captured, strict=True)))
    flag = start.carried[0] if conditional else always
    number = steps.reshape(start.round, 1) if body.listed else start.round
    given |= dict(zip(body.inputs, (number, flag, *inner), strict=False))
    nodes, (again, *made) = splice(graph, body, given)
    steps.nodes += nodes
    carried, entries = made[: len(states)], made[len(states) :]
    if len(flags) > 1:
        done = steps("Add", start.round, steps.constant(np.ones(1, np.int64)))
        carried = [done, *carried]
    if conditional:
        carried = [again, *carried]
    finals, stacks = end_loop(steps, start, carried, entries, "0" * len(entries))
    if len(flags) > 1:
        stacks = [_first(steps, stack, finals[1]) for stack in stacks]
    return [*steps.done(*finals[len(flags) :], *stacks), *behind]


def _first(steps: Steps, stack: str, count: str) -> str:
    """The rows that were collected, of as many as could have been."""
    zero = steps.constant(np.zeros(1, np.int64))
    dims = {"dims": (as_attr(steps.graph.run_size(count, 0)),)}
    return steps("Slice", stack, zero, steps(SIZES, count, **dims), zero)


def _counted(steps: Steps, limit: str) -> Dim | None:
    """The number of rounds as a dimension that a run gives."""
    graph = steps.graph
    if not limit or graph.dtype(limit) != "int64":
        return None
    rounds, token = graph.run_size(limit, 0), graph.fresh(f"{limit}.rounds")
    dims = {"dims": (as_attr(rounds),)}
    steps.add(Node(SIZES, graph.fresh(f"{token}.node"), (limit,), (token,), dims))
    return rounds


def _rounds(graph: Graph, limit: str) -> Dim | None:
    """The number of rounds, if it follows from shapes."""
    known = elements(contents(graph, limit)) if limit else None
    if known is None or len(known) != 1:
        return None
    (rounds,) = known
    if isinstance(rounds, int):
        return None if rounds >= ENDLESS else max(rounds, 0)
    return rounds


def _endless(graph: Graph, limit: str) -> bool:
    """Whether nothing but its condition ends a loop."""
    known = elements(contents(graph, limit)) if limit else [ENDLESS]
    return known is not None and len(known) == 1 and compare(known[0], ENDLESS) in (0, 1)


def _runs(graph: Graph, node: Node, condition: str) -> tuple[bool, bool]:
    """Whether the loop runs at all, and whether it may end before its last round."""
    body: Body = node.attrs["body"]
    before = graph.weights.get(condition)
    if condition and before is not None and not before.any():
        return False, False
    known = not condition or before is not None
    source = copied_in(body, body.outputs[0])
    again = constant_of(graph, node, source)
    passed = source in body.inputs[1:2]
    if known and (passed or (again is not None and bool(again.any()))):
        return True, False
    return True, True


def _is_small(graph: Graph, body: Body, rounds: int, states: int) -> bool:
    collects, nodes = len(body.outputs) - 1 > states, rounds * max(len(body.nodes), 1)
    few = nodes <= FEW_NODES and graph.written_out + nodes <= MANY_NODES
    return few and (rounds > 0 or not collects)


def _written_out(steps: Steps, body: Body, rounds: int, states: list[str]) -> list[Node]:
    """Every round by nodes of its own."""
    graph = steps.graph
    graph.written_out += rounds * len(body.nodes)
    entries: list[list[str]] = [[] for _ in body.outputs[1 + len(states) :]]
    for i in range(rounds):
        given = captures(steps.node)
        number = np.asarray([i] if body.listed else i)
        numbers = (steps.constant(number), steps.constant(np.asarray(True)))
        given |= dict(zip(body.inputs, (*numbers, *states), strict=False))
        nodes, outputs = splice(graph, body, given)
        steps.nodes += nodes
        states = outputs[1 : 1 + len(states)]
        for collected, value in zip(entries, outputs[1 + len(states) :], strict=True):
            collected.append(value)
    return steps.done(*states, *(_stacked(steps, values, 0) for values in entries))


def _stacked(steps: Steps, values: list[str], axis: int) -> str:
    rows = [steps.unsqueeze(value, axis) for value in values]
    return rows[0] if len(rows) == 1 else steps("Concat", *rows, axis=axis)


def scan(graph: Graph, node: Node) -> list[Node]:
    """The nodes of a Scan (ONNX operator specification, opsets 11 to 25).

    Raises
    ------
    UnsupportedModel
        The shape of a scanned value is unknown.
    """
    steps = _Deferred(graph, node)
    body: Body = node.attrs["body"]
    given = own_inputs(node)
    count = int(node.attrs["num_scan_inputs"])
    if not 1 <= count <= len(given):
        raise ValueError(f"num_scan_inputs is {count} of {len(given)} inputs")
    states, scanned = list(given[: len(given) - count]), list(given[len(given) - count :])
    collected = len(body.outputs) - len(states)
    axes = _list(node, "scan_input_axes", count)
    trip: Dim | None = None
    for i, value in enumerate(scanned):
        shape = steps.shape(value)
        trip = unify(graph, trip, shape[axes[i] % len(shape)])
        scanned[i] = _moved(steps, value, axes[i] % len(shape), 0, len(shape))
    backward = "".join(map(str, _list(node, "scan_input_directions", count)))
    outer = captures(node)
    sources = flattened(graph, outer)
    looped = Looped(states, sources, scanned, backward, trip)
    start = start_loop(steps, node.name, looped)
    names = rebuilt(graph, outer, dict(zip(sources, start.captured, strict=True)))
    names |= dict(zip(body.inputs, (*start.carried, *start.entries), strict=True))
    nodes, outputs = splice(graph, body, names)
    steps.nodes += nodes
    backward = "".join(map(str, _list(node, "scan_output_directions", collected)))
    finals, stacks = end_loop(
        steps, start, outputs[: len(states)], outputs[len(states) :], backward
    )
    axes = _list(node, "scan_output_axes", collected)
    pairs = zip(stacks, axes, strict=True)
    stacks = [steps("apq.MoveFirst", x, axis=axis) if axis else x for x, axis in pairs]
    return steps.done(*finals, *stacks)


def move_first(graph: Graph, node: Node) -> list[Node]:
    """``apq.MoveFirst``: the first axis goes to ``axis``, once the rank is known."""
    steps = Steps(graph, node)
    (value,) = node.inputs
    rank = len(steps.shape(value))
    axis = int(node.attrs["axis"]) % rank
    return steps.done(_moved(steps, value, 0, axis, rank))


def _moved(steps: Steps, value: str, source: int, target: int, rank: int) -> str:
    """One axis at another place."""
    order = [axis for axis in range(rank) if axis != source]
    order.insert(target, source)
    return value if source == target else steps("Transpose", value, perm=tuple(order))


def _list(node: Node, name: str, count: int) -> list[int]:
    """A list of integers, all 0 by default."""
    given = [int(v) for v in node.attrs.get(name, ())]
    return given or [0] * count

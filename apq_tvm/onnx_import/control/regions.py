"""Starting and ending regions while an operator is expanded, and keeping them sound afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph, defined, with_attrs
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr
from apq_tvm.onnx_import.symbolic.regions import ENDS, STARTS, captured_inputs
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node


@dataclass
class LoopStart:
    """What a round of a loop reads: the values of `start_loop` by their names inside of it."""

    name: str
    trip: Dim | None
    round: str
    carried: list[str]
    captured: list[str]
    entries: list[str]


@dataclass(frozen=True)
class Looped:
    """What goes into a loop.

    Parameters
    ----------
    carried : sequence of str
        Values before the first round.
    captured : sequence of str
        Read as they are in every round; weights need not be named.
    scanned : sequence of str
        Read entry by entry along the first axis.
    backward : str
        "0" or "1" per scanned value.
    trip : Dim or None
        Number of rounds.
    limit : str
        An int64 that says it instead, known at run time; ``""`` and no `trip` is no limit.
    conditional : bool
        The first carried value is a bool: the loop ends when it is false.
    """

    carried: Sequence[str]
    captured: Sequence[str] = ()
    scanned: Sequence[str] = ()
    backward: str = ""
    trip: Dim | None = None
    limit: str = ""
    conditional: bool = False


def start_loop(steps: Steps, name: str, loop: Looped) -> LoopStart:
    """Add the start of a loop; `name` starts the names of its values."""
    graph = steps.graph
    sources = [*loop.carried, *loop.captured, *loop.scanned]
    inside = [graph.fresh(f"{name}.{i}") for i in range(len(sources))]
    number = graph.fresh(f"{name}.round")
    attrs = {
        "trip": None if loop.trip is None else as_attr(loop.trip),
        "carried": len(loop.carried),
        "captured": len(loop.captured),
        "backward": loop.backward,
        "conditional": loop.conditional,
    }
    inputs = (loop.limit, *sources)
    steps.add(Node("apq.Loop", graph.fresh(name), inputs, (number, *inside), attrs))
    first = len(loop.carried)
    last = first + len(loop.captured)
    return LoopStart(name, loop.trip, number, inside[:first], inside[first:last], inside[last:])


def end_loop(
    steps: Steps, start: LoopStart, carried: Sequence[str], entries: Sequence[str], backward: str
) -> tuple[list[str], list[str]]:
    """Add the end of a loop.

    Parameters
    ----------
    steps : Steps
    start : LoopStart
    carried : sequence of str
        For the next round.
    entries : sequence of str
        To be collected along a new first axis.
    backward : str
        "0" or "1" per entry: where the last round's stands first.

    Returns
    -------
    list of str
        What the last round carried.
    list of str
        What was collected.
    """
    graph = steps.graph
    finals = [graph.fresh(f"{start.name}.final_{i}") for i in range(len(carried))]
    collected = [graph.fresh(f"{start.name}.all_{i}") for i in range(len(entries))]
    attrs = {
        "trip": None if start.trip is None else as_attr(start.trip),
        "carried": len(carried),
        "backward": backward,
    }
    inputs = (start.round, *carried, *entries)
    name = graph.fresh(f"{start.name}.end")
    steps.add(Node("apq.EndLoop", name, inputs, (*finals, *collected), attrs))
    return finals, collected


def without_constants(graph: Graph, node: Node) -> tuple[Node, dict[str, str]]:
    """A region's start without captured weights: they are read from anywhere.

    Returns
    -------
    Node
    dict of str to str
        The weight by its name inside of the region.
    """
    gone = [i for i in captured_inputs(node) if node.inputs[i] in graph.weights]
    alias = {node.outputs[i]: node.inputs[i] for i in gone}
    return _without(node, gone), alias


def _without(node: Node, gone: Sequence[int]) -> Node:
    """A region's start without some of what it captures."""
    if not gone:
        return node
    kept = [i for i in range(len(node.inputs)) if i not in gone]
    new = replace(
        node,
        inputs=tuple(node.inputs[i] for i in kept),
        outputs=tuple(node.outputs[i] for i in kept),
    )
    if node.op == "apq.Loop":
        return with_attrs(new, {"captured": node.attrs["captured"] - len(gone)})
    return new


def tidy_regions(graph: Graph) -> None:
    """Drop what regions take and give for nothing, and move out what does not depend on them.

    What depends on nothing inside of its region is computed before it, once: then it cannot be
    taken for the same as an equal node elsewhere that runs more often, or less.
    """
    if not any(node.op in STARTS for node in graph.nodes):
        return
    graph.sweep()
    _change(graph, [n for n in graph.nodes if n.op == "apq.EndIf"], _without_unread)
    starts = [n for n in reversed(graph.nodes) if n.op in (*STARTS, "apq.Else")]
    _change(graph, starts, _without_uncaptured)
    graph.sweep()
    graph.nodes = _hoisted(graph)
    graph.index()


def _change(graph: Graph, nodes: Sequence[Node], change: Callable[[Graph, Node], Node]) -> None:
    """Change nodes one after another, each once it is known who reads what the others left."""
    changed = {}
    for node in nodes:
        changed[node.name] = new = change(graph, node)
        graph.uses.subtract(node.inputs)
        graph.uses.update(new.inputs)
    graph.nodes = [changed.get(node.name, node) for node in graph.nodes]
    graph.index()


def _without_unread(graph: Graph, node: Node) -> Node:
    """The end of an If without results that nothing reads."""
    count = node.attrs["results"]
    kept = [i for i in range(count) if graph.uses[node.outputs[i]]]
    inputs = [*node.inputs[:2], *(node.inputs[2 + at + i] for at in (0, count) for i in kept)]
    new = replace(node, inputs=tuple(inputs), outputs=tuple(node.outputs[i] for i in kept))
    attrs: dict[str, Any] = {"results": len(kept)}
    if "shapes" in node.attrs:
        attrs["shapes"] = tuple(node.attrs["shapes"][i] for i in kept)
    return with_attrs(new, attrs)


def _without_uncaptured(graph: Graph, node: Node) -> Node:
    """A region's start without captured values that nothing inside of it reads."""
    return _without(node, [i for i in captured_inputs(node) if not graph.uses[node.outputs[i]]])


@dataclass
class _Frame:
    """A region whose nodes are being collected; `start` is None for the whole graph."""

    start: Node | None
    nodes: list[Node] = field(default_factory=list)


def _hoisted(graph: Graph) -> list[Node]:
    """The nodes, each in the outermost region that makes all that it reads."""
    frames = [_Frame(None)]
    depth: dict[str, int] = {}
    for node in graph.nodes:
        if node.op in STARTS:
            frames.append(_Frame(node))
            depth |= dict.fromkeys(node.outputs, len(frames) - 1)
        elif node.op in ENDS:
            frame = frames.pop()
            assert frame.start is not None, node.name
            _refuse_inner_sizes(graph, node, depth, len(frames) - 1)
            frames[-1].nodes += [frame.start, *frame.nodes, node]
            depth |= dict.fromkeys(node.outputs, len(frames) - 1)
        else:
            made = defined(node)
            read = (*node.inputs, *(graph.mentioned(node) - set(made)))
            home = max((depth.get(v, 0) for v in read), default=0)
            frames[home].nodes.append(node)
            depth |= dict.fromkeys((*node.outputs, *made), home)
    return frames[0].nodes


def _refuse_inner_sizes(graph: Graph, end: Node, depth: dict[str, int], outside: int) -> None:
    """A value that leaves a region cannot have a size that is computed inside.

    Raises
    ------
    UnsupportedModel
        Naming the region.
    """
    if any(depth.get(size, 0) > outside for size in graph.mentioned(end)):
        raise UnsupportedModel(
            f"{end.name.removesuffix('.end')!r}: a value that leaves this region has a size "
            "that is computed from data inside of it; compute the size before, or pad the value to "
            "a fixed size"
        )


def check_regions(graph: Graph) -> None:
    """Refuse loops whose values change their shape from round to round.

    Raises
    ------
    UnsupportedModel
        Naming the loop and the value.
    """
    started: list[Node] = []
    for node in graph.nodes:
        if node.op == "apq.Loop":
            started.append(node)
        elif node.op == "apq.EndLoop":
            start = started.pop()
            for before, after in zip(
                start.inputs[1 : 1 + node.attrs["carried"]], node.inputs[1:], strict=False
            ):
                same = same_shape(graph.shape(before), graph.shape(after))
                if not same or graph.dtype(before) != graph.dtype(after):
                    old, new = graph.describe(before), graph.describe(after)
                    raise UnsupportedModel(
                        f"{start.name!r}: a value that the loop carries is {old} before a "
                        f"round and {new} behind it; it must keep its shape or only be appended "
                        "to, or the rounds must be a small constant number"
                    )

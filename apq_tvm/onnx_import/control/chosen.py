"""Branches that give a value in different sizes: those are chosen before the If."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph, Inner, defined, with_attrs
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.run_sizes.shape_inputs import numbers, sized
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, equal, run_symbols
from apq_tvm.onnx_import.symbolic.values import elements
from apq_tvm.types import Node

Shapes = list[tuple[Dim, ...]]


def chosen_sizes(graph: Graph, node: Node) -> list[Node] | None:
    """An ``apq.EndIf`` with the ``shapes`` of its results, if its branches have different ones.

    Which a run takes is worked out in front of the If, so that its results have their memory when
    a branch writes them. None where they are equal, or differ by more than known sizes.
    """
    if "shapes" in node.attrs:
        return None
    count = int(node.attrs["results"])
    made: tuple[Shapes, Shapes] = ([], [])
    for place, value in enumerate(node.inputs[2:]):
        shape = graph.known_shape(value)
        if shape is None:
            return None
        made[place >= count].append(shape)
    if any(len(a) != len(b) for a, b in zip(*made, strict=True)):
        return None
    both = [pair for shapes in zip(*made, strict=True) for pair in zip(*shapes, strict=True)]
    pairs = list(dict.fromkeys(pair for pair in both if equal(*pair) is not True))
    start = next(i for i, n in enumerate(graph.nodes) if node.inputs[0] in n.outputs)
    inner = {name for n in graph.nodes[start:] for name in defined(n)}
    if not pairs or any(run_symbols(dim) & inner for pair in pairs for dim in pair):
        return None
    steps = Steps(graph, node)
    asked = {"extents": tuple(as_attr(pair[i]) for i in range(2) for pair in pairs)}
    known = numbers(steps, "choose", len(pairs), graph.nodes[start].inputs[0], **asked)
    dims = elements(graph.values[sized(steps, known, [None] * len(pairs))])
    assert dims is not None
    graph.nodes[start:start] = steps.nodes
    graph.maker.update((out, step) for step in steps.nodes for out in step.outputs)
    chosen = dict(zip(pairs, dims, strict=True))
    shapes = tuple(
        tuple(as_attr(chosen.get(pair, pair[0])) for pair in zip(*shapes, strict=True))
        for shapes in zip(*made, strict=True)
    )
    return [with_attrs(node, {"shapes": shapes})]


def next_inside(graph: Graph) -> dict[Inner, str] | None:
    """What holds inside of branches, with one more fact than `graph` knew; None if it knew all.

    What both branches of an If need is needed around it: perhaps everywhere, which is inside of no
    branch.
    """
    known = dict(graph.equal_inside)
    for found in (graph.found_inside, graph.sums_inside):
        for (place, name), dim in found.items():
            if (place, name) in known:
                continue
            while place:
                other = (*place[:-1], graph.other_branch[place[-1]])
                if known.get((other, name)) != dim:
                    break
                del known[other, name]
                place = place[:-1]
            return {**known, (place, name): dim}
    return None

"""Shapes of what goes through the ends of loops and branches.

The operators are markers in a flat graph: a region is the nodes between its start and its end.

``apq.Loop(trip, carried.., captured.., scanned..)``
    Starts a loop. Gives the round's number (int64), and per round what it carries, what it captures
    and the entry of what it scans along the first axis. ``trip``: the rounds, an int, text, or None
    for the input or no limit; ``carried``, ``captured``: how many; ``backward``: "0" or "1" per
    scanned value, 1 where it is read from the end; ``conditional``: the first carried value is a
    bool, and the loop ends when it is false.
``apq.EndLoop(round, carried.., entries..)``
    What the next round carries, and the entries to collect. Gives what the last round carried, and
    the collected. ``trip``, ``carried``, ``backward`` (of what is collected).
``apq.Then(condition, captured..)``
    Starts an If. Gives a token, and the captured. ``equal``: pairs of a symbol and the dimension
    that it is where this branch runs; the captured have it then, and a run compares.
``apq.Else(token, captured..)``
    Ends the first branch and starts the second. Gives the same.
``apq.EndIf(token, token, results..)``
    The results of the first branch, then those of the second, as many of each: ``results``.
    ``shapes``: of each result, where the branches have others; a run knows which.

What is made inside of a region leaves it through its end alone, what is read there and is no weight
comes in through its start, so that no rewrite sees across either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph, Shape, replaced
from apq_tvm.onnx_import.symbolic.dims import Dim, Expr, equal, parse
from apq_tvm.types import Array, Node

STARTS, ENDS = ("apq.Loop", "apq.Then"), ("apq.EndLoop", "apq.EndIf")
MARKERS = frozenset((*STARTS, "apq.Else", *ENDS))


def captured_inputs(node: Node) -> range:
    """Positions of the inputs of a region's start, or of ``apq.Else``, that are passed on as they
    are; the outputs that they become stand at the same positions."""
    if node.op == "apq.Loop":
        first = 1 + int(node.attrs["carried"])
        return range(first, first + int(node.attrs["captured"]))
    return range(1, len(node.inputs)) if node.op in ("apq.Then", "apq.Else") else range(0)


def _pass(graph: Graph, source: str, target: str) -> Shape | None:
    dtype = graph.dtype(source)
    if dtype is not None and target:
        graph.dtypes[target] = dtype
    return graph.shape(source)


def _start(graph: Graph, node: Node) -> list[Shape | None]:
    """Outputs stand where the inputs stand; the first is a number or a token."""
    graph.dtypes[node.outputs[0]] = "int64" if node.op == "apq.Loop" else "bool"
    shapes: list[Shape | None] = [()]
    pairs = list(zip(node.inputs, node.outputs, strict=True))[1:]
    shapes += [_pass(graph, source, target) for source, target in pairs]
    equal = dict(node.attrs.get("equal", ()))
    for i in captured_inputs(node):
        known, shape = graph.values.get(node.inputs[i]), shapes[i]
        if known is not None:
            graph.values[node.outputs[i]] = _with_equal(known, equal)
        if shape is not None:
            shapes[i] = tuple(None if dim is None else replaced(dim, equal) for dim in shape)
    if node.op == "apq.Loop":
        for i in range(len(shapes) - len(node.attrs["backward"]), len(shapes)):
            whole = shapes[i]
            shapes[i] = None if whole is None else whole[1:]
    return shapes


def _with_equal(contents: Array, equal: Mapping[str, str]) -> Array:
    """Contents of which some are dimensions, with symbols replaced by what they are equal to."""
    if not equal:
        return contents
    made = np.empty_like(contents)
    for i, entry in enumerate(contents.ravel()):
        made.reshape(-1)[i] = replaced(entry, equal) if isinstance(entry, Expr) else entry
    return made


def _end_loop(graph: Graph, node: Node) -> list[Shape | None]:
    pairs = zip(node.inputs[1:], node.outputs, strict=False)
    shapes = [_pass(graph, source, target) for source, target in pairs]
    for i in range(int(node.attrs["carried"]), len(shapes)):
        entry = shapes[i]
        shapes[i] = None if entry is None else (parse(node.attrs["trip"]), *entry)
    return shapes


def _end_if(graph: Graph, node: Node) -> list[Shape | None]:
    count = int(node.attrs["results"])
    chosen = node.attrs.get("shapes")
    shapes: list[Shape | None] = []
    for i, target in enumerate(node.outputs):
        first, second = node.inputs[2 + i], node.inputs[2 + count + i]
        shape, other = _pass(graph, first, target), _pass(graph, second, target)
        if chosen is not None:
            shapes.append(tuple(parse(dim) for dim in chosen[i]))
        else:
            shapes.append(_same(node, target, shape, other))
    return shapes


def _same(node: Node, value: str, a: Shape | None, b: Shape | None) -> Shape | None:
    """The one shape of two branches.

    Raises
    ------
    UnsupportedModel
        They differ: the shape would depend on data.
    """
    if a is None or b is None:
        return a if b is None else b
    if len(a) != len(b):
        text = f"have {len(a)} and {len(b)} dimensions"
    elif not all(_may_equal(x, y) for x, y in zip(a, b, strict=True)):
        text = f"have the shapes {_text(a)} and {_text(b)}, of sizes computed inside of them,"
    else:
        return tuple(y if x is None else x for x, y in zip(a, b, strict=True))
    name = node.name.removesuffix(".end")
    raise UnsupportedModel(
        f"If {name!r}: the branches {text} for {value!r}, and which one runs is not known when the "
        "model is compiled; fix the dimensions that its condition reads (--dim NAME=SIZE), or "
        "export the model with a fixed branch"
    )


def _may_equal(a: Dim | None, b: Dim | None) -> bool:
    return a is None or b is None or equal(a, b) is True


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


REGION_RULES: dict[str, Callable[[Graph, Node], list[Shape | None]]] = {
    **dict.fromkeys(("apq.Loop", "apq.Then", "apq.Else"), _start),
    "apq.EndLoop": _end_loop,
    "apq.EndIf": _end_if,
}

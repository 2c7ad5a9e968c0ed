"""NonZero, Compress, Unique, NonMaxSuppression: how much they select is counted first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.run_sizes.shape_inputs import sized
from apq_tvm.onnx_import.symbolic.carry import uniform
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, minimum, product
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node


def _size(steps: Steps, count: str) -> Dim:
    """The dimension that one int64 [1] is at a run."""
    (dim,) = elements(steps.graph.values[sized(steps, count, [None])]) or [0]
    return dim


def _places(steps: Steps, x: str) -> tuple[str, Dim]:
    """Indices [rank, count] of what is not 0 in `x`, and how many."""
    rank = len(steps.shape(x))
    true = x if steps.graph.dtype(x) == "bool" else steps("Cast", x, to=9)
    flat = steps.reshape(steps("Cast", true, to=7), product(steps.shape(x)))
    total = steps("ReduceSum", flat, *_axes(steps, 0), **_old_axes(steps, 0), keepdims=1)
    count = _size(steps, total)
    return steps("apq.NonZero", true, shape=(rank, as_attr(count)), dtype="int64"), count


def _axes(steps: Steps, *axes: int) -> tuple[str, ...]:
    since = steps.graph.opset >= 13
    return (steps.constant(np.asarray(axes, np.int64)),) if since else ()


def _old_axes(steps: Steps, *axes: int) -> dict[str, tuple[int, ...]]:
    return {} if steps.graph.opset >= 13 else {"axes": axes}


def non_zero(graph: Graph, node: Node) -> list[Node]:
    """NonZero.

    Raises
    ------
    UnsupportedModel
        Of a scalar.
    """
    steps, x = Steps(graph, node), node.inputs[0]
    shape, value = steps.shape(x), uniform(graph, x)
    if not shape:
        raise steps.refuse("its input is a scalar; reshape it to [1]")
    if value is None:
        return steps.done(_places(steps, x)[0])
    if not value:
        return steps.done(steps.constant(np.zeros((len(shape), 0), np.int64)))
    return steps.done(_every_place(steps, shape))


def _every_place(steps: Steps, shape: Sequence[Dim]) -> str:
    """Indices [rank, count] of all elements: torch writes slices that are assigned to so."""
    rows = []
    for axis, dim in enumerate(shape):
        ones = (dim if i == axis else 1 for i in range(len(shape)))
        along = steps.expand(steps.reshape(steps.range(dim), *ones), *shape)
        rows.append(steps.reshape(along, 1, product(shape)))
    return rows[0] if len(rows) == 1 else steps("Concat", *rows, axis=0)


def compress(graph: Graph, node: Node) -> list[Node]:
    """Compress: a Gather by the places that are true."""
    steps, (x, condition) = Steps(graph, node), node.inputs
    shape, axis = steps.shape(x), node.attrs.get("axis")
    if axis is None:
        x, axis = steps.reshape(x, product(shape)), 0
    places, count = _places(steps, condition)
    return steps.done(steps("Gather", x, steps.reshape(places, count), axis=int(axis)))


def unique(graph: Graph, node: Node) -> list[Node]:
    """Unique: all outputs as long as they can be, then cut to what there is."""
    steps, x = Steps(graph, node), node.inputs[0]
    shape, axis = steps.shape(x), node.attrs.get("axis")
    if axis is None:
        x, shape, axis = steps.reshape(x, product(shape)), (product(shape),), 0
    axis = int(axis) % len(shape)
    count = shape[axis]
    order = [axis, *(i for i in range(len(shape)) if i != axis)]
    rows = x if axis == 0 else steps.transpose(x, *order)
    rows = steps.reshape(rows, count, product([shape[i] for i in order[1:]]))
    names = [graph.fresh(f"{node.name}.{part}") for part in ("first", "inverse", "times", "count")]
    scratch = [graph.fresh(f"{node.name}.{part}") for part in ("order", "other")]
    made = Node(
        "apq.Unique",
        graph.fresh(f"{node.name}.unique"),
        (rows,),
        (*names, *scratch),
        {
            "sorted": bool(node.attrs.get("sorted", 1)),
            "shapes": ((as_attr(count),),) * 3 + ((1,),) + ((as_attr(count),),) * 2,
            "dtypes": ("int64",) * 6,
        },
    )
    steps.add(made)
    first, inverse, times, total = names
    size = _size(steps, total)
    first, times = (_cut(steps, value, size, 1) for value in (first, times))
    values = steps("Gather", x, first, axis=axis)
    return steps.done(values, first, inverse, times)


def _cut(steps: Steps, value: str, size: Dim, rank: int) -> str:
    """The first `size` rows."""
    rest = steps.shape(value)[1:rank]
    shape = tuple(as_attr(dim) for dim in (size, *rest))
    return steps("apq.Slice", value, axes=(0,), starts=(0,), steps=(1,), shape=shape)


def non_max_suppression(graph: Graph, node: Node) -> list[Node]:
    """NonMaxSuppression: as many rows as there can be, then cut to those there are."""
    steps = Steps(graph, node)
    boxes, scores = node.inputs[:2]
    batch, classes, count = steps.shape(scores, 3)
    steps.shape(boxes, 3)
    limit = steps.input(2) or steps.number(0, "int64")
    given = contents(graph, limit)
    most = count
    if given is not None and given.size == 1 and isinstance(given.ravel()[0], int):
        most = minimum(count, max(int(given.ravel()[0]), 0))
    rows = product([batch, classes, most])
    overlap, least = (
        steps.reshape(steps.input(i) or steps.number(default), 1)
        for i, default in ((3, 0.0), (4, -np.inf))
    )
    names = [graph.fresh(f"{node.name}.{part}") for part in ("rows", "count", "order")]
    made = Node(
        "apq.NonMaxSuppression",
        graph.fresh(f"{node.name}.select"),
        (boxes, scores, steps.reshape(limit, 1), overlap, least),
        tuple(names),
        {
            "center": bool(node.attrs.get("center_point_box", 0)),
            "shapes": ((as_attr(rows), 3), (1,), (as_attr(count),)),
            "dtypes": ("int64",) * 3,
        },
    )
    steps.add(made)
    return steps.done(_cut(steps, names[0], _size(steps, names[1]), 2))


def _at_a_run(rule: Callable[[Graph, Node], list[Node]]) -> Callable[..., list[Node] | None]:
    """`rule`, but for constants: what those select is folded."""

    def selects(graph: Graph, node: Node) -> list[Node] | None:
        constant = all(value in graph.weights for value in node.inputs if value)
        return None if constant else rule(graph, node)

    return selects


SELECTIONS: dict[str, Callable[[Graph, Node], list[Node] | None]] = {
    "Compress": _at_a_run(compress),
    "NonMaxSuppression": _at_a_run(non_max_suppression),
    "NonZero": _at_a_run(non_zero),
    "Unique": _at_a_run(unique),
}
"""By operator."""

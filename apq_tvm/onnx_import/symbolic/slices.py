"""Parts of an axis as ``apq.Slice``: Slice, Gather of even steps, and Split."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.carry import (
    Rewritten,
    carried,
    full,
    limit,
    reshape_to,
    uniform,
)
from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    as_attr,
    compare,
    floordiv,
    maximum,
    minimum,
    negative,
    not_negative,
)
from apq_tvm.onnx_import.symbolic.unify import of_caches, same_shape
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node


def slice_(graph: Graph, node: Node) -> Rewritten:
    """Slices of symbolic dimensions or with symbolic limits, as ``apq.Slice``."""
    x = graph.known_shape(node.inputs[0])
    given = [elements(contents(graph, v)) if v else None for v in node.inputs[1:]]
    given += [None] * (4 - len(given))
    starts, ends, axes, steps = given
    if x is None or starts is None or ends is None:
        return None
    if (len(node.inputs) > 3 and node.inputs[3] and axes is None) or (
        len(node.inputs) > 4 and node.inputs[4] and steps is None
    ):
        return None
    at = [int(a) % len(x) for a in axes] if axes else list(range(len(starts)))  # type: ignore[arg-type]
    by = steps or [1] * len(starts)
    shape, spans = list(x), []
    first: Dim | None
    last: Dim | None
    for start, end, axis, step in zip(starts, ends, at, by, strict=True):
        if not isinstance(step, int) or not step:
            return None
        if step > 0:
            first = _clamped(graph, node, start, x[axis])
            last = _clamped(graph, node, end, x[axis])
        else:
            first = _clamped_back(start, x[axis], 0)
            last = _clamped_back(end, x[axis], -1)
        if first is None or last is None:
            return None  # backwards, from where may lie on either side
        count = maximum(floordiv(last - first + step - (1 if step > 0 else -1), step), 0)
        shape[axis] = count
        spans.append((axis, first, step))
    if same_shape(x, tuple(shape)) and all(step > 0 for _, _, step in spans):
        return node.inputs[0]
    numbers = all(isinstance(v, int) for a, first, _ in spans for v in (x[a], first, shape[a]))
    if numbers:
        return None
    value = uniform(graph, node.inputs[0])
    if value is not None:
        return full(node, shape, value)
    return carried(
        "apq.Slice",
        node,
        shape,
        axes=tuple(axis for axis, _, _ in spans),
        starts=tuple(as_attr(first) for _, first, _ in spans),
        steps=tuple(step for _, _, step in spans),
    )


def _clamped(graph: Graph, node: Node, at: Dim, size: Dim) -> Dim:
    """A slice limit counted from the front and kept inside the axis.

    A constant table (position ids, causal masks) sliced to a symbolic length stands for a limit of
    that length, kept in `Graph.limits`: past it the model itself is out of range.
    """
    if negative(at):
        at = maximum(at + size, 0)
    elif not not_negative(at):
        rest = size - at
        if node.inputs[0] in graph.weights and isinstance(size, int) and not_negative(rest):
            if limit(graph, rest, size):
                return at  # the last rows of a table, as many as a symbol says
        at = maximum(at + size * minimum(maximum(0 - at, 0), 1), 0)
    if node.inputs[0] in graph.weights and isinstance(size, int) and limit(graph, at, size):
        return at
    order = compare(at, size)
    if order is None and of_caches(graph, at, size):
        return at
    return minimum(at, size) if order is None else (at if order <= 0 else size)


def _clamped_back(at: Dim, size: Dim, least: int) -> Dim | None:
    """A limit of a slice that runs backwards: the start is an element, the end one before one."""
    if negative(at):
        return maximum(at + size, least)
    return minimum(at, size - 1) if not_negative(at) else None


def gather(graph: Graph, node: Node) -> Rewritten:
    """One entry or evenly spaced ones are a slice, e.g. ``x[:, 0]`` in CLS pooling."""
    x, at = graph.known_shape(node.inputs[0]), graph.weights.get(node.inputs[1])
    if x is None or at is None or at.ndim > 1 or not at.size or node.inputs[0] in graph.weights:
        return None
    axis = node.attrs.get("axis", 0) % len(x)
    indices: list[Dim] = [i if i >= 0 else x[axis] + i for i in at.reshape(-1).tolist()]
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    even = all(b - a == step for a, b in pairwise(indices))
    if not even or not isinstance(step, int) or step < 1:
        return None
    inside = compare(0, indices[0]) in (-1, 0) and compare(indices[-1] + 1, x[axis]) in (-1, 0)
    if not inside:
        return None  # it depends on the input, which must be checked at run time
    shape = (*x[:axis], len(indices), *x[axis + 1 :])
    starts, steps = (as_attr(indices[0]),), (step,)
    if at.ndim:
        return carried("apq.Slice", node, shape, axes=(axis,), starts=starts, steps=steps)
    inner = graph.fresh(f"{node.outputs[0]}.slice")
    first = Node(
        "apq.Slice",
        graph.fresh(f"{node.name}.slice"),
        node.inputs[:1],
        (inner,),
        {
            "shape": tuple(as_attr(dim) for dim in shape),
            "axes": (axis,),
            "starts": starts,
            "steps": steps,
        },
    )
    last = Node("Reshape", node.name, (inner,), node.outputs)
    return [first, reshape_to(graph, last, shape, (*x[:axis], *x[axis + 1 :]))]


def split(graph: Graph, node: Node) -> Rewritten:
    """Parts of an axis that is not a number are slices: no constant could say where to cut."""
    x = graph.known_shape(node.inputs[0])
    shapes = [graph.known_shape(out) for out in node.outputs]
    if x is None or any(shape is None for shape in shapes):
        return None
    axis = node.attrs.get("axis", 0) % len(x)
    sizes = [shape[axis] for shape in (x, *shapes)]  # type: ignore[index]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    nodes: list[Node] = []
    start: Dim = 0
    for number, (out, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
        assert shape is not None
        if out:
            part = carried(
                "apq.Slice", node, shape, axes=(axis,), starts=(as_attr(start),), steps=(1,)
            )
            name = graph.fresh(f"{node.name}:{number}") if number else node.name
            nodes.append(replace(part, name=name, outputs=(out,)))
        start = start + shape[axis]
    return nodes

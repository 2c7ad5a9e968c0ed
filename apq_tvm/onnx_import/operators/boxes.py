"""ScatterND into a box, as exporters write ``x[:, a:b] = y``: what lies around it, and y, joined.

Exporters number every element that is set, which takes 8 bytes of indices for each axis of it.
"""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, compare
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Array, Node

REDUCTIONS = {"none": "", "add": "Add", "mul": "Mul"}
"""What joins old and new values. (Of ``max`` and ``min`` ONNX says less about NaN.)"""


def scatter_nd(graph: Graph, node: Node) -> list[Node] | None:
    """Slices and Concats for a ScatterND whose indices count up along every axis that they name.

    Returns
    -------
    list of Node or None
        None: they do not, or nobody knows; the node stays.
    """
    data, indices, updates = node.inputs
    x, of, given = (graph.known_shape(value) for value in node.inputs)
    join = REDUCTIONS.get(node.attrs.get("reduction", "none"))
    if x is None or given is None or not of or len(of) - 1 != of[-1] or join is None:
        return None
    if len(of) - 1 > len(x) or not same_shape(given, (*of[:-1], *x[len(of) - 1 :])):
        return None
    spans: list[tuple[int, int] | None] = []  # of an axis; None for all of it
    for axis, extent in enumerate(of[:-1]):
        start, size = _start(graph, indices, axis, of), x[axis]
        if start is None:
            return None
        if start == 0 and compare(extent, size) == 0:
            spans.append(None)
            continue
        if not isinstance(extent, int) or not isinstance(size, int):
            return None
        start += size if start < 0 else 0
        if not extent or not 0 <= start <= size - extent:
            return None
        spans.append((start, start + extent))
    steps, inside, around = Steps(graph, node), data, []
    for axis, within in enumerate(spans):
        around.append(inside)  # in the box along the axes before this one
        if within is not None and (join or any(spans[axis + 1 :])):
            inside = steps.slice(inside, axis, *within)
    box = steps(join, inside, updates) if join else updates
    for axis in reversed(range(len(spans))):
        if (span := spans[axis]) is None:
            continue
        pieces = [box]
        if span[0]:
            pieces.insert(0, steps.slice(around[axis], axis, 0, span[0]))
        if span[1] != x[axis]:
            pieces.append(steps.slice(around[axis], axis, span[1], int(x[axis])))  # type: ignore[arg-type]
        box = steps("Concat", *pieces, axis=axis)
    return steps.done(box)


def _start(graph: Graph, indices: str, axis: int, shape: tuple[Dim, ...]) -> int | None:
    """The first index of an axis, if its indices count up along it and along no other."""
    known, box = graph.weights.get(indices), shape[:-1]
    if known is not None:
        return _counted(known[..., axis], axis, box)
    parts = graph.made_by(indices, "Concat")
    if parts is not None:
        if int(parts.attrs["axis"]) % len(shape) != len(box) or len(parts.inputs) != len(box):
            return None
        indices = parts.inputs[axis]
        known = graph.weights.get(indices)
        if known is not None:
            return _counted(known[..., 0], axis, box)
    column = graph.made_by(indices, "Unsqueeze", "Reshape")
    inner = None if column is None else graph.known_shape(column.inputs[0])
    if column is None or inner is None or not same_shape(inner, box):
        return None
    return _line(graph, column.inputs[0], axis, box)


def _line(graph: Graph, value: str, axis: int, box: tuple[Dim, ...]) -> int | None:
    """`_start` of the indices of one axis, which broadcast to the box."""
    known, shape = graph.weights.get(value), graph.known_shape(value)
    if known is not None:
        return _counted(known, axis, box)
    made = graph.made_by(value, "apq.Expand", "apq.Full", "apq.Range", "Reshape", "Unsqueeze")
    if made is None or shape is None:
        return None
    if made.op == "apq.Expand":
        return _line(graph, made.inputs[0], axis, box)
    if made.op == "apq.Full":  # one number, of an axis where the box has one entry
        return int(made.attrs["value"]) if box[axis] == 1 else None
    place = axis - (len(box) - len(shape))
    long = [i for i, dim in enumerate(shape) if dim != 1]
    if place < 0 or long not in ([], [place]) or compare(shape[place], box[axis]) != 0:
        return None
    if made.op == "apq.Range":
        first, step = made.attrs["start"], made.attrs["delta"]
        return first if isinstance(first, int) and step == 1 else None
    source = graph.known_shape(made.inputs[0])
    if source is None or len(source) != 1:
        return None
    return _line(graph, made.inputs[0], 0, (shape[place],))


def _counted(indices: Array, axis: int, box: tuple[Dim, ...]) -> int | None:
    """`_start` of known indices, which broadcast to the box."""
    place = axis - (len(box) - indices.ndim)
    count = indices.shape[place] if place >= 0 else 1
    if not indices.size or box[axis] != count:
        return None
    first = int(indices.reshape(-1)[0])
    shape = [count if i == place else 1 for i in range(indices.ndim)]
    line = np.arange(first, first + count).reshape(shape)
    return first if (indices == line).all() else None

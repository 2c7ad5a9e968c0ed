"""Sequences whose entries are known tensors, or lie along an axis of one: no run ever holds one.

What makes a sequence is kept account of (`Graph.sequences`) and makes no node; what reads entries
reads those tensors. Exporters write them for lists of Python: chunks of a tensor, what the rounds
of a loop append (`apq_tvm.onnx_import.control.growing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph, Part
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.run_sizes.shape_inputs import entries, sized
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, compare, floordiv
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node

Parts = tuple[Part, ...]

MOST = 512
"""Entries that a sequence of pieces may have: each is a value of the graph."""


def refuse_sequences(graph: Graph, node: Node) -> None:
    """Refuse a node that reads a sequence and is none of `SEQUENCES`.

    Raises
    ------
    UnsupportedModel
        Naming both.
    """
    read = [value for value in node.inputs if value in graph.sequences]
    if read:
        raise UnsupportedModel(
            f"{node.op.removeprefix('apq.')} {node.name!r} reads {read[0]!r}, a sequence: those of "
            "loops can be compiled if every round appends one entry, and those of branches if the "
            "condition is known; stack the tensors in the model"
        )


def flattened(graph: Graph, outer: Mapping[str, str]) -> list[str]:
    """The tensors that a region captures: those of sequences instead of the sequences."""
    values: dict[str, None] = {}
    for value in outer.values():
        parts = graph.sequences.get(value)
        read = [value] if parts is None else [part.value for part in parts]
        values |= dict.fromkeys(v for v in read if parts is None or v not in graph.weights)
    return list(values)


def rebuilt(graph: Graph, outer: Mapping[str, str], inside: Mapping[str, str]) -> dict[str, str]:
    """What captured names are inside of a region, by the names that `flattened` tensors have."""
    given = {}
    for name, value in outer.items():
        parts = graph.sequences.get(value)
        if parts is None:
            given[name] = inside[value]
            continue
        given[name] = graph.fresh(value)
        moved = (replace(p, value=inside.get(p.value, p.value)) for p in parts)
        graph.sequences[given[name]] = tuple(moved)
    return given


def _made(graph: Graph, node: Node, parts: Parts) -> list[Node]:
    (value,) = node.outputs
    if any(spec.name == value for spec in graph.outputs):
        raise UnsupportedModel(
            f"output {value!r} is a sequence; only tensors work: join them in the model "
            "(torch.cat, torch.stack), or give each an output of its own"
        )
    if len(parts) > MOST:
        raise UnsupportedModel(
            f"{node.op} {node.name!r}: {value!r} has {len(parts)} entries, up to {MOST} can be "
            "compiled; stack them, or collect them in a Loop"
        )
    graph.sequences[value] = parts
    return []


def _parts(steps: Steps) -> Parts:
    parts = steps.graph.sequences.get(steps.input(0))
    if parts is None:
        raise steps.refuse(f"the entries of the sequence {steps.input(0)!r} are not known")
    return parts


def _number(steps: Steps, value: str) -> int | None:
    """A number that is known when the model is compiled."""
    found = elements(contents(steps.graph, value))
    return found[0] if found is not None and len(found) == 1 and isinstance(found[0], int) else None


def identity(graph: Graph, node: Node) -> list[Node] | None:
    """Identity of a sequence; of a tensor it stays."""
    parts = graph.sequences.get(node.inputs[0])
    return None if parts is None else _made(graph, node, parts)


def construct(graph: Graph, node: Node) -> list[Node]:
    """SequenceConstruct and SequenceEmpty."""
    return _made(graph, node, tuple(Part(value) for value in node.inputs))


def _place(steps: Steps, parts: Parts, index: int, end: int) -> int:
    """The part at a position of a sequence, from 0 to `end`."""
    position = _number(steps, steps.input(index)) if steps.input(index) else end
    if position is None or any(part.axis is not None for part in parts):
        raise steps.refuse(
            f"which entry is meant depends on data, or on how many {steps.input(0)!r} has"
        )
    position += len(parts) if position < 0 else 0
    if not 0 <= position <= end:
        raise ValueError(f"position {position} of {len(parts)} entries")
    return position


def insert(graph: Graph, node: Node) -> list[Node]:
    """SequenceInsert, at the end or at a known position."""
    steps, value = Steps(graph, node), Part(node.inputs[1])
    parts = _parts(steps)
    at = _place(steps, parts, 2, len(parts)) if steps.input(2) else len(parts)
    return _made(graph, node, (*parts[:at], value, *parts[at:]))


def erase(graph: Graph, node: Node) -> list[Node]:
    """SequenceErase."""
    steps = Steps(graph, node)
    parts = _parts(steps)
    at = _place(steps, parts, 1, len(parts) - 1)
    return _made(graph, node, parts[:at] + parts[at + 1 :])


def length(graph: Graph, node: Node) -> list[Node]:
    """SequenceLength."""
    steps = Steps(graph, node)
    total: Dim = 0
    for part in _parts(steps):
        total = total + (1 if part.axis is None else steps.shape(part.value)[part.axis])
    return steps.done(steps.dim(total))


def at(graph: Graph, node: Node) -> list[Node]:
    """SequenceAt: of entries along an axis any, of others a known one."""
    steps = Steps(graph, node)
    parts = _parts(steps)
    if len(parts) != 1 or parts[0].axis is None:
        return steps.done(parts[_place(steps, parts, 1, len(parts) - 1)].value)
    (part,) = parts
    axis = int(parts[0].axis)
    position = node.inputs[1]
    if graph.shape(position) not in ((), None):
        position = steps.reshape(position)
    entry = steps("Gather", part.value, position, axis=axis)
    return steps.done(steps.unsqueeze(entry, axis) if part.keep else entry)


def split(graph: Graph, node: Node) -> list[Node]:
    """SplitToSequence: into single entries, pieces of one size, or pieces of given sizes."""
    steps, x = Steps(graph, node), node.inputs[0]
    axis = int(node.attrs.get("axis", 0)) % len(steps.shape(x))
    if not steps.input(1):
        return _made(graph, node, (Part(x, axis, bool(node.attrs.get("keepdims", 1))),))
    pieces = _pieces(steps, steps.shape(x)[axis])
    if pieces is None:
        return _made(graph, node, (Part(x, axis, keep=True),))
    count, sizes = pieces
    if not 0 < count <= MOST:
        raise steps.refuse(f"{count} pieces; from 1 to {MOST} can be compiled")
    names = tuple(graph.fresh(f"{node.outputs[0]}.{i}") for i in range(count))
    graph.sequences[node.outputs[0]] = tuple(Part(name) for name in names)
    name = graph.fresh(f"{node.name}.split")
    if graph.opset >= 13:
        return [*steps.nodes, Node("Split", name, (x, sizes), names, {"axis": axis})]
    known = elements(contents(graph, sizes)) or []
    if not known or not all(isinstance(size, int) for size in known):
        raise steps.refuse("pieces whose sizes depend on the input need opset 13; export with it")
    return [*steps.nodes, Node("Split", name, (x,), names, {"axis": axis, "split": tuple(known)})]


def _pieces(steps: Steps, extent: Dim) -> tuple[int, str] | None:
    """How many pieces, and a tensor of their sizes; None where each is one entry."""
    value = steps.input(1)
    shape, advice = steps.graph.known_shape(value), "cut it into a fixed number of pieces"
    if shape != ():
        if not shape or not isinstance(shape[0], int):
            raise steps.refuse(f"how many pieces there are depends on the input; {advice}")
        return len(entries(steps.graph, value)), value
    known = elements(contents(steps.graph, value))
    if known == [1]:
        return None
    size = 0 if known is None else known[0]
    count = 0 if compare(size, 1) not in (0, 1) else -floordiv(-extent, size)
    if not isinstance(count, int) or size == 0:
        raise steps.refuse(
            f"into how many pieces it cuts {extent} depends on the input; fix the dimension with "
            f"--dim, or {advice}"
        )
    sizes = [*[size] * (count - 1), extent - size * (count - 1)] if 0 < count <= MOST else []
    if all(isinstance(dim, int) for dim in sizes):
        return count, steps.constant(np.asarray(sizes, np.int64))
    dims = tuple(as_attr(dim) for dim in sizes)
    told = steps("apq.Dims", dims=dims, shape=(len(dims),), dtype="int64")
    return count, sized(steps, told, sizes)


def concat(graph: Graph, node: Node) -> list[Node]:
    """ConcatFromSequence: entries joined along an axis of theirs, or stacked along a new one."""
    steps = Steps(graph, node)
    parts, axis = _parts(steps), int(node.attrs["axis"])
    if not parts:
        raise steps.refuse("the sequence has no entries")
    new = bool(node.attrs.get("new_axis", 0))
    rows = [_joined(steps, part, axis, new) for part in parts]
    rank = len(steps.shape(rows[0]))
    return steps.done(rows[0] if len(rows) == 1 else steps("Concat", *rows, axis=axis % rank))


def _joined(steps: Steps, part: Part, axis: int, new: bool) -> str:
    """A part of a sequence as one tensor."""
    x, shape = part.value, steps.shape(part.value)
    if part.axis is None:
        at = _axis(axis, len(shape) + new)
        return steps.unsqueeze(x, at) if new else x
    if part.keep:
        x = steps.unsqueeze(x, part.axis + 1)
        shape = steps.shape(x)
    rank = len(shape) - 1
    axis = _axis(axis, rank + new)
    order = [i for i in range(len(shape)) if i != part.axis]
    order.insert(axis, part.axis)
    if order != sorted(order):
        x, shape = steps.transpose(x, *order), tuple(shape[i] for i in order)
    if new:
        return x
    return steps.reshape(x, *shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _axis(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of entries with {rank} axes")
    return axis % rank


SEQUENCES: dict[str, Callable[[Graph, Node], list[Node] | None]] = {
    "ConcatFromSequence": concat,
    "Identity": identity,
    "SequenceAt": at,
    "SequenceConstruct": construct,
    "SequenceEmpty": construct,
    "SequenceErase": erase,
    "SequenceInsert": insert,
    "SequenceLength": length,
    "SplitToSequence": split,
}
"""By operator."""

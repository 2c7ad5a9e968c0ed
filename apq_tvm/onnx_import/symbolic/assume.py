"""Sizes that the model needs to be equal and that no shape proves to be: checked at run time."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, equal
from apq_tvm.onnx_import.symbolic.shape_rules import ELEMENTWISE
from apq_tvm.types import Node

ALIGNED = frozenset((*ELEMENTWISE, "PRelu"))


def assume_equal(graph: Graph) -> None:
    """Put ``apq.Assume`` in front of operands whose sizes are only equal for some inputs.

    An image of 640 pixels that was halved five times and doubled again fits the one that was halved
    four times; one of 650 does not, and a run refuses it: inside of a branch, if that one runs.
    What a loop carries is such a value too.
    """
    depth, loops = 0, list[Node]()
    for node in graph.each():
        if node.op == "apq.Loop":
            loops.append(node)
        elif node.op == "apq.EndLoop":
            _keep(graph, "apq.AssumeHere" if depth else "apq.Assume", loops.pop(), node)
        depth += (node.op == "apq.Then") - (node.op == "apq.EndIf")
        op = "apq.AssumeHere" if depth else "apq.Assume"
        out = graph.known_shape(node.outputs[0]) if node.outputs else None
        if out is None:
            continue
        if node.op in ALIGNED:
            _align(graph, op, node, out, None)
        elif node.op == "MatMul":
            _align_products(graph, op, node, out)
        elif node.op == "Concat":
            _align(graph, op, node, out, node.attrs["axis"] % len(out))


def _align(graph: Graph, op: str, node: Node, out: tuple[Dim, ...], free: int | None) -> None:
    """Give every operand of `node` the sizes of its result, apart from axis `free`."""
    for value in dict.fromkeys(v for v in node.inputs if v and v not in graph.weights):
        shape = graph.known_shape(value)
        if shape is None or len(shape) > len(out):
            continue
        _fit(graph, op, node, value, _wanted(shape, out, free))


def _align_products(graph: Graph, op: str, node: Node, out: tuple[Dim, ...]) -> None:
    """Batch axes of both operands, and the second's inner size: that of a batch which an exporter
    took for a constant is only known to fit at run time."""
    shapes = [graph.known_shape(value) for value in node.inputs]
    if any(shape is None or len(shape) < 2 for shape in shapes):
        return
    inner = shapes[0][-1]  # type: ignore[index]
    for value, shape in zip(node.inputs, shapes, strict=True):
        assert shape is not None
        last = shape[-2:] if value == node.inputs[0] else (inner, shape[-1])
        if value not in graph.weights:
            _fit(graph, op, node, value, _wanted(shape, (*out[:-2], *last), None))


def _keep(graph: Graph, op: str, start: Node, end: Node) -> None:
    """What a loop carries keeps its shape, where nothing says that it cannot."""
    count = int(end.attrs["carried"])
    for before, after in zip(start.inputs[1 : 1 + count], end.inputs[1:], strict=False):
        old, new = graph.known_shape(before), graph.known_shape(after)
        if old is None or new is None or len(old) != len(new) or after in graph.weights:
            continue
        known = [equal(a, b) for a, b in zip(old, new, strict=True)]
        if False not in known and None in known:
            _fit(graph, op, end, after, old)


def _fit(graph: Graph, op: str, node: Node, value: str, wanted: tuple[Dim, ...] | None) -> None:
    """Let `node` read `value` as of shape `wanted`, if that is another."""
    if wanted is None:
        return
    now = graph.maker[node.outputs[0]]
    same = graph.fresh(f"{value}.fitted")
    attrs = {"shape": tuple(as_attr(dim) for dim in wanted)}
    check = Node(op, graph.fresh(f"{node.name}.fits"), (value,), (same,), attrs)
    graph.shapes[same], graph.dtypes[same] = wanted, str(graph.dtype(value))
    inputs = tuple(same if v == value else v for v in now.inputs)
    graph.replace(now, check, Node(now.op, now.name, inputs, now.outputs, now.attrs))


def _wanted(
    shape: tuple[Dim, ...], out: tuple[Dim, ...], free: int | None
) -> tuple[Dim, ...] | None:
    """`shape` with the dimensions of `out` where it does not broadcast; None if it has them."""
    offset = len(out) - len(shape)
    wanted = [
        dim if dim == 1 or axis + offset == free or equal(dim, out[axis + offset]) else
        out[axis + offset]
        for axis, dim in enumerate(shape)
    ]  # fmt: skip
    return None if tuple(wanted) == tuple(shape) else tuple(wanted)

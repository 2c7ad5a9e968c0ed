"""Standard operators that are written in others, where they are used as only some models do."""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node


def reduced(steps: Steps, op: str, x: str, axes: tuple[int, ...], keep: bool = True) -> str:
    """A reduction; since opset 18 (ReduceSum: 13) its axes are an input."""
    since = 13 if op == "ReduceSum" else 18
    if steps.graph.opset < since:
        return steps(op, x, axes=axes, keepdims=int(keep))
    return steps(op, x, steps.constant(np.asarray(axes, np.int64)), keepdims=int(keep))


def batch_normalization(graph: Graph, node: Node) -> list[Node] | None:
    """BatchNormalization in training mode: with the statistics of its own input.

    Raises
    ------
    UnsupportedModel
        Outputs for training of an opset before 14 are read.
    """
    steps = Steps(graph, node)
    if not node.attrs.get("training_mode", 0):
        if any(node.outputs[1:]):
            raise steps.refuse("its outputs for training cannot be computed; export for inference")
        return None
    x, scale, bias, mean, variance = node.inputs
    shape = steps.shape(x)
    axes = tuple(i for i in range(len(shape)) if i != 1)
    momentum = float(node.attrs.get("momentum", 0.9))

    def per_channel(value: str) -> str:
        channels = graph.shape(value)
        assert channels is not None
        return steps.reshape(value, *(channels[0] if i == 1 else 1 for i in range(len(shape))))

    def running(old: str, new: str) -> str:
        kept = steps("Mul", old, steps.number(momentum, str(graph.dtype(old))))
        return steps("Add", kept, steps("Mul", new, steps.number(1 - momentum, kind)))

    kind = str(graph.dtype(x))
    current = reduced(steps, "ReduceMean", x, axes)
    centred = steps("Sub", x, current)
    spread = reduced(steps, "ReduceMean", steps("Mul", centred, centred), axes)
    epsilon = steps.number(float(node.attrs.get("epsilon", 1e-5)), kind)
    scaled = steps("Div", centred, steps("Sqrt", steps("Add", spread, epsilon)))
    y = steps("Add", steps("Mul", scaled, per_channel(scale)), per_channel(bias))
    results = [y]
    for index, old, new in ((1, mean, current), (2, variance, spread)):
        wanted = steps.wants(index)
        results.append(running(old, steps.reshape(new, shape[1])) if wanted else "")
    return steps.done(*results)


def dropout(graph: Graph, node: Node) -> list[Node] | None:
    """Dropout that is told to drop something.

    Raises
    ------
    UnsupportedModel
        Its training mode is on, or decided at run time: what it drops is random.
    """
    steps = Steps(graph, node)
    mode, ratio = steps.input(2), steps.input(1)
    if not mode or graph.scalar(mode) == 0 or graph.scalar(ratio or mode) == 0:
        return _mask_of_ones(steps) if steps.wants(1) else None
    if ratio and graph.scalar(ratio) == 0:
        return _mask_of_ones(steps) if steps.wants(1) else None
    raise steps.refuse(
        "it is in training mode, so its result is random; export the model in inference mode "
        "(model.eval())"
    )


def _mask_of_ones(steps: Steps) -> list[Node]:
    x = steps.node.inputs[0]
    shape = steps.shape(x)
    mask = steps.expand(steps.constant(np.asarray(True)), *shape)
    return steps.done(steps("Identity", x), mask)


def lp_normalization(graph: Graph, node: Node) -> list[Node]:
    """``x / norm(x)`` along one axis, and 0 where the norm is 0."""
    steps, x = Steps(graph, node), node.inputs[0]
    axis, p = int(node.attrs.get("axis", -1)), int(node.attrs.get("p", 2))
    norm = reduced(steps, "ReduceL1" if p == 1 else "ReduceL2", x, (axis,))
    zero = steps.number(0, str(graph.dtype(x)))
    one = steps.number(1, str(graph.dtype(x)))
    nothing = steps("Equal", norm, zero)
    divided = steps("Div", x, steps("Where", nothing, one, norm))
    return steps.done(steps("Where", nothing, zero, divided))


def det(graph: Graph, node: Node) -> list[Node]:
    """Determinants of up to 3 x 3, written out.

    Raises
    ------
    UnsupportedModel
        The matrices are larger.
    """
    steps, x = Steps(graph, node), node.inputs[0]
    shape = steps.shape(x)
    size = steps.size(shape[-1], "matrix size")
    if not 1 <= size <= 3:
        raise steps.refuse(f"matrices of {size} x {size}; up to 3 x 3 can be compiled")

    def entry(row: int, column: int) -> str:
        at = steps.slice(steps.slice(x, len(shape) - 2, row, row + 1), len(shape) - 1, column, column + 1)
        return steps.reshape(at, *shape[:-2])

    def minor(rows: list[int], columns: list[int]) -> str:
        if len(rows) == 1:
            return entry(rows[0], columns[0])
        total = ""
        for i, column in enumerate(columns):
            others = [c for c in columns if c != column]
            term = steps("Mul", entry(rows[0], column), minor(rows[1:], others))
            total = steps("Sub" if i % 2 else "Add", total, term) if total else term
        return total

    return steps.done(minor(list(range(size)), list(range(size))))

"""Operators that ONNX also has for integers, and that TVM computes in another way for those."""

from __future__ import annotations

import numpy as np

from apq_tvm.onnx_import.graph import Graph, type_number
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import product
from apq_tvm.types import Node


def _of_integers(graph: Graph, node: Node) -> bool:
    dtype = graph.dtype(node.inputs[0])
    return dtype is not None and np.dtype(dtype).kind in "iu"


def gemm(graph: Graph, node: Node) -> None:
    """Gemm of integers.

    Raises
    ------
    UnsupportedModel
        A factor is no integer: TVM would cut it to one.
    """
    if not _of_integers(graph, node):
        return
    factors = {key: float(node.attrs.get(key, 1.0)) for key in ("alpha", "beta")}
    if not all(value.is_integer() for value in factors.values()):
        told = " and ".join(f"{key} {value}" for key, value in factors.items())
        raise Steps(graph, node).refuse(
            f"of integers with {told} it cannot be compiled; cast to floats before it"
        )


def grid_sample(graph: Graph, node: Node) -> list[Node] | None:
    """GridSample of another type than its grid: both as the image, of 16 bits both as float32.

    Raises
    ------
    UnsupportedModel
        The image is not of floats: TVM computes another type than ONNX says.
    """
    steps, (x, grid) = Steps(graph, node), node.inputs[:2]
    kinds = graph.dtype(x), graph.dtype(grid)
    if _of_integers(graph, node) or kinds[0] == "bool":
        raise steps.refuse(f"of {kinds[0]} it cannot be compiled; cast the image to floats")
    if kinds[0] == kinds[1]:
        return None
    kind = "float64" if kinds[0] == "float64" else "float32"
    given = [steps("Cast", value, to=type_number(kind)) for value in (x, grid)]
    found = steps("GridSample", *given, **node.attrs)
    return steps.done(steps("Cast", found, to=type_number(str(kinds[0]))))


def _axes(steps: Steps) -> tuple[int, ...] | None:
    """The axes of a reduction of integers: none where it does nothing; None where it stays."""
    graph, node = steps.graph, steps.node
    given = steps.input(1)
    if not _of_integers(graph, node) or (given and given not in graph.weights):
        return None
    axes = graph.weights[given].reshape(-1).tolist() if given else node.attrs.get("axes", ())
    if not axes and node.attrs.get("noop_with_empty_axes", 0):
        return ()
    rank = len(steps.shape(node.inputs[0]))
    return tuple(int(axis) % rank for axis in axes or range(rank))


def reduce_mean(graph: Graph, node: Node) -> list[Node] | None:
    """ReduceMean of integers: the quotient of sum and number, truncated; 0 of none."""
    steps, x = Steps(graph, node), node.inputs[0]
    over = _axes(steps)
    if not over:
        return over if over is None else steps.done(x)
    shape, dtype = steps.shape(x), str(graph.dtype(x))
    wide = "uint64" if dtype == "uint64" else "int64"
    keeps = bool(node.attrs.get("keepdims", 1))
    widened = steps("Cast", x, to=type_number(wide))
    total = reduced(steps, "ReduceSum", widened, over, keeps)
    count = steps.dim(product(shape[axis] for axis in over))
    mean = steps("Div", total, steps("Cast", count, to=type_number(wide)))
    return steps.done(steps("Cast", mean, to=type_number(dtype)))


def reduce_root_or_log(graph: Graph, node: Node) -> list[Node] | None:
    """ReduceL2, ReduceLogSum and ReduceLogSumExp of integers, as ONNX Runtime truncates them."""
    steps, x = Steps(graph, node), node.inputs[0]
    over = _axes(steps)
    if not over:
        return over if over is None else steps.done(x)
    keeps, number = bool(node.attrs.get("keepdims", 1)), type_number(str(graph.dtype(x)))

    def truncated(function: str, value: str) -> str:
        real = steps("Cast", value, to=type_number("float64"))
        return steps("Cast", steps(function, real), to=number)

    if node.op == "ReduceL2":
        return steps.done(truncated("Sqrt", reduced(steps, "ReduceSumSquare", x, over, keeps)))
    if node.op == "ReduceLogSum":
        return steps.done(truncated("Log", reduced(steps, "ReduceSum", x, over, keeps)))
    # Of exp(x - largest) only those of the largest are more than 0.
    largest = steps("Equal", x, reduced(steps, "ReduceMax", x, over))
    count = reduced(steps, "ReduceSum", steps("Cast", largest, to=7), over, keeps)
    more = truncated("Log", steps("Max", count, steps.number(1, "int64")))
    return steps.done(steps("Add", reduced(steps, "ReduceMax", x, over, keeps), more))

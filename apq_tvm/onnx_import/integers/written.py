"""Integer products as a file writes them: in floats that hold integers, and are exact.

A float32 holds every integer up to 2^24. Products of 8 bits by 8 are summed in pieces that stay
below it, so that ``ConvInteger``, and ``MatMulInteger`` where activations stay rounded as the file
says (`Graph.as_written`), run on the kernels of float layers and give the integers they mean.

What stands behind them is rounded as ONNX Runtime rounds it, since one last place moves a code of
the next ``DynamicQuantizeLinear``, and that more of the layer behind: ``apq.Product`` is rounded
before anything is added to it, and ``sigmoid_ratio`` and ``tanh_ratio`` (`apq_tvm.ops.math`) are
what MLAS computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.integers.codes import Codes, of_integers
from apq_tvm.onnx_import.integers.packed import meaning
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Array, Node

EXACT = 1 << 24
"""Integers up to this one are float32 numbers."""

MOST = 255
"""An integer of 8 bits less its zero point is at most this, of whatever sign."""


def exact_convolution(graph: Graph, node: Node) -> None:
    """Write ``ConvInteger`` as convolutions of floats.

    Raises
    ------
    UnsupportedModel
        Its sums may be too large for a float, in a place where they cannot be cut.
    """
    steps, attrs = Steps(graph, node), dict(node.attrs)
    x, weight, x_zero, w_zero = (*node.inputs, "", "")[:4]
    numbers, codes = _numbers(steps, x, x_zero), _codes(graph, weight, w_zero, node, 0)
    if codes is None:
        taps = [steps.size(dim, "kernel") for dim in steps.shape(weight)[1:]]
        if MOST * MOST * int(np.prod(taps)) > EXACT:
            raise steps.refuse(_too_large(graph, weight) + "; make it a constant")
        _put(steps, _sum(steps, "Conv", [(numbers, _numbers(steps, weight, w_zero))], attrs))
        return
    count, channels, *taps = graph.weights[weight].shape
    pieces = _pieces(np.abs(meaning(codes)).reshape(count, channels, -1).sum(2))
    if pieces is None:
        raise steps.refuse(_too_large(graph, weight))
    parts, of_groups = [], channels * np.arange(int(attrs.get("group", 1)))[:, None]
    for first, last in pieces:
        values = codes.values.reshape(count, channels, -1)[:, first:last].reshape(count, -1)
        given = numbers
        if len(pieces) > 1:
            picked = (of_groups + np.arange(first, last)).reshape(-1)
            places = graph.add_weight(f"{node.name}.channels", picked)
            given = steps("Gather", numbers, places, axis=1)
        parts.append((given, _stored(steps, codes, values, (count, last - first, *taps))))
    _put(steps, _sum(steps, "Conv", parts, attrs))


def exact_product(graph: Graph, node: Node) -> None:
    """Write ``MatMulInteger`` with a constant matrix as products of floats; leave others."""
    steps = Steps(graph, node)
    a, weight, a_zero, zero = (*node.inputs, "", "")[:4]
    array, offset = graph.weights.get(weight), graph.shape(a_zero) if a_zero else ()
    if array is None or array.ndim != 2 or offset not in ((), (1,)):
        return
    codes = _codes(graph, weight, zero, node, 1)
    pieces = None if codes is None else _pieces(np.abs(meaning(codes)).T)
    if codes is None or pieces is None:
        return
    numbers, axis, parts = _numbers(steps, a, a_zero), len(steps.shape(a)) - 1, []
    for first, last in pieces:
        values = codes.values[first:last]
        given = numbers if len(pieces) == 1 else steps.slice(numbers, axis, first, last)
        parts.append((given, _stored(steps, codes, values, values.shape)))
    _put(steps, _sum(steps, "MatMul", parts, {}))


Integers = tuple[str, str, str]
"""Names of integers, of their scale and of their zero point, which may be absent."""


def as_integers(steps: Steps, a: Integers, b: Integers, bias: str = "") -> str:
    """``a · b + bias`` as onnxruntime's operators compute it: a product of integers, its scale, the
    bias. An `a` without scale are floats, of which ``DynamicQuantizeLinear`` makes integers."""
    if not a[1]:
        fresh, x = steps.graph.fresh, a[0]
        a = (fresh(f"{x}.codes"), fresh(f"{x}.scale"), fresh(f"{x}.zero"))
        steps.add(Node("DynamicQuantizeLinear", fresh(f"{x}.rounding"), (x,), a))
    zeros = (a[2], b[2]) if b[2] else (a[2],) if a[2] else ()
    sums = steps("Cast", steps("MatMulInteger", a[0], b[0], *zeros), to=1)
    y = steps("apq.Product", sums, steps("Mul", a[1], b[1]))
    return steps("Add", y, bias) if bias else y


def round_as_onnxruntime(graph: Graph) -> None:
    """Where a file rounds while it runs: products of what were integers, sigmoids and tanhs."""
    if not any(node.op == "DynamicQuantizeLinear" for node in graph.nodes):
        return
    for node in graph.each():
        if node.op == "Mul" and any(_was_integer(graph, value) for value in node.inputs):
            graph.replace(node, replace(node, op="apq.Product"))
        elif node.op in ("Sigmoid", "Tanh") and graph.dtype(node.inputs[0]) == "float32":
            attrs = {"activation": f"{node.op.lower()}_ratio"}
            graph.replace(node, replace(node, op="apq.Activation", attrs=attrs))


def _was_integer(graph: Graph, value: str) -> bool:
    maker = graph.made_by(value, "Cast", "apq.Product")
    if maker is None or maker.op == "apq.Product":
        return maker is not None
    return graph.dtype(maker.inputs[0]) == "int32" and graph.dtype(value) == "float32"


def _codes(graph: Graph, weight: str, zero: str, node: Node, axis: int) -> Codes | None:
    """A constant of 8 bits or less as a matrix of integers [its axis 0, everything else] of scale
    1, less its zero point, which is one for all or one for each entry of `axis`; or None."""
    array = graph.weights.get(weight)
    offset = graph.weights.get(zero) if zero else np.zeros((), np.int32)
    if array is None or offset is None or offset.size not in (1, array.shape[axis]):
        return None
    matrix = array.reshape(len(array), -1)
    codes = of_integers(matrix, f"{node.op} of {array.dtype.name}")
    if codes is None:
        return None
    sizes, block = [1, 1], list(matrix.shape)
    sizes[axis], block[axis] = matrix.shape[axis], 1
    zeros = np.broadcast_to(offset.astype(np.int32).reshape(-1), matrix.shape[axis]).reshape(sizes)
    ones = np.ones(sizes, np.float32)
    return replace(codes, scale=ones, zero=zeros, block=(block[0], block[1]))


def _stored(steps: Steps, codes: Codes, values: Array, shape: tuple[int, ...]) -> str:
    """Some of the integers as a weight of floats, with its codes."""
    block = tuple(1 if b == 1 else s for b, s in zip(codes.block, values.shape, strict=True))
    piece = replace(codes, values=values, block=(block[0], block[1]))
    name = steps.graph.add_weight(f"{steps.node.name}.integers", meaning(piece).reshape(shape))
    steps.graph.codes[name] = piece
    return name


def _pieces(sizes: Array) -> list[tuple[int, int]] | None:
    """Where to cut the second axis of [rows, k], the sizes of what integers are multiplied by, so
    that no row's sum is too large; None if that of one entry is."""
    pieces, start, total = [], 0, np.zeros(len(sizes))
    for k, column in enumerate(MOST * sizes.T.astype(np.float64)):
        if column.max(initial=0.0) > EXACT:
            return None
        total = total + column
        if total.max(initial=0.0) > EXACT:
            pieces.append((start, k))
            start, total = k, column
    return [*pieces, (start, sizes.shape[1])]


def _numbers(steps: Steps, value: str, zero: str) -> str:
    """Integers less their zero point as floats; one for all, or one for each entry of axis 0."""
    numbers = steps("Cast", value, to=1)
    if not zero:
        return numbers
    offset, shape = steps("Cast", zero, to=1), steps.shape(zero, 0, 1)
    if shape:
        rest = [1] * (len(steps.shape(value)) - 1)
        offset = steps.reshape(offset) if shape == (1,) else steps.reshape(offset, *shape, *rest)
    return steps("Sub", numbers, offset)


def _sum(steps: Steps, op: str, parts: list[tuple[str, str]], attrs: Mapping[str, Any]) -> str:
    """The sum of products as int32."""
    total = ""
    for given, weight in parts:
        # A scheme may round what is multiplied, and leave no integer.
        piece = steps("Cast", steps("Round", steps(op, given, weight, **attrs)), to=6)
        total = steps("Add", total, piece) if total else piece
    return total


def _put(steps: Steps, result: str) -> None:
    steps.graph.replace(steps.node, *steps.done(result))


def _too_large(graph: Graph, weight: str) -> str:
    return (
        f"the sum over a channel of products with its weight {graph.describe(weight)} may exceed "
        f"{EXACT}, up to which integers are computed exactly"
    )


__all__ = [
    "as_integers",
    "exact_convolution",
    "exact_product",
    "round_as_onnxruntime",
]

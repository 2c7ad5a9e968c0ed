"""A MatMul with a stack of constant matrices (experts, heads) becomes products of single ones.

Each is then a layer that can be quantized. Where x has a matrix for each of the stack they are as
many layers, named ``NAME.0``, ``NAME.1`` ...; where all multiply the same x they are one layer,
whose outputs lie side by side.
"""

from __future__ import annotations

from math import prod

import numpy as np

from apq_tvm.formats.spelling import GROUP_SIZES
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.passes.linear import FLOATS
from apq_tvm.types import Node

MOST_LAYERS = 32
"""Matrices that become layers of their own: 64 of 64x64 take twice as long as their float product,
and each half a second to compile; 8 of 1024x256 take a sixth of its time."""


def split_stacks(graph: Graph) -> None:
    """Rewrite every MatMul with a constant [E, K, N] or [E, M, K]; note why others stay float."""
    for node in graph.each():
        if node.op != "MatMul":
            continue
        x, weight = node.inputs
        if _is_stack(graph, weight) and x not in graph.weights and graph.dtype(x) in FLOATS:
            _split(graph, node, x, weight)
        elif _is_stack(graph, x) and weight not in graph.weights and graph.dtype(weight) in FLOATS:
            _turn(graph, node)


def _is_stack(graph: Graph, value: str) -> bool:
    array = graph.weights.get(value)
    return array is not None and array.dtype.name in FLOATS and prod(array.shape[:-2]) > 1


def _turn(graph: Graph, node: Node) -> None:
    """``W @ b`` as ``(bᵀ @ Wᵀ)ᵀ``, where that will be layers."""
    stack, b = node.inputs
    rank, out = graph.rank(b), graph.known_shape(node.outputs[0])
    turned = f"{stack}.T"
    graph.weights.setdefault(turned, graph.weights[stack].swapaxes(-1, -2))
    if rank is None or rank < 2 or out is None:
        _split(graph, node, b, turned)  # a vector, or a remark
        return
    steps = Steps(graph, node)
    x = steps.transpose(b, *range(rank - 2), rank - 1, rank - 2)
    y = graph.fresh(f"{node.name}.turned")
    product = Node("MatMul", node.name, (x, turned), (y,))
    steps.add(product)
    if why := _declined(graph, product, x, turned):
        graph.notes[node.name] = why
        return
    made = len(out)
    back = steps.transpose(y, *range(made - 2), made - 1, made - 2)
    graph.replace(node, *steps.done(back))
    _split(graph, product, x, turned)


def _split(graph: Graph, node: Node, x: str, stack: str) -> None:
    if why := _declined(graph, node, x, stack):
        graph.notes[node.name] = why
        return
    steps = Steps(graph, node)
    out = steps.shape(node.outputs[0])
    y = steps.reshape(_product(steps, x, stack, node.name), *out)
    graph.replace(node, *steps.done(y))


def _declined(graph: Graph, node: Node, x: str, stack: str) -> str:
    """Why a product stays one of floats; ``""`` if it need not."""
    weight, shape = graph.weights[stack], graph.known_shape(x)
    if weight.shape[-2] < min(GROUP_SIZES):
        return f"K={weight.shape[-2]} is below {min(GROUP_SIZES)}, the smallest group"
    if shape is None or graph.known_shape(node.outputs[0]) is None:
        return (
            f"the shape of {graph.describe(x)} is not known, which a stack of matrices multiplies"
        )
    own, shared = _axes(weight.shape, shape)
    count = prod(weight.shape[axis] for axis in own)
    if count > MOST_LAYERS:
        return f"its stack of {count} matrices is more than {MOST_LAYERS} layers"
    if len(shared) > 1 and any(dim != 1 for dim in shape[:-2]):
        return f"a stack {list(weight.shape)} multiplies parts of {graph.describe(x)} several times"
    return ""


def _axes(stack: tuple[int, ...], shape: tuple[object, ...]) -> tuple[list[int], list[int]]:
    """Axes of a stack, from the end: those that x has too, and those along which x is repeated."""
    axes = [axis for axis in range(-len(stack), -2) if stack[axis] != 1]
    own = [axis for axis in axes if len(shape) >= -axis and shape[axis] != 1]
    return own, [axis for axis in axes if axis not in own]


def _product(steps: Steps, x: str, stack: str, name: str) -> str:
    """``x @ stack`` but for leading axes of one."""
    graph = steps.graph
    weight, shape = graph.weights[stack], steps.shape(x)
    own, shared = _axes(weight.shape, shape)
    if not own:
        return _side_by_side(steps, x, stack, name, shared)
    axis, parts = own[0], []
    for i in range(weight.shape[axis]):
        rows = steps.slice(x, len(shape) + axis, i, i + 1)
        part, codes = f"{stack}[{i}]", graph.codes.get(stack)
        graph.weights.setdefault(
            part, np.moveaxis(np.moveaxis(weight, axis, 0)[i : i + 1], 0, axis)
        )
        if codes is not None and weight.ndim == 3 and codes.of_stack:
            graph.codes[part] = codes.row(i)
        parts.append(_product(steps, rows, part, graph.fresh(f"{name}.{i}")))
    return steps("Concat", *parts, axis=len(steps.shape(parts[0])) + axis)


def _side_by_side(steps: Steps, x: str, stack: str, name: str, shared: list[int]) -> str:
    """All matrices of a stack times the same rows: one product, whose columns are put apart."""
    graph, weight = steps.graph, steps.graph.weights[stack]
    k, n = weight.shape[-2:]
    count, shape = prod(weight.shape[:-2]), steps.shape(x)
    if len(shared) > 1:
        x, shared = steps.reshape(x, *shape[-2:]), [-3]
        shape = steps.shape(x)
    matrix = f"{stack}.{k}x{count * n}"
    apart = weight.reshape(count, k, n).swapaxes(0, 1)  # [K, count, N]
    graph.weights.setdefault(matrix, apart.reshape(k, count * n))
    codes = graph.codes.get(stack)
    if codes is not None and len(codes.values) == count and codes.of_stack:
        graph.codes[matrix] = codes.side_by_side(k, n)
    y = graph.fresh(f"{name}.product")
    steps.add(Node("MatMul", name, (x, matrix), (y,)))
    if not shared:
        return y
    axis = len(shape) + shared[0]  # of x, along which it has one entry or none
    before = [dim for i, dim in enumerate(shape[:-1]) if i != axis]
    y = steps.reshape(y, *before, count, n)
    rank, to = len(before) + 2, max(axis, 0)
    order = [i for i in range(rank) if i != rank - 2]
    return steps.transpose(y, *order[:to], rank - 2, *order[to:])

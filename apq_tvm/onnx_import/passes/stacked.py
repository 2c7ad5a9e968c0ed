"""A MatMul with a stack of constant matrices (experts, heads) becomes products of single ones.

Each is then a layer that can be quantized. Where x has a matrix for each of the stack they are as
many layers, named ``NAME.0``, ``NAME.1`` ...; where all multiply the same x they are one layer,
whose outputs lie side by side.
"""

from __future__ import annotations

from math import prod

import numpy as np

from apq_tvm.formats.spelling import GROUP_SIZES
from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.integers.codes import Codes
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.infer import infer
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
        made: list[Node] = []
        if _is_stack(graph, weight) and x not in graph.weights and graph.dtype(x) in FLOATS:
            made = _split(graph, node, x, weight)
        elif _is_stack(graph, x) and weight not in graph.weights and graph.dtype(weight) in FLOATS:
            made = _turn(graph, node)
        if made:
            graph.replace(node, *made)


def _is_stack(graph: Graph, value: str) -> bool:
    array = graph.weights.get(value)
    return array is not None and array.dtype.name in FLOATS and prod(array.shape[:-2]) > 1


def _turn(graph: Graph, node: Node) -> list[Node]:
    """``W @ b`` as ``(bᵀ @ Wᵀ)ᵀ``, where that will be layers."""
    stack, b = node.inputs
    rank, out = graph.rank(b), graph.known_shape(node.outputs[0])
    turned, weight = f"{stack}.T", graph.weights[stack]
    graph.weights.setdefault(turned, weight.swapaxes(-1, -2))  # swept where it stays unread
    codes = _codes(graph, stack)
    if codes is not None:
        graph.codes[turned] = codes.turned(weight.shape)
    if rank is None or rank < 2 or out is None:
        return _split(graph, node, b, turned)  # a vector, or a remark
    before = Steps(graph, node)
    x = before.transpose(b, *range(rank - 2), rank - 1, rank - 2)
    product = Node("MatMul", node.name, (x, turned), (graph.fresh(f"{node.name}.turned"),))
    infer(graph, product)
    layers = _split(graph, product, x, turned)
    if not layers:
        return []
    made, after = len(out), Steps(graph, node)
    y = after.transpose(product.outputs[0], *range(made - 2), made - 1, made - 2)
    return [*before.nodes, *layers, *after.done(y)]


def _split(graph: Graph, node: Node, x: str, stack: str) -> list[Node]:
    """``x @ stack`` as layers; none, and a note, where it stays."""
    if why := _declined(graph, node, x, stack):
        graph.notes[node.name] = why
        return []
    steps = Steps(graph, node)
    out = steps.shape(node.outputs[0])
    return steps.done(steps.reshape(_product(steps, x, stack, node.name), *out))


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
    axis, parts, codes = own[0], [], _codes(graph, stack)
    for i in range(weight.shape[axis]):
        rows = steps.slice(x, len(shape) + axis, i, i + 1)
        part = f"{stack}[{i}]"
        graph.weights.setdefault(
            part, np.moveaxis(np.moveaxis(weight, axis, 0)[i : i + 1], 0, axis)
        )
        if codes is not None:
            graph.codes[part] = codes.entry(weight.shape, axis, i)
        parts.append(_product(steps, rows, part, graph.fresh(f"{name}.{i}")))
    return steps("Concat", *parts, axis=len(steps.shape(parts[0])) + axis)


def _codes(graph: Graph, stack: str) -> Codes | None:
    codes = graph.codes.get(stack)
    return None if codes is None else codes.matrices(graph.weights[stack].shape)


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
    codes = _codes(graph, stack)
    if codes is not None:
        graph.codes[matrix] = codes.side_by_side(weight.shape)
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

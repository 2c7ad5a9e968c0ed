"""Attention's products and softmax with what surrounds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node

# Operators that only move numbers, so that a factor may be applied after them as well as before.
MOVES = ("Transpose", "Reshape", "apq.Reshape", "Squeeze", "Unsqueeze")


def fuse_attention(graph: Graph) -> None:
    """Make ``apq.MatMul`` and ``apq.Softmax`` with the transposes, scales and masks around them."""
    for node in graph.each():
        if node.op == "Softmax":
            _scale_scores(graph, node)
    for node in graph.each():
        if node.op == "MatMul":
            _matmul(graph, node)
    for node in graph.each():
        if node.op == "Softmax":
            _softmax(graph, node)
    graph.sweep()


def _scale_scores(graph: Graph, softmax: Node) -> None:
    """Multiply the scores by what the queries and keys are multiplied by; Softmax takes it in."""
    product = _scores(graph, softmax.inputs[0])
    if product is None or any(v in graph.weights for v in product.inputs):
        return
    out, scale = product.outputs[0], 1.0
    for operand in dict.fromkeys(product.inputs):
        scale *= _lift(graph, operand)
    if scale == 1.0:
        return
    product = graph.maker[out]
    plain = graph.fresh(f"{out}.plain")
    graph.shapes[plain], graph.dtypes[plain] = graph.shapes[out], graph.dtypes[out]
    factor = graph.add_weight(f"{product.name}.scale", np.asarray(scale, np.float32))
    times = Node("Mul", graph.fresh(f"{product.name}.scaled"), (plain, factor), (out,))
    graph.replace(product, replace(product, outputs=(plain,)), times)


def _scores(graph: Graph, value: str) -> Node | None:
    """The MatMul behind a Softmax, past one Add and constant factors, if nothing else reads it."""
    if graph.dtype(value) != "float32" or graph.shape(value) is None:
        return None
    add = graph.made_by(value, "Add")
    candidates = [value] if add is None else list(add.inputs)
    for candidate in candidates:
        while graph.only_use(candidate):
            node = graph.maker.get(candidate)
            factor = _factor(graph, node)
            if factor is None:
                break
            candidate = factor[0]
        product = graph.made_by(candidate, "MatMul")
        if product is not None and graph.only_use(candidate) and graph.only_use(value):
            return product
    return None


def _matmul(graph: Graph, node: Node) -> None:
    """MatMul of two computed float32 values, with transposes before and after it."""
    if any(v in graph.weights or graph.dtype(v) != "float32" for v in node.inputs):
        return
    operands, perms = [], []
    for value in node.inputs:
        rank = graph.rank(value)
        if rank is None or rank < 2:
            return
        perm = tuple(range(rank))
        maker = graph.made_by(value, "Transpose")
        if maker is not None:
            value, perm = maker.inputs[0], tuple(maker.attrs.get("perm", perm[::-1]))
        operands.append(value)
        perms.append(perm)
    rank = max(len(perm) for perm in perms)
    out = tuple(range(rank))
    last, after = node, _only_reader(graph, node.outputs[0])
    if after is not None and after.op == "Transpose":
        last, out = after, tuple(after.attrs.get("perm", out[::-1]))
    attrs = {"perm_a": perms[0], "perm_b": perms[1], "perm_out": out}
    graph.replace(last, Node("apq.MatMul", node.name, tuple(operands), last.outputs, attrs))


def _only_reader(graph: Graph, value: str) -> Node | None:
    """The one node that reads `value`, if it is no graph output."""
    if not graph.only_use(value):
        return None
    return next((n for n in graph.nodes if value in n.inputs), None)


def _softmax(graph: Graph, node: Node) -> None:
    """Softmax over the last axis takes the mask and the scale before it along."""
    rank = graph.rank(node.inputs[0])
    if not rank or graph.dtype(node.inputs[0]) != "float32":
        return
    # Before opset 13 Softmax flattens from `axis` on, which for the last axis is the same thing.
    axis = node.attrs.get("axis", -1 if graph.opset >= 13 else 1)
    if axis not in (-1, rank - 1):
        return
    x, mask, scale = node.inputs[0], "", 1.0
    add = graph.made_by(x, "Add")
    if add is not None and graph.only_use(x):
        x, mask = _mask(graph, add) or (x, "")
    while graph.only_use(x):
        factor = _factor(graph, graph.maker.get(x))
        if factor is None:
            break
        x, scale = factor[0], scale * factor[1]
    wide = graph.made_by(mask, "apq.Expand")
    mask = wide.inputs[0] if wide is not None else mask
    last = _nan_guard(graph, node)
    attrs = {"scale": scale, "zero_masked": last is not node}
    graph.replace(last, Node("apq.Softmax", node.name, (x, mask), last.outputs, attrs))


def _nan_guard(graph: Graph, softmax: Node) -> Node:
    """The Where of ``where(isnan(p), 0, p)`` after a Softmax, or the Softmax itself.

    torch's scaled_dot_product_attention gives rows that are masked altogether the probability 0.
    """
    value = softmax.outputs[0]
    for reader in [n for n in graph.nodes if value in n.inputs]:
        if reader.op == "Where" and graph.uses[value] == 2:
            condition, zero, other = reader.inputs
            test = graph.made_by(condition, "IsNaN")
            if test is not None and test.inputs[0] == value == other:
                if graph.only_use(condition) and graph.scalar(zero) == 0.0:
                    return reader
    return softmax


def _mask(graph: Graph, add: Node) -> tuple[str, str] | None:
    """``(scores, mask)`` of an Add: the mask is the operand that is broadcast, or is no product."""
    out = graph.shape(add.outputs[0])
    whole = [v for v in add.inputs if same_shape(graph.shape(v), out)]
    if not whole or add.inputs[0] == add.inputs[1]:
        return None
    scores = whole[0]
    if len(whole) == 2:
        products = [v for v in whole if graph.made_by(v, "Mul", "Div", "apq.MatMul")]
        scores = (products or whole)[0]
    return scores, next(v for v in add.inputs if v != scores)


def _factor(graph: Graph, node: Node | None) -> tuple[str, float] | None:
    """``(x, c)`` of a node that multiplies a value of its own shape by a scalar constant."""
    if node is None or node.op not in ("Mul", "Div"):
        return None
    pairs = [node.inputs] if node.op == "Div" else [node.inputs, node.inputs[::-1]]
    for x, c in pairs:
        by = graph.scalar(c)
        if by is not None and same_shape(graph.shape(x), graph.shape(node.outputs[0])):
            if node.op == "Mul":
                return x, by
            if by != 0.0:
                return x, 1.0 / by
    return None


def _lift(graph: Graph, operand: str) -> float:
    """Take constant factors off an operand of the product before a Softmax; their product."""
    total = 1.0
    value = operand
    while graph.only_use(value):
        maker = graph.maker.get(value)
        if maker is None:
            break
        factor = _factor(graph, maker)
        if factor is not None:
            total *= factor[1]
            value = _bypass(graph, value, factor[0])
        elif maker.op in MOVES:
            value = maker.inputs[0]
        else:
            break
    return total


def _bypass(graph: Graph, value: str, source: str) -> str:
    """Let the one reader of `value` read `source` instead."""
    reader = next(n for n in graph.nodes if value in n.inputs)
    inputs = tuple(source if v == value else v for v in reader.inputs)
    graph.replace(reader, replace(reader, inputs=inputs))
    return source

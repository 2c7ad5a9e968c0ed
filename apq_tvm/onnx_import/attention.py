"""Attention's products and softmax with what surrounds them."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.infer import same_shape
from apq_tvm.types import Node


def fuse_matmuls(graph: Graph) -> None:
    """MatMul of two computed values becomes ``apq.MatMul`` with the transposes around it."""
    for node in list(graph.nodes):
        if node.op == "MatMul":
            _matmul(graph, node)
    graph.sweep()


def _matmul(graph: Graph, node: Node) -> None:
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


def fuse_softmax(graph: Graph) -> None:
    """Softmax over the last axis takes the scale and the mask before it along."""
    for node in list(graph.nodes):
        if node.op == "Softmax":
            _softmax(graph, node)
    graph.sweep()


def _softmax(graph: Graph, node: Node) -> None:
    rank = graph.rank(node.inputs[0])
    if rank is None or rank == 0 or graph.dtype(node.inputs[0]) != "float32":
        return
    # Before opset 13 Softmax flattens from `axis` on, which for the last axis is the same thing.
    axis = node.attrs.get("axis", -1 if graph.opset >= 13 else 1)
    if axis not in (-1, rank - 1):
        return
    x, mask, scale = node.inputs[0], "", 1.0
    add = graph.made_by(x, "Add")
    if add is not None and graph.only_use(x):
        for scores, other in (add.inputs, add.inputs[::-1]):
            if not same_shape(graph.shape(scores), graph.shape(x)) or scores == other:
                continue
            if graph.made_by(scores, "Mul", "Div", "apq.MatMul") or graph.rank(other) != rank:
                x, mask = scores, other
                break
            if not same_shape(graph.shape(other), graph.shape(x)):
                x, mask = scores, other
                break
    while graph.only_use(x):
        product = graph.made_by(x, "Mul", "Div")
        if product is None:
            break
        a, b = product.inputs
        by = graph.scalar(b)
        if by is None and product.op == "Mul":
            a, b = b, a
            by = graph.scalar(b)
        if by is None or not same_shape(graph.shape(a), graph.shape(x)):
            break
        if product.op == "Div" and by == 0.0:
            break
        x, scale = a, scale / by if product.op == "Div" else scale * by
    attrs = {"scale": scale}
    graph.replace(node, Node("apq.Softmax", node.name, (x, mask), node.outputs, attrs))

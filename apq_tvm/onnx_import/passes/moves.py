"""Operators that only move numbers: fewer of them, and those that are left easier to fold away."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.onnx_import.graph import Graph, with_attrs
from apq_tvm.onnx_import.symbolic.carry import reshape_to
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node

RESHAPES = ("Reshape", "apq.Reshape", "Squeeze", "Unsqueeze")


def merge_moves(graph: Graph) -> None:
    """Merge transposes and reshapes that follow each other, and drop those that do nothing."""
    outputs = {spec.name for spec in graph.outputs}
    for node in graph.each():
        new: Node | str | None = None
        if node.op == "Transpose":
            new = _transpose(graph, node)
        elif node.op in RESHAPES:
            new = _batched_transpose(graph, node) or _reshape(graph, node)
        if isinstance(new, str):
            if node.outputs[0] not in outputs:
                _alias(graph, node, new)
        elif new is not None:
            graph.replace(node, new)
            infer(graph, new)
            if new.op == "Transpose" and new is not node:
                merged = _transpose(graph, new)
                if isinstance(merged, Node):
                    graph.replace(new, merged)
    graph.sweep()


def _alias(graph: Graph, node: Node, source: str) -> None:
    """Let readers of `node` read `source`."""
    for reader in [n for n in graph.nodes if node.outputs[0] in n.inputs]:
        inputs = tuple(source if v == node.outputs[0] else v for v in reader.inputs)
        graph.replace(reader, replace(reader, inputs=inputs))


def _perm(graph: Graph, node: Node) -> tuple[int, ...] | None:
    rank = graph.rank(node.inputs[0])
    if "perm" in node.attrs:
        return tuple(node.attrs["perm"])
    return None if rank is None else tuple(reversed(range(rank)))


def _transpose(graph: Graph, node: Node) -> Node | str | None:
    """A transpose of a transpose is one, or none."""
    perm = _perm(graph, node)
    if perm is None:
        return None
    source = node.inputs[0]
    before = graph.made_by(source, "Transpose")
    first = None if before is None else _perm(graph, before)
    if before is not None and first is not None:
        perm, source = tuple(first[i] for i in perm), before.inputs[0]
    if perm == tuple(range(len(perm))):
        return source
    if source == node.inputs[0]:
        return None
    return with_attrs(replace(node, inputs=(source,)), {"perm": perm})


def _reshape(graph: Graph, node: Node) -> Node | str | None:
    """A reshape of a reshape is one, or none, if a constant target can say it."""
    before = graph.made_by(node.inputs[0], *RESHAPES)
    shape = graph.known_shape(node.outputs[0])
    if before is None or shape is None:
        return None
    source = before.inputs[0]
    if same_shape(graph.shape(source), shape):
        return source
    merged = reshape_to(graph, replace(node, inputs=(source,)), graph.shape(source), shape)
    return merged if merged.op == "Reshape" or node.op == "apq.Reshape" else None


def _batched_transpose(graph: Graph, node: Node) -> Node | None:
    """Leading axes merged, the last two swapped, and split again: one transpose.

    torch.export writes the keys of scaled_dot_product_attention like this. Heads that share keys
    are split otherwise than they were before; then what was merged becomes that.
    """
    swap = graph.made_by(node.inputs[0], "Transpose")
    merge = graph.made_by(swap.inputs[0], *RESHAPES) if swap is not None else None
    if swap is None or merge is None or _perm(graph, swap) != (0, 2, 1):
        return None
    source = merge.inputs[0]
    x, merged, out = (graph.known_shape(v) for v in (source, *merge.outputs, *node.outputs))
    if x is None or merged is None or out is None or len(x) < 3 or len(out) < 3:
        return None
    if not same_shape(x[-2:], merged[-2:]) or not same_shape(out[-2:], (x[-1], x[-2])):
        return None
    if not same_shape(x[:-2], out[:-2]):
        if not graph.only_use(merge.outputs[0]) or merge.op == "Unsqueeze":
            return None
        source = graph.fresh(f"{source}.heads")
        split = replace(merge, inputs=merge.inputs[:1], outputs=(source,))
        split = reshape_to(graph, split, x, (*out[:-2], *x[-2:]))
        graph.replace(merge, split, replace(merge, inputs=(source, *merge.inputs[1:])))
        infer(graph, split)
    perm = (*range(len(out) - 2), len(out) - 1, len(out) - 2)
    return Node("Transpose", node.name, (source,), node.outputs, {"perm": perm})

"""Nodes that carry dimensions in their attributes; what rules that write them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr, run_symbols, symbol, symbols
from apq_tvm.types import Array, Node

Rewritten = list[Node] | Node | str | None


def carried(op: str, node: Node, shape: Sequence[Dim], **attrs: Any) -> Node:
    """An ``apq.`` node over the first input of `node` that carries its output shape."""
    attrs = {"shape": tuple(as_attr(dim) for dim in shape), **attrs}
    return Node(op, node.name, node.inputs[:1], node.outputs[:1], attrs)


def reshape_to(
    graph: Graph, node: Node, source: Sequence[Dim | None] | None, shape: Sequence[Dim]
) -> Node:
    """`node` as Reshape of its first input to `shape`, with a constant target if it has one."""
    target: list[int | None] = []
    for i, dim in enumerate(shape):
        if isinstance(dim, int):
            target.append(dim)
        elif source is not None and i < len(source) and source[i] == dim:
            target.append(0)
        else:
            target.append(None)
    late = any(run_symbols(dim) for dim in shape)  # it may be 0, which -1 cannot be told from
    if target.count(None) > 1 or 0 in shape or late:
        return carried("apq.Reshape", node, shape)
    array = np.asarray([-1 if dim is None else dim for dim in target], np.int64)
    text = "x".join(str(d) for d in array).replace("-1", "_") or "scalar"
    known = graph.weights.get(f"shape:{text}")
    name = f"shape:{text}" if known is not None else graph.add_weight(f"shape:{text}", array)
    return Node("Reshape", node.name, (node.inputs[0], name), node.outputs[:1])


def uniform(graph: Graph, value: str) -> Array | None:
    """The one number a constant repeats, as 0-d array."""
    weight = graph.weights.get(value)
    if weight is None or not weight.size:
        maker = graph.made_by(value, "apq.Full")
        return None if maker is None else np.asarray(maker.attrs["value"])
    first = weight.reshape(-1)[0]
    return np.asarray(first) if bool((weight == first).all()) else None


def full(node: Node, shape: Sequence[Dim], value: Array) -> Node:
    """A tensor that is `value` everywhere."""
    attrs = {
        "shape": tuple(as_attr(dim) for dim in shape),
        "value": value.reshape(()),
        "dtype": value.dtype.name,
    }
    return Node("apq.Full", node.name, (), node.outputs[:1], attrs)


def limit(graph: Graph, dim: Dim, size: int) -> bool:
    """Record that `dim` must not exceed `size`; False if it is no symbol plus a number."""
    names = symbols(dim)
    if len(names) != 1 or run_symbols(dim):
        return False
    (name,) = names
    rest = dim - symbol(name)
    if not isinstance(rest, int):
        return False
    graph.limits[name] = min(size - rest, graph.limits.get(name, size - rest))
    return True

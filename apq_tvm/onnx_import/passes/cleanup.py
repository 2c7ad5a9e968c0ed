"""Rewrites that make graphs smaller without changing what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.regions import MARKERS
from apq_tvm.types import Node


def drop_squeezes(graph: Graph) -> None:
    """A Squeeze without axes that only Reshapes to constant shapes read copies its input.

    Which dimensions are 1 may be known to a run alone; for those readers it makes no difference.
    """
    for node in graph.nodes:
        if node.op != "Squeeze" or len(node.inputs) > 1 or "axes" in node.attrs:
            continue
        (value,) = node.outputs
        readers = [n for n in graph.nodes if value in n.inputs]
        if len(readers) == graph.uses[value] and all(_shapes_anew(graph, n) for n in readers):
            graph.replace(node, replace(node, op="Identity"))


def _shapes_anew(graph: Graph, node: Node) -> bool:
    """Whether a node gives its input a shape that copies no dimension of it."""
    target = graph.weights.get(node.inputs[1]) if node.op == "Reshape" else None
    return target is not None and bool(target.all())


def merge_equal_nodes(graph: Graph) -> None:
    """Compute the same thing once (common subexpressions). Graph outputs keep their own node.

    The starts of two regions that take the same are not the same.
    """
    outputs = {spec.name for spec in graph.outputs}
    seen: dict[Any, Node] = {}
    alias: dict[str, str] = {}
    nodes = []
    for original in graph.nodes:
        node = replace(original, inputs=tuple(alias.get(v, v) for v in original.inputs))
        if node.op in MARKERS:
            nodes.append(node)
            continue
        key = (node.op, node.inputs, len(node.outputs), _frozen(node.attrs))
        first = seen.setdefault(key, node)
        if first is node or outputs.intersection(node.outputs):
            nodes.append(node)
        else:
            alias.update(zip(node.outputs, first.outputs, strict=True))
    graph.nodes = nodes
    graph.index()


def _frozen(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if hasattr(value, "items"):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return type(value).__name__, value


def merge_equal_weights(graph: Graph) -> None:
    """Store weights with the same contents once, under the name that comes first."""
    groups: dict[Any, list[str]] = {}
    alias: dict[str, str] = {}
    for name, array in graph.weights.items():
        sample = array.reshape(-1)[:: max(1, array.size // 64)].tobytes()
        group = groups.setdefault((array.dtype.name, array.shape, sample), [])
        twin = next((o for o in group if _same(graph.weights[o], array)), None)
        if twin is None:
            group.append(name)
        else:
            alias[name] = twin
            if name in graph.codes:
                graph.codes.setdefault(twin, graph.codes[name])
    graph.nodes = [replace(n, inputs=tuple(alias.get(v, v) for v in n.inputs)) for n in graph.nodes]
    graph.index()


def _same(a: Any, b: Any) -> bool:
    """Bitwise equality: -0.0 is not 0.0 here, and NaN equals itself."""
    return (
        a is b or bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))
        if (a.flags.c_contiguous and b.flags.c_contiguous and a.ndim)
        else a.tobytes() == b.tobytes()
    )


def rename_outputs(graph: Graph) -> None:
    """Let the node behind an Identity at a graph output make that output itself, where it can.

    An output that is a weight gets an Identity, so that outputs are made by nodes or are inputs.
    """
    outputs = {spec.name for spec in graph.outputs}
    for name in outputs.intersection(graph.weights):
        array = graph.weights.pop(name)
        graph.shapes[name], graph.dtypes[name] = array.shape, array.dtype.name
        value = graph.add_weight(f"{name}.value", array)
        graph.nodes = [
            replace(n, inputs=tuple(value if v == name else v for v in n.inputs))
            for n in graph.nodes
        ]
        graph.nodes.append(Node("Identity", graph.fresh(f"{name}.output"), (value,), (name,)))
    graph.index()
    for node in graph.each():
        if node.op != "Identity" or node.outputs[0] not in outputs:
            continue
        source = node.inputs[0]
        if source not in graph.maker or source in outputs:
            continue  # an input, a weight, or another output: the copy is needed
        new = node.outputs[0]
        tables: list[dict[str, Any]] = [graph.shapes, graph.dtypes, graph.values]
        for table in tables:
            if source in table:
                table[new] = table[source]
        graph.nodes = [
            replace(
                other,
                inputs=tuple(new if v == source else v for v in other.inputs),
                outputs=tuple(new if v == source else v for v in other.outputs),
            )
            for other in graph.nodes
            if other is not node
        ]
        graph.index()

"""Every layer that can be quantized becomes one named ``apq.Linear`` or ``apq.Embedding``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.passes.moves import RESHAPES
from apq_tvm.onnx_import.symbolic.carry import carried, limit
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.positions import span
from apq_tvm.types import Array, Node


def make_layers(graph: Graph) -> None:
    """Turn MatMul, Gemm and Gather with constants into layers, Adds after them into biases."""
    for node in graph.each():
        new: list[Node] | None = None
        if node.op == "MatMul":
            new = _matmul(graph, node)
        elif node.op == "Gemm":
            new = _gemm(graph, node)
        elif node.op == "Gather":
            new = _embedding(graph, node)
        if new:
            graph.replace(node, *(_inferred(graph, n) for n in new))
    for node in graph.each():
        if node.op == "Add":
            _bias(graph, node)
    for node in graph.each():
        if node.op == "apq.Linear":
            _unflatten(graph, node)
    graph.sweep()


def _unflatten(graph: Graph, node: Node) -> None:
    """Let a layer between two reshapes work on the shape before the first, so that both can go."""
    flat, y = graph.made_by(node.inputs[0], *RESHAPES), node.outputs[0]
    if flat is None or not graph.only_use(y) or node.inputs[3]:
        return
    reader = next((n for n in graph.nodes if y in n.inputs), None)
    shape, last = graph.known_shape(flat.inputs[0]), graph.shape(node.inputs[0])
    result = graph.known_shape(y)
    if reader is None or reader.op not in RESHAPES or not shape or not last or result is None:
        return
    if shape[-1] != last[-1] or graph.dtype(y) is None:
        return
    wide = _value(graph, f"{y}.unflattened", y, (*shape[:-1], result[-1]))
    inputs = (flat.inputs[0], *node.inputs[1:])
    name = graph.fresh(f"{node.name}.flat")
    back = carried("apq.Reshape", Node("", name, (wide,), (y,)), result)
    graph.replace(node, replace(node, inputs=inputs, outputs=(wide,)), back)


def _inferred(graph: Graph, node: Node) -> Node:
    infer(graph, node)
    return node


def _value(graph: Graph, base: str, like: str, shape: tuple[Dim | None, ...] | None) -> str:
    """A new value with the type of `like`."""
    name = graph.fresh(base)
    graph.dtypes[name] = str(graph.dtype(like))
    if shape is not None:
        graph.shapes[name] = shape
    return name


def stored(graph: Graph, source: str, transform: str, array: Array) -> str:
    """Name of ``transform(source)`` among the weights, stored once.

    `transform` names what was done, e.g. ``".T"``; two layers that do the same share the array.
    """
    name = f"{source}{transform}"
    if name not in graph.weights:
        with np.errstate(over="ignore"):
            single = np.ascontiguousarray(array, np.float32)
        if array.dtype == np.float64 and bool((np.isinf(single) & np.isfinite(array)).any()):
            raise UnsupportedModel(
                f"weight {source!r} of a linear layer holds numbers that are infinities in "
                "float32, in which layers are computed; scale them"
            )
        graph.weights[name] = single
    return name


def _weight(graph: Graph, value: str, transposed: bool) -> str:
    """A constant matrix as float32, turned over if `transposed`."""
    array, codes = graph.weights[value], graph.codes.get(value)
    if not transposed and array.dtype == np.float32:
        return value
    name = stored(graph, value, ".T" if transposed else ".f32", array.T if transposed else array)
    if codes is not None:
        graph.codes[name] = codes.transposed if transposed else codes
    return name


def linear(graph: Graph, node: Node, x: str, weight: str, out: str, bias: str = "") -> list[Node]:
    """``apq.Linear`` in the element type of `x`: a float64 value is cast to float32 and back."""
    n = graph.weights[weight].shape[0]
    shape = graph.shape(x)
    result = None if shape is None else (*shape[:-1], n)
    if graph.dtype(x) == "float32":
        graph.dtypes[out] = "float32"
        if result is not None:
            graph.shapes[out] = result
        return [Node("apq.Linear", node.name, (x, weight, bias, ""), (out,), {"activation": ""})]
    narrow = _value(graph, f"{x}.f32", x, shape)
    y = _value(graph, f"{out}.f32", x, result)
    graph.dtypes[narrow] = graph.dtypes[y] = "float32"
    return [
        Node("Cast", graph.fresh(f"{node.name}.in"), (x,), (narrow,), {"to": 1}),
        Node("apq.Linear", node.name, (narrow, weight, bias, ""), (y,), {"activation": ""}),
        Node("Cast", graph.fresh(f"{node.name}.out"), (y,), (out,), {"to": 11}),
    ]


def _transpose(graph: Graph, base: str, x: str, out: str | None = None) -> Node:
    """Swap the last two axes of `x`."""
    shape = graph.shape(x)
    assert shape is not None
    perm = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    result = tuple(shape[i] for i in perm)
    out = out or _value(graph, f"{x}.T", x, result)
    graph.shapes[out] = result
    graph.dtypes[out] = str(graph.dtype(x))
    return Node("Transpose", graph.fresh(f"{base}.transpose"), (x,), (out,), {"perm": perm})


def _matrix(graph: Graph, value: str) -> bool:
    """Whether `value` is a constant float matrix, after dropping leading axes of 1.

    Not one without elements, which no format stores.
    """
    weight = graph.weights.get(value)
    if weight is None or weight.ndim != 2 or not weight.size:
        return False
    return weight.dtype.name in FLOATS


def _matmul(graph: Graph, node: Node) -> list[Node] | None:
    a, b = node.inputs
    weight = graph.weights.get(b)
    rank = graph.rank(a)
    if weight is not None and rank and weight.ndim > 2 and weight.ndim <= rank:
        if all(d == 1 for d in weight.shape[:-2]):
            b, codes = stored_view(graph, b, weight.reshape(weight.shape[-2:])), graph.codes.get(b)
            if codes is not None:
                graph.codes[b] = codes.matrices(weight.shape)
    if _matrix(graph, b) and a not in graph.weights and graph.dtype(a) in FLOATS:
        return linear(graph, node, a, _weight(graph, b, True), node.outputs[0])
    if _matrix(graph, a) and b not in graph.weights and graph.dtype(b) in FLOATS:
        return _left(graph, node, _weight(graph, a, False), b)
    return None


def stored_view(graph: Graph, source: str, array: Array) -> str:
    """A reshaped constant."""
    name = f"{source}.{'x'.join(map(str, array.shape))}"
    graph.weights.setdefault(name, array)
    return name


def _left(graph: Graph, node: Node, weight: str, b: str) -> list[Node] | None:
    """``W @ b`` is ``(bᵀ @ Wᵀ)ᵀ``; a vector needs no transposes."""
    rank = graph.rank(b)
    if rank is None:
        return None
    if rank == 1:
        return linear(graph, node, b, weight, node.outputs[0])
    before = _transpose(graph, node.name, b)
    y = _value(graph, f"{node.outputs[0]}.T", b, None)
    layer = linear(graph, node, before.outputs[0], weight, y)
    return [before, *layer, _transpose(graph, node.name, y, node.outputs[0])]


def _gemm(graph: Graph, node: Node) -> list[Node] | None:
    """Gemm: ``alpha * A' @ B' + beta * C`` with A or B constant."""
    a, b = node.inputs[:2]
    c = node.inputs[2] if len(node.inputs) > 2 else ""
    attrs = node.attrs
    alpha, beta = float(attrs.get("alpha", 1.0)), float(attrs.get("beta", 1.0))
    out, nodes = node.outputs[0], []
    if _matrix(graph, b) and a not in graph.weights and graph.dtype(a) in FLOATS:
        weight = _weight(graph, b, not attrs.get("transB", 0))
        right, x, turn = True, a, bool(attrs.get("transA", 0))
    elif _matrix(graph, a) and b not in graph.weights and graph.dtype(b) in FLOATS:
        weight = _weight(graph, a, bool(attrs.get("transA", 0)))
        right, x, turn = False, b, not attrs.get("transB", 0)
    else:
        return None
    if alpha != 1.0:
        weight = _scaled(graph, weight, alpha)
    if turn:
        nodes.append(_transpose(graph, node.name, x))
        x = nodes[-1].outputs[0]
    c = "" if beta == 0.0 else c
    n = graph.weights[weight].shape[0]
    bias = _bias_weight(graph, c, n, beta) if c and right else ""
    rest = c if c and not bias else ""
    if not right:
        flat = _value(graph, f"{out}.T", x, None)
        nodes += linear(graph, node, x, weight, flat)
        y = out if not rest else _value(graph, f"{out}.linear", x, None)
        nodes.append(_transpose(graph, node.name, flat, y))
    else:
        y = out if not rest else _value(graph, f"{out}.linear", x, None)
        nodes += linear(graph, node, x, weight, y, bias)
    if rest:
        nodes += _scaled_add(graph, node, y, rest, beta)
    return nodes


def _scaled(graph: Graph, weight: str, alpha: float) -> str:
    """``alpha * weight``; the codes of a quantized one stay, its scales change."""
    factor = np.asarray(alpha, np.float32)
    name = stored(graph, weight, f".x{alpha:g}", graph.weights[weight] * factor)
    codes = graph.codes.get(weight)
    scaled = None if codes is None else codes.times(factor)
    if scaled is not None:
        graph.codes[name] = scaled
    return name


def _scaled_add(graph: Graph, node: Node, y: str, c: str, beta: float) -> list[Node]:
    """``y + beta * c``."""
    nodes = []
    if beta != 1.0:
        scale = graph.add_weight(f"{node.name}.beta", np.asarray(beta, graph.dtype(c)))
        scaled = _value(graph, f"{c}.x{beta:g}", c, graph.shape(c))
        nodes.append(Node("Mul", graph.fresh(f"{node.name}.beta"), (c, scale), (scaled,)))
        c = scaled
    nodes.append(Node("Add", graph.fresh(f"{node.name}.add"), (y, c), (node.outputs[0],)))
    return nodes


def _bias_weight(graph: Graph, value: str, n: int, beta: float = 1.0) -> str:
    """A constant that adds one number per output as float32 [N], else ``""``."""
    array = graph.weights.get(value)
    if array is None or array.dtype.name not in FLOATS or array.size not in (1, n):
        return ""
    if array.ndim and array.shape[-1] != array.size:
        return ""
    if beta == 1.0 and array.shape == (n,) and array.dtype == np.float32:
        return value
    scaled = np.broadcast_to(array.reshape(-1), (n,)) * beta
    return stored(graph, value, f".bias{n}" + (f".x{beta:g}" if beta != 1.0 else ""), scaled)


def _bias(graph: Graph, node: Node) -> None:
    """Move a constant added to a layer's output, or to a reshape of it, into the layer."""
    for y, c in (node.inputs, node.inputs[::-1]):
        split = graph.made_by(y, *RESHAPES)
        made = y if split is None else split.inputs[0]
        layer = graph.made_by(made, "apq.Linear")
        if layer is None or not graph.only_use(y) or not graph.only_use(made):
            continue
        if layer.inputs[2] or layer.inputs[3] or layer.attrs["activation"]:
            continue
        n = graph.weights[layer.inputs[1]].shape[0]
        rank = graph.rank(y)
        if rank is None or c not in graph.weights or graph.weights[c].ndim > rank:
            continue
        bias = _bias_weight(graph, c, n) if split is None else _split_bias(graph, made, y, c)
        if not bias:
            continue
        layer = replace(layer, inputs=(*layer.inputs[:2], bias, ""))
        if split is None:
            graph.replace(node, replace(layer, outputs=node.outputs))
            return
        wide = _value(graph, f"{made}.biased", made, graph.shape(made))
        back = replace(split, inputs=(wide, *split.inputs[1:]), outputs=node.outputs)
        graph.replace(node, replace(layer, outputs=(wide,)), back)
        return


def _split_bias(graph: Graph, made: str, y: str, c: str) -> str:
    """`c` as a bias of the layer of `made`, whose outputs `y` has as several axes, else ``""``."""
    whole, shape = graph.known_shape(made), graph.known_shape(y)
    array = graph.weights[c]
    if not whole or shape is None or array.dtype.name not in FLOATS:
        return ""
    outputs = shape[len(whole) - 1 :]
    if shape[: len(whole) - 1] != whole[:-1] or not all(isinstance(dim, int) for dim in outputs):
        return ""
    sizes = tuple(int(str(dim)) for dim in outputs)
    padded = (1,) * (len(shape) - array.ndim) + array.shape
    rows, own = padded[: len(whole) - 1], padded[len(whole) - 1 :]
    fits = all(a in (1, b) for a, b in zip(own, sizes, strict=True))
    if any(dim != 1 for dim in rows) or not fits:
        return ""
    text = "x".join(map(str, sizes))
    return stored(graph, c, f".bias{text}", np.broadcast_to(array.reshape(own), sizes).reshape(-1))


def _embedding(graph: Graph, node: Node) -> list[Node] | None:
    """Rows of a constant float table. One row repeated (token types, all 0) is a constant."""
    table, ids = node.inputs
    if not _matrix(graph, table) or node.attrs.get("axis", 0) not in (0, -2):
        return None
    if graph.dtype(ids) not in ("int32", "int64") or ids in graph.weights:
        return None
    out, wide = node.outputs[0], graph.dtype(table) == "float64"
    weight = _weight(graph, table, False)
    shape = graph.shape(ids)
    width = graph.weights[weight].shape[1]
    result = None if shape is None else (*shape, width)
    row, reach = graph.made_by(ids, "apq.Full"), span(graph, ids)
    if reach is not None:
        limit(graph, reach[1], graph.weights[weight].shape[0])
    if wide:
        out = _value(graph, f"{out}.f32", table, result)
        graph.dtypes[out] = "float32"
    if row is not None:
        at = int(row.attrs["value"])
        if not -len(graph.weights[weight]) <= at < len(graph.weights[weight]):
            raise ImportFailed(
                f"Gather {node.name!r} reads row {at} of {graph.describe(table)}: out of range"
            )
        constant = stored(graph, weight, f"[{at}]", graph.weights[weight][at])
        attrs: dict[str, Any] = {"shape": (*row.attrs["shape"], width)}
        new = Node("apq.Expand", node.name, (constant,), (out,), attrs)
    else:
        new = Node("apq.Embedding", node.name, (weight, ids), (out,))
    cast = Node("Cast", graph.fresh(f"{node.name}.out"), (out,), node.outputs, {"to": 11})
    return [new, cast] if wide else [new]

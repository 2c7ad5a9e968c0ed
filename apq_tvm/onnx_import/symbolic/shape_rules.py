"""Shapes of outputs: of the ``apq.`` operators, and where ONNX's inference gives up on symbols.

It does not add, multiply or broadcast them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import SIZES, Graph, Shape
from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    Expr,
    floordiv,
    mod,
    parse,
    product,
    run_symbols,
)
from apq_tvm.onnx_import.symbolic.geometry import along
from apq_tvm.onnx_import.symbolic.onnx_inference import infer_by_onnx
from apq_tvm.onnx_import.symbolic.regions import REGION_RULES
from apq_tvm.onnx_import.symbolic.unify import broadcast, is_symbol, matmul_shape, unify
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node


def _broadcast(graph: Graph, node: Node) -> list[Shape | None]:
    return [broadcast(graph, *(graph.shape(v) for v in node.inputs if v))]


def _product(graph: Graph, node: Node) -> list[Shape | None]:
    graph.dtypes[node.outputs[0]] = "float32"
    return _broadcast(graph, node)


def _trees(graph: Graph, node: Node) -> list[Shape | None]:
    x = graph.shape(node.inputs[0])
    graph.dtypes[node.outputs[0]] = graph.dtype(node.inputs[0]) or "float32"
    return [None if x is None else (x[0], node.attrs["targets"])]


def _matmul(graph: Graph, node: Node) -> list[Shape | None]:
    a, b = (graph.shape(v) for v in node.inputs[:2])
    return [None if a is None or b is None else matmul_shape(graph, a, b)]


def _concat(graph: Graph, node: Node) -> list[Shape | None]:
    shapes = [graph.shape(v) for v in node.inputs]
    if any(shape is None for shape in shapes):
        return [None]
    known = [shape for shape in shapes if shape is not None]
    axis = node.attrs["axis"] % len(known[0])
    result = list(known[0])
    for shape in known[1:]:
        for i, dim in enumerate(shape):
            if i != axis:
                result[i] = unify(graph, result[i], dim)
    along = [shape[axis] for shape in known]
    result[axis] = None if None in along else sum(d for d in along if d is not None)
    return [tuple(result)]


def _reshape(graph: Graph, node: Node) -> list[Shape | None]:
    target = contents(graph, node.inputs[1])
    if target is None:
        return [None]
    source = graph.shape(node.inputs[0])
    dims: list[Dim | None] = list(target)
    if not node.attrs.get("allowzero", 0):
        dims = [
            dim if dim != 0 else source[i] if source is not None and i < len(source) else None
            for i, dim in enumerate(dims)
        ]
    if -1 in dims:
        at = dims.index(-1)
        dims[at] = None
        if source is not None:
            # Dimensions that stand on both sides, known or not, cancel.
            left, right = list(source), dims[:at] + dims[at + 1 :]
            for dim in list(right):
                if dim is not None and dim in left:
                    left.remove(dim)
                    right.remove(dim)
            if None not in left and None not in right:
                dims[at] = floordiv(product(left), product(right))
                if mod(product(left), product(right)) != 0:
                    # Two names for one batch, as in mask.view(batch, -1): no other size divides.
                    for one, other in zip(source, dims, strict=False):
                        if one is not None and other is not None and is_symbol(one):
                            if is_symbol(other):
                                unify(graph, one, other)
    elif source is not None and None not in source and None not in dims:
        _settle(graph, [d for d in source if d is not None], [d for d in dims if d is not None])
    return [tuple(dims)]


def _settle(graph: Graph, source: list[Dim], target: list[Dim]) -> None:
    """A Reshape keeps the number of elements: what it says of the one symbol that is left."""
    if graph.inside:
        return  # a branch that may not be taken
    left, right = list(source), list(target)
    for dim in target:
        if dim in left:
            left.remove(dim)
            right.remove(dim)
    for one, other in ((left, right), (right, left)):
        names = [dim for dim in one if not isinstance(dim, int)]
        known = product(other)
        if len(names) != 1 or not is_symbol(names[0]) or run_symbols(names[0]):
            continue
        factor = product(dim for dim in one if isinstance(dim, int))
        if isinstance(known, int) and isinstance(factor, int) and 0 < factor <= known:
            if known % factor == 0:
                graph.settled[str(names[0])] = str(known // factor)


def _expand(graph: Graph, node: Node) -> list[Shape | None]:
    target = contents(graph, node.inputs[1])
    return [
        None if target is None else broadcast(graph, graph.shape(node.inputs[0]), tuple(target))
    ]


def _constant_of_shape(graph: Graph, node: Node) -> list[Shape | None]:
    target = contents(graph, node.inputs[0])
    return [None if target is None else tuple(target)]


def _tile(graph: Graph, node: Node) -> list[Shape | None]:
    repeats, source = contents(graph, node.inputs[1]), graph.shape(node.inputs[0])
    if repeats is None or source is None:
        return [None]
    return [tuple(None if None in (d, r) else d * r for d, r in zip(source, repeats, strict=True))]


def _split(graph: Graph, node: Node) -> list[Shape | None]:
    """Equal parts of a symbolic dimension, or symbolic parts; all else ONNX's inference knows."""
    source = graph.shape(node.inputs[0])
    if source is None or "split" in node.attrs:
        return [None] * len(node.outputs)
    axis = node.attrs.get("axis", 0) % len(source)
    if len(node.inputs) > 1:
        sizes = elements(contents(graph, node.inputs[1]))
        if sizes is None or len(sizes) != len(node.outputs):
            return [None] * len(node.outputs)
        return [(*source[:axis], size, *source[axis + 1 :]) for size in sizes]
    dim = source[axis]
    if not isinstance(dim, Expr):
        return [None] * len(node.outputs)
    part = (*source[:axis], floordiv(dim, len(node.outputs)), *source[axis + 1 :])
    return [part] * len(node.outputs)


def _conv(graph: Graph, node: Node) -> list[Shape | None]:
    """Convolution and pooling over symbolic sizes; fixed ones ONNX's inference knows."""
    x = graph.shape(node.inputs[0])
    known = graph.shape(node.outputs[0])
    if x is None or (known is not None and None not in known):
        return [None]
    kernel: Sequence[Any] | None = node.attrs.get("kernel_shape")
    at = CONV_WEIGHT.get(node.op)
    weight = None if at is None else graph.shape(node.inputs[at])
    if kernel is None:
        if weight is None:
            return [None]
        kernel = weight[2:]
    spatial = len(x) - 2
    strides = node.attrs.get("strides", (1,) * spatial)
    dilations = node.attrs.get("dilations", (1,) * spatial)
    pads = node.attrs.get("pads", (0,) * (2 * spatial))
    auto, up = node.attrs.get("auto_pad", "NOTSET"), bool(node.attrs.get("ceil_mode", 0))
    out: list[Dim | None] = []
    for i, dim in enumerate(x[2:]):
        width: Dim | None = kernel[i]
        if dim is None or width is None:
            out.append(None)
        else:
            reach = (width - 1) * dilations[i] + 1
            out.append(along(dim, reach, strides[i], pads[i::spatial], auto, up)[2])
    channels = x[1:] if at is None else weight
    return [None if channels is None else (x[0], channels[0], *out)]


def _conv_transpose(graph: Graph, node: Node) -> list[Shape | None]:
    """ConvTranspose over symbolic sizes (ONNX, ``output_shape`` and ``auto_pad``)."""
    x, w = graph.shape(node.inputs[0]), graph.shape(node.inputs[1])
    known = graph.shape(node.outputs[0])
    if x is None or w is None or None in w or (known is not None and None not in known):
        return [None]
    rank, attrs = len(x) - 2, node.attrs
    strides = attrs.get("strides", (1,) * rank)
    dilations = attrs.get("dilations", (1,) * rank)
    pads = attrs.get("pads", (0,) * (2 * rank))
    extra = attrs.get("output_padding", (0,) * rank)
    wanted, auto = attrs.get("output_shape"), attrs.get("auto_pad", "NOTSET")
    out: list[Dim | None] = []
    for i, (dim, size) in enumerate(zip(x[2:], w[2:], strict=True)):
        if wanted:
            out.append(wanted[i - rank])
        elif dim is None or size is None:
            out.append(None)
        elif auto.startswith("SAME"):
            out.append(dim * strides[i])
        else:
            reach = (size - 1) * dilations[i] + 1
            cut = 0 if auto == "VALID" else pads[i] + pads[i + rank]
            out.append((dim - 1) * strides[i] + reach + (extra[i] - cut))
    return [(x[0], w[1] * attrs.get("group", 1), *out)]


def _pad(graph: Graph, node: Node) -> list[Shape | None]:
    x, pads = graph.shape(node.inputs[0]), contents(graph, node.inputs[1])
    if x is None or pads is None or len(node.inputs) > 3:
        return [None]
    rank = len(x)
    out: list[Dim | None] = []
    for dim, before, after in zip(x, pads[:rank], pads[rank:], strict=True):
        out.append(None if dim is None or None in (before, after) else dim + before + after)
    return [tuple(out)]


def _sizes(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.Sizes``: what its entries are is known as dimensions."""
    (out,), shape = node.outputs, graph.shape(node.inputs[0])
    graph.dtypes[out] = "int64"
    known = np.empty(len(node.attrs["dims"]), object)
    known[:] = [parse(dim) for dim in node.attrs["dims"]]
    graph.values[out] = known if shape else known.reshape(())
    return [shape]


def _top_k(graph: Graph, node: Node) -> list[Shape | None]:
    """TopK of a symbolic k."""
    x, k = graph.shape(node.inputs[0]), elements(contents(graph, node.inputs[1]))
    if x is None or not k:
        return [None, None]
    axis = node.attrs.get("axis", -1) % len(x)
    return [(*x[:axis], k[0], *x[axis + 1 :])] * 2


def _one_hot(graph: Graph, node: Node) -> list[Shape | None]:
    """OneHot of a symbolic depth."""
    x, depth = graph.shape(node.inputs[0]), elements(contents(graph, node.inputs[1]))
    if x is None or not depth:
        return [None]
    axis = node.attrs.get("axis", -1) % (len(x) + 1)
    return [(*x[:axis], depth[0], *x[axis:])]


def _col2im(graph: Graph, node: Node) -> list[Shape | None]:
    """Col2Im of a symbolic batch."""
    x = graph.known_shape(node.inputs[0])
    image, kernel = (elements(contents(graph, value)) for value in node.inputs[1:3])
    if x is None or len(x) != 3 or not image or not kernel:
        return [None]
    return [(x[0], floordiv(x[1], product(kernel)), *image)]


def _flatten(graph: Graph, node: Node) -> list[Shape | None]:
    x = graph.known_shape(node.inputs[0])
    if x is None:
        return [None]
    axis = node.attrs.get("axis", 1)
    axis = axis + len(x) if axis < 0 else axis
    return [(product(x[:axis]), product(x[axis:]))]


def _like(graph: Graph, node: Node) -> list[Shape | None]:
    """The first output has the type of the first input."""
    dtype = graph.dtype(node.inputs[0])
    if dtype is not None:
        graph.dtypes[node.outputs[0]] = dtype
    return [graph.shape(node.inputs[0])]


def _embedding(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.Embedding``: a row for each id."""
    table, ids = (graph.shape(v) for v in node.inputs)
    graph.dtypes[node.outputs[0]] = "float32"
    return [None if table is None or ids is None else (*ids, table[1])]


def _from_bfloat16(graph: Graph, node: Node) -> list[Shape | None]:
    graph.dtypes[node.outputs[0]] = "float32"
    return [graph.shape(node.inputs[0])]


def _to_bfloat16(graph: Graph, node: Node) -> list[Shape | None]:
    graph.dtypes[node.outputs[0]] = "bfloat16"
    return [graph.shape(node.inputs[0])]


def _max_pool_indices(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.MaxPoolIndices``: as MaxPool, by ONNX's inference."""
    infer_by_onnx(graph, Node("MaxPool", node.name, node.inputs, node.outputs, node.attrs))
    return []


def _sample(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.Sample``: as many pixels as places."""
    image, places = (graph.shape(v) for v in node.inputs)
    graph.dtypes[node.outputs[0]] = "float32"
    return [None if image is None or places is None else (*image[:2], *places[1:3])]


def _transposed_matmul(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.MatMul``."""
    a, b = (graph.shape(v) for v in node.inputs)
    graph.dtypes[node.outputs[0]] = str(graph.dtype(node.inputs[0]))
    if a is None or b is None:
        return [None]
    perms = [node.attrs[key] for key in ("perm_a", "perm_b", "perm_out")]
    a, b = tuple(a[i] for i in perms[0]), tuple(b[i] for i in perms[1])
    y = matmul_shape(graph, a, b)
    return [None if y is None else tuple(y[i] for i in perms[2])]


def _given(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.`` nodes that carry their shape."""
    graph.dtypes[node.outputs[0]] = node.attrs.get("dtype") or str(graph.dtype(node.inputs[0]))
    return [tuple(parse(dim) for dim in node.attrs["shape"])]


def _given_each(graph: Graph, node: Node) -> list[Shape | None]:
    """``apq.`` nodes that carry the shapes and types of several outputs."""
    for out, dtype in zip(node.outputs, node.attrs["dtypes"], strict=True):
        graph.dtypes[out] = dtype
    return [tuple(parse(dim) for dim in shape) for shape in node.attrs["shapes"]]


ELEMENTWISE = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Mean", "Sum", "Where", "Equal"),
    *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift", "apq.Product"),
)
CONV_WEIGHT = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
RULES: dict[str, Callable[[Graph, Node], list[Shape | None]]] = {
    **dict.fromkeys(ELEMENTWISE, _broadcast),
    "apq.Product": _product,
    "apq.Trees": _trees,
    "MatMul": _matmul,
    "Concat": _concat,
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Tile": _tile,
    "Split": _split,
    **dict.fromkeys(CONV_WEIGHT, _conv),
    "ConvTranspose": _conv_transpose,
    "MaxPool": _conv,
    "AveragePool": _conv,
    "LpPool": _conv,
    "Pad": _pad,
    "Flatten": _flatten,
    "OneHot": _one_hot,
    "Col2Im": _col2im,
    "TopK": _top_k,
    SIZES: _sizes,
    **dict.fromkeys(("apq.NonMaxSuppression", "apq.TopK", "apq.Unique"), _given_each),
    # The normalisations may be younger than the graph's opset.
    **dict.fromkeys(("apq.Gelu", "LayerNormalization", "RMSNormalization"), _like),
    "apq.Activation": _like,
    "apq.Embedding": _embedding,
    "apq.FromBfloat16": _from_bfloat16,
    "apq.ToBfloat16": _to_bfloat16,
    "apq.MaxPoolIndices": _max_pool_indices,
    "apq.MatMul": _transposed_matmul,
    "apq.Sample": _sample,
    **dict.fromkeys(
        ("apq.Reshape", "apq.Expand", "apq.Slice", "apq.Assume", "apq.AssumeHere"), _given
    ),
    **dict.fromkeys(("apq.PoolFirst", "apq.Pad", "apq.ResizeAxes"), _given),
    **dict.fromkeys(("apq.Windows", "apq.Depthwise", "apq.Pool"), _given),
    **dict.fromkeys(("apq.Fold", "apq.Resize"), _given),
    **dict.fromkeys(("apq.AppendCache", "apq.Full", "apq.Range", "apq.Dims"), _given),
    **dict.fromkeys(("apq.NonZero", "apq.Numbers", "apq.OneHot", "apq.Tile"), _given),
    **REGION_RULES,
}

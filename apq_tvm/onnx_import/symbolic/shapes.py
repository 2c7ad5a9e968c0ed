"""Operators that take a shape as input become operators that carry it.

Once the contents of a shape input are known (`values`), a Reshape gets a constant target, written
with 0 (copy) and -1 (infer) where that is possible, and the rest become ``apq.`` nodes whose
attributes hold dimensions as text (`dims.evaluate`). What computed the shapes is dead then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.carry import Rewritten, carried, full, reshape_to, uniform
from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    as_attr,
    floordiv,
    maximum,
)
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.slices import gather, slice_, split
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.onnx_import.symbolic.values import contents, elements
from apq_tvm.types import Node

# Inputs that say how large the output is; a value that depends on data cannot be compiled there.
SHAPE_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "ConstantOfShape": (0,),
    "Tile": (1,),
    "Slice": (1, 2, 3, 4),
    "Range": (0, 1, 2),
    "Pad": (1, 3),
    "Resize": (2, 3),
    "Upsample": (1,),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "TopK": (1,),
    "OneHot": (1,),
    "Trilu": (1,),
    "CumProd": (1,),
    "CumSum": (1,),
    "Col2Im": (1, 2),
    "AffineGrid": (1,),
    **dict.fromkeys(("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd"), (1,)),
    **dict.fromkeys(("ReduceLogSumExp", "ReduceLogSum", "ReduceSumSquare"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2"), (1,)),
}


def rewrite(graph: Graph, node: Node) -> list[Node] | str | None:
    """Simplify a node whose outputs have been inferred.

    Returns
    -------
    list of Node, str or None
        The nodes that take its place, the value it merely copies, or None: it stays.
    """
    rule = RULES.get(node.op)
    new = None if rule is None else rule(graph, node)
    return [new] if isinstance(new, Node) else new


def check_shape_inputs(graph: Graph) -> None:
    """Refuse shapes that are computed from data.

    Raises
    ------
    UnsupportedModel
        Naming every such node at once.
    """
    bad = [
        f"{node.op} {node.name!r} (by {node.inputs[i]!r})"
        for node in graph.nodes
        for i in SHAPE_INPUTS.get(node.op, ())
        if i < len(node.inputs) and node.inputs[i] and node.inputs[i] not in graph.weights
    ]
    if bad:
        raise UnsupportedModel(
            f"shapes that are computed at run time cannot be compiled: {', '.join(bad)}; make them "
            "constants or functions of the input shapes"
        )


def materialize(graph: Graph) -> None:
    """Give shape values that a remaining node reads as numbers a node of their own."""
    for node in graph.each():
        several = len(node.outputs) > 1
        for value in node.outputs:
            dims = elements(graph.values.get(value))
            if node.op.startswith("apq.") or dims is None or not graph.uses[value]:
                continue
            node = graph.maker[value]
            name = graph.fresh(f"{node.name}:{value}") if several else node.name
            rest = tuple("" if out == value else out for out in node.outputs)
            keep = [replace(node, outputs=rest)] if any(rest) else []
            graph.replace(node, *keep, *_dims_nodes(graph, name, value, dims))
    graph.sweep()


def _dims_nodes(graph: Graph, name: str, value: str, dims: list[Dim]) -> list[Node]:
    """``apq.Dims``, reshaped if `value` has more than one dimension."""
    shape = graph.values[value].shape
    flat = shape if len(shape) < 2 else (len(dims),)
    out = value if flat == shape else graph.fresh(f"{value}.flat")
    attrs = {
        "dims": tuple(as_attr(dim) for dim in dims),
        "shape": flat,
        "dtype": graph.dtype(value),
    }
    first = Node("apq.Dims", name, (), (out,), attrs)
    if out == value:
        return [first]
    infer(graph, first)
    last = Node("Reshape", graph.fresh(f"{name}.reshape"), (out,), (value,))
    return [first, reshape_to(graph, last, flat, shape)]


def _reshape(graph: Graph, node: Node) -> Rewritten:
    source, shape = graph.shape(node.inputs[0]), graph.known_shape(node.outputs[0])
    if shape is None:
        return None
    if same_shape(source, shape):
        return node.inputs[0]
    return reshape_to(graph, node, source, shape)


def _flatten(graph: Graph, node: Node) -> Rewritten:
    shape = graph.known_shape(node.outputs[0])
    return None if shape is None else _reshape(graph, node)


def _resized(graph: Graph, node: Node) -> Rewritten:
    """Squeeze and Unsqueeze that change nothing; the others stay."""
    same = same_shape(graph.shape(node.inputs[0]), graph.shape(node.outputs[0]))
    return node.inputs[0] if same else None


def _expand(graph: Graph, node: Node) -> Rewritten:
    shape = graph.known_shape(node.outputs[0])
    if shape is None:
        return None
    if same_shape(graph.shape(node.inputs[0]), shape):
        return node.inputs[0]
    value = uniform(graph, node.inputs[0])
    if value is not None:
        return full(node, shape, value)
    return carried("apq.Expand", node, shape)


def _constant_of_shape(graph: Graph, node: Node) -> Rewritten:
    shape = graph.known_shape(node.outputs[0])
    if shape is None:
        return None
    return full(node, shape, np.asarray(node.attrs.get("value", np.zeros(1, np.float32))))


def _tile(graph: Graph, node: Node) -> Rewritten:
    source, shape = graph.known_shape(node.inputs[0]), graph.known_shape(node.outputs[0])
    repeats = elements(contents(graph, node.inputs[1]))
    if source is None or shape is None or repeats is None:
        return None
    if all(r == 1 for r in repeats):
        return node.inputs[0]
    if all(r == 1 or d == 1 for r, d in zip(repeats, source, strict=True)):
        return _expand(graph, node)
    return carried("apq.Tile", node, shape)


def _range(graph: Graph, node: Node) -> Rewritten:
    given = [elements(contents(graph, v)) for v in node.inputs]
    if any(v is None for v in given):
        return None
    (start,), (limit,), (delta,) = given  # type: ignore[misc]
    if not isinstance(delta, int) or not delta:
        return None
    count = floordiv(limit - start + (delta - 1 if delta > 0 else delta + 1), delta)
    count = maximum(count, 0)
    attrs = {
        "start": as_attr(start),
        "delta": delta,
        "shape": (as_attr(count),),
        "dtype": graph.dtype(node.inputs[0]),
    }
    return Node("apq.Range", node.name, (), node.outputs, attrs)


def _concat(graph: Graph, node: Node) -> Rewritten:
    """Without operands that have no elements."""
    axis = node.attrs["axis"]
    full = tuple(v for v in node.inputs if (graph.shape(v) or (1,) * 64)[axis] != 0)
    if len(full) == len(node.inputs) or not full:
        return None
    return full[0] if len(full) == 1 else replace(node, inputs=full)


def _blocks(graph: Graph, node: Node) -> Rewritten:
    """DepthToSpace and SpaceToDepth as a transpose between two reshapes, of any size."""
    x = graph.known_shape(node.inputs[0])
    size = node.attrs.get("blocksize")
    if x is None or len(x) != 4 or not isinstance(size, int) or size < 1:
        return None
    n, channels, height, width = x
    start: list[Node] = []
    split: tuple[Dim, ...]
    result: tuple[Dim, ...]
    source = node.inputs[0]
    if node.op == "DepthToSpace":
        if not isinstance(channels, int) or channels % (size * size):
            return None
        depth = channels // (size * size)
        first = node.attrs.get("mode", "DCR") == "DCR"
        split = (n, *((size, size, depth) if first else (depth, size, size)), height, width)
        perm = (0, 3, 4, 1, 5, 2) if first else (0, 1, 4, 2, 5, 3)
        result = (n, depth, height * size, width * size)
    else:
        rows, columns = floordiv(height, size), floordiv(width, size)
        whole = (n, channels, rows * size, columns * size)
        if not same_shape(x, whole):
            source = graph.fresh(f"{node.inputs[0]}.whole")
            attrs = {"shape": tuple(as_attr(dim) for dim in whole)}
            name = graph.fresh(f"{node.name}.fits")
            start = [Node("apq.Assume", name, node.inputs[:1], (source,), attrs)]
        split = (n, channels, rows, size, columns, size)
        perm = (0, 3, 5, 1, 2, 4)
        result = (n, channels * size * size, rows, columns)
        x = whole
    apart, turned = (graph.fresh(f"{node.outputs[0]}.{part}") for part in ("apart", "turned"))
    turn = Node("Transpose", graph.fresh(f"{node.name}.turn"), (apart,), (turned,), {"perm": perm})
    before = Node("Reshape", graph.fresh(f"{node.name}.apart"), (source,), (apart,))
    after = Node("Reshape", node.name, (turned,), node.outputs)
    moved = tuple(split[axis] for axis in perm)
    return [*start, reshape_to(graph, before, x, split), turn,
            reshape_to(graph, after, moved, result)]  # fmt: skip


def _one_hot(graph: Graph, node: Node) -> Rewritten:
    """A depth given as [n] becomes a scalar, the only form TVM reads."""
    depth = graph.weights.get(node.inputs[1])
    shape = graph.known_shape(node.outputs[0])
    if depth is None and shape is not None:
        new = carried("apq.OneHot", node, shape, axis=node.attrs.get("axis", -1))
        dtype = {"dtype": graph.dtype(node.inputs[2])}
        inputs = (node.inputs[0], node.inputs[2])
        return replace(new, inputs=inputs, attrs={**new.attrs, **dtype})
    if depth is None or depth.ndim == 0:
        return None
    name = graph.add_weight(f"{node.inputs[1]}.scalar", depth.reshape(()))
    return Node(
        node.op, node.name, (node.inputs[0], name, *node.inputs[2:]), node.outputs, node.attrs
    )


def _top_k(graph: Graph, node: Node) -> Rewritten:
    """TopK of a symbolic k."""
    shape, dtype = graph.known_shape(node.outputs[0]), graph.dtype(node.inputs[0])
    if node.inputs[1] in graph.weights or shape is None or dtype is None:
        return None
    names = tuple(out or graph.fresh(f"{node.name}.unread") for out in (*node.outputs, "")[:2])
    texts = tuple(as_attr(dim) for dim in shape)
    attrs = {
        "axis": int(node.attrs.get("axis", -1)) % len(shape),
        "largest": bool(node.attrs.get("largest", 1)),
        "shapes": (texts, texts),
        "dtypes": (dtype, "int64"),
    }
    return Node("apq.TopK", node.name, node.inputs[:1], names, attrs)


def _max_pool(graph: Graph, node: Node) -> Rewritten:
    """With indices it is an operator of ours."""
    if not any(node.outputs[1:]):
        return None
    names = (node.outputs[0] or graph.fresh(f"{node.name}.values"), node.outputs[1])
    return Node("apq.MaxPoolIndices", node.name, node.inputs, names, node.attrs)


RULES: dict[str, Callable[[Graph, Node], Rewritten]] = {
    "MaxPool": _max_pool,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _resized,
    "Unsqueeze": _resized,
    "Concat": _concat,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Tile": _tile,
    "Range": _range,
    "Slice": slice_,
    "Gather": gather,
    "Split": split,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "DepthToSpace": _blocks,
    "SpaceToDepth": _blocks,
}

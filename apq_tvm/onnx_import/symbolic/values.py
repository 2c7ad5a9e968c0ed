"""Symbolic contents of small integer tensors: what a graph computes from the shapes of its inputs.

Contents are numpy object arrays whose entries are dimensions (`dims`), in floats fractions of them
(`ratios`), booleans, or None where nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.symbolic import floors, ratios
from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    Expr,
    compare,
    equal,
    floordiv,
    maximum,
    minimum,
    mod,
    negative,
    not_negative,
    positive,
    product,
)
from apq_tvm.types import Array, Node

# A tensor with more entries holds data, not a shape.
LARGEST = 64
# An expression with more terms, or factors in one, is no size.
MOST_TERMS = 64


def contents(graph: Graph, value: str) -> Array | None:
    """What is known of the entries of a small tensor, None if nothing."""
    weight = graph.weights.get(value)
    if weight is None:
        return graph.values.get(value)
    if weight.dtype.name in FLOATS and weight.size <= LARGEST:
        entries = [ratios.number(v) for v in weight.ravel().tolist()]
        return _objects(entries if weight.ndim else entries[0], weight.shape)
    if weight.dtype.kind not in "iub" or weight.size > LARGEST:
        return None
    return _objects(weight.tolist(), weight.shape)


def elements(array: Array | None) -> list[Dim] | None:
    """The entries of symbolic contents, if all are known and whole numbers."""
    if array is None or any(v is None or isinstance(v, ratios.Ratio) for v in array.ravel()):
        return None
    return [v if isinstance(v, Expr) else int(v) for v in array.ravel()]


def evaluate(graph: Graph, node: Node) -> list[Array] | None:
    """Contents of the outputs of `node`, or None."""
    if node.op == "Shape":
        shape = graph.shape(node.inputs[0])
        if shape is None:
            return None
        dims = list(shape)[node.attrs.get("start", 0) : node.attrs.get("end")]
        return [_objects(dims, (len(dims),))]
    if node.op == "Size":
        known = graph.known_shape(node.inputs[0])
        return None if known is None else [_objects(product(known), ())]
    if node.op == "Concat":
        return _concat_of_some(graph, node)
    first = node.inputs[0] if node.inputs else ""
    floats = graph.dtype(first) in FLOATS if first else False
    rule = (FLOAT_RULES.get(node.op) if floats else None) or RULES.get(node.op)
    if node.op == "Div" and not floats:  # the one that must know the graph
        rule = _elementwise(partial(_div, graph))
    if rule is None or not all(v in graph.weights or v in graph.values for v in node.inputs if v):
        return None
    arguments = [contents(graph, v) if v else None for v in node.inputs]
    if any(argument is None for v, argument in zip(node.inputs, arguments, strict=True) if v):
        return None
    result = rule(node, *arguments)
    if result is None:
        return None
    # numpy hands out the entry itself where an object array would have no dimension.
    arrays = [
        a if isinstance(a, np.ndarray) else _objects(a, ())
        for a in (result if isinstance(result, list) else [result])
    ]
    return None if any(a.size > LARGEST for a in arrays) else arrays


def _concat_of_some(graph: Graph, node: Node) -> list[Array] | None:
    """Contents of which a part is known: sizes of data between such that follow from shapes."""
    given = [_part(graph, value) for value in node.inputs]
    parts = [part for part in given if part is not None and part.ndim]
    if len(parts) < len(given):
        return None
    whole: Array = np.concatenate(parts, node.attrs["axis"])
    known = whole.size <= LARGEST and any(entry is not None for entry in whole.ravel())
    return [whole] if known else None


def _part(graph: Graph, value: str) -> Array | None:
    """Contents of a value, None for each of some entries that depend on data."""
    known, shape = contents(graph, value), graph.shape(value)
    if known is None and shape is not None and len(shape) == 1:
        (count,) = shape
        if isinstance(count, int) and count <= LARGEST:
            return _objects([None] * count, (count,))
    return known


def is_too_long(dim: Any) -> bool:
    """Whether a number needs more than 64 bits, or an expression has very many terms."""
    if isinstance(dim, Expr):
        return len(dim.terms) > MOST_TERMS or any(
            len(atoms) > MOST_TERMS or is_too_long(coefficient) for atoms, coefficient in dim.terms
        )
    return isinstance(dim, int) and dim.bit_length() > 64


def _objects(values: Any, shape: tuple[int, ...]) -> Array:
    """An object array; numpy must not look into the entries."""
    array = np.empty(shape, object)
    flat = array.reshape(-1)
    flat[:] = np.asarray(values, object).reshape(-1) if shape else [values]
    return flat.reshape(shape)


def _elementwise(fn: Callable[..., Any]) -> Callable[..., Array]:
    def rule(node: Node, *arguments: Array) -> Array:
        def entry(*values: Any) -> Any:
            result = None if any(v is None for v in values) else fn(*values)
            return None if is_too_long(result) else result

        whole = np.frompyfunc(entry, len(arguments), 1)(*arguments)
        return np.asarray(whole, object)

    return rule


def _div(graph: Graph, a: Dim, b: Dim) -> Dim | None:
    """Integer Div truncates; that is the floor where neither side is negative."""
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    if not_negative(a) and positive(b):
        return floordiv(a, b)
    return None if negative(a) else floors.decided(graph, a, b)


def _mod(a: Dim, b: Dim) -> Dim | None:
    if b == 0:
        return None
    return mod(a, b)


def _equal(a: Any, b: Any) -> bool | None:
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a == b)
    if equal(a, b):
        return True
    return False if positive(a - b) or negative(a - b) else None


def _less(a: Dim, b: Dim) -> bool | None:
    """``a < b``: for integers the same as ``a + 1 <= b``."""
    if compare(a + 1, b) in (-1, 0):
        return True
    return False if compare(a, b) in (0, 1) else None


def _not(a: bool | None) -> bool | None:
    return None if a is None else not a


def _and(a: bool, b: bool) -> bool:
    return a and b


def _or(a: bool, b: bool) -> bool:
    return a or b


def _where(node: Node, condition: Array, x: Array, y: Array) -> Array:
    def entry(c: Any, a: Any, b: Any) -> Any:
        if c is None:
            return a if a is not None and type(a) is type(b) and a == b else None
        return a if c else b

    return np.asarray(np.frompyfunc(entry, 3, 1)(condition, x, y), object)


def _cast(node: Node, x: Array) -> Array | None:
    from apq_tvm.onnx_import.graph import np_dtype

    kind = np.dtype(np_dtype(node.attrs["to"])).kind
    if kind == "b":
        return np.asarray(
            np.frompyfunc(lambda v: None if v is None else _not(_equal(v, 0)), 1, 1)(x), object
        )
    if kind not in "iuf":
        return None
    return np.asarray(
        np.frompyfunc(lambda v: int(v) if isinstance(v, bool) else v, 1, 1)(x), object
    )


def _axes(node: Node, axes: Array | None) -> tuple[int, ...] | None:
    """Axes given as attribute (before opset 13) or as input; None where they are absent."""
    if "axes" in node.attrs:
        return tuple(node.attrs["axes"])
    return None if axes is None else tuple(int(a) for a in axes.ravel())


def _unsqueeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, _axes(node, axes) or ())


def _squeeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, _axes(node, axes))


def _concrete(array: Array | None) -> list[int] | None:
    if array is None or any(not isinstance(v, int) for v in array.ravel()):
        return None
    return [int(v) for v in array.ravel()]


def _gather(node: Node, x: Array, indices: Array) -> Array | None:
    at = _concrete(indices)
    axis = node.attrs.get("axis", 0)
    if at is None or not x.ndim or any(not -x.shape[axis] <= i < x.shape[axis] for i in at):
        return None
    return np.take(x, np.asarray(at, np.int64).reshape(indices.shape), axis)


def _slice(node: Node, x: Array, *bounds_: Array | None) -> Array | None:
    starts, ends = _concrete(bounds_[0]), _concrete(bounds_[1])
    if starts is None or ends is None:
        return None
    axes = _concrete(bounds_[2]) if len(bounds_) > 2 else list(range(len(starts)))
    steps = _concrete(bounds_[3]) if len(bounds_) > 3 else [1] * len(starts)
    if axes is None or steps is None:
        return None
    index: list[slice] = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        # Counted back from the end, "before the first" has no number in Python.
        stop = None if step < 0 and end < -x.shape[axis] else end
        index[axis] = slice(start, stop, step)
    return x[tuple(index)]


def _reshape(node: Node, x: Array, shape: Array) -> Array | None:
    target = _concrete(shape)
    if target is None:
        return None
    if not node.attrs.get("allowzero", 0):
        target = [x.shape[i] if d == 0 else d for i, d in enumerate(target)]
    return x.reshape(target)


def _split(node: Node, x: Array, sizes: Array | None = None) -> list[Array] | None:
    axis = node.attrs.get("axis", 0)
    given = list(node.attrs.get("split", ())) or _concrete(sizes)
    if given is None:
        count = len(node.outputs)
        given = [-(-x.shape[axis] // count)] * count
    return np.split(x, np.cumsum(given)[:-1], axis)


def _constant_of_shape(node: Node, shape: Array) -> Array | None:
    target = _concrete(shape)
    value = np.asarray(node.attrs.get("value", np.zeros(1, np.float32)))
    if target is None or value.dtype.kind not in "iub" or not 0 <= prod(target) <= LARGEST:
        return None
    return _objects([value.reshape(-1)[0].item()] * prod(target), tuple(target))


def _expand(node: Node, x: Array, shape: Array) -> Array | None:
    target = _concrete(shape)
    if target is None or not 0 <= prod(target) <= LARGEST:
        return None
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(target)))


def _range(node: Node, start: Array, limit: Array, delta: Array) -> Array | None:
    given = [_concrete(v) for v in (start, limit, delta)]
    if any(v is None for v in given):
        return None
    (first,), (last,), (step,) = given  # type: ignore[misc]
    values = range(first, last, step) if step else range(0)
    return _objects(list(values), (len(values),)) if not values[LARGEST:] else None


def _reduce(fn: Callable[[Any, Any], Any]) -> Callable[..., Array | None]:
    def rule(node: Node, x: Array, axes: Array | None = None) -> Array | None:
        over = _axes(node, axes)
        if not x.size or any(v is None for v in x.ravel()):
            return None
        if over is None and node.attrs.get("noop_with_empty_axes", 0):
            return x
        keep = bool(node.attrs.get("keepdims", 1))
        axis = tuple(range(x.ndim)) if over is None else over
        result = np.frompyfunc(fn, 2, 1).reduce(x, axis=axis, keepdims=keep)
        return np.asarray(result, object)

    return rule


def _float_cast(node: Node, x: Array) -> Array | None:
    from apq_tvm.onnx_import.graph import np_dtype

    kind = np.dtype(np_dtype(node.attrs["to"])).kind
    if kind == "f":
        return x
    return _elementwise(ratios.truncate)(node, x) if kind in "iu" else None


FLOAT_RULES: dict[str, Callable[..., Any]] = {
    "Add": _elementwise(ratios.add),
    "Sub": _elementwise(ratios.sub),
    "Mul": _elementwise(ratios.mul),
    "Div": _elementwise(ratios.div),
    "Neg": _elementwise(lambda a: ratios.sub(0, a)),
    "Reciprocal": _elementwise(lambda a: ratios.div(1, a)),
    "Floor": _elementwise(ratios.floor),
    "Ceil": _elementwise(ratios.ceil),
    "Min": _elementwise(ratios.smaller),
    "Max": _elementwise(ratios.larger),
    "Less": _elementwise(ratios.less),
    "Greater": _elementwise(lambda a, b: ratios.less(b, a)),
    "LessOrEqual": _elementwise(lambda a, b: _not(ratios.less(b, a))),
    "GreaterOrEqual": _elementwise(lambda a, b: _not(ratios.less(a, b))),
    "Cast": _float_cast,
    **dict.fromkeys(("Equal", "Mod", "ReduceProd", "ReduceSum"), lambda *_: None),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), lambda *_: None),
}
"""Of operators whose first input is of floats; None says that those of integers do not hold."""


RULES: dict[str, Callable[..., Any]] = {
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Mod": _elementwise(_mod),
    "Neg": _elementwise(lambda a: -a),
    "Min": _elementwise(lambda a, b: minimum(a, b)),
    "Max": _elementwise(lambda a, b: maximum(a, b)),
    "Equal": _elementwise(_equal),
    "Less": _elementwise(_less),
    "Greater": _elementwise(lambda a, b: _less(b, a)),
    "LessOrEqual": _elementwise(lambda a, b: _not(_less(b, a))),
    "GreaterOrEqual": _elementwise(lambda a, b: _not(_less(a, b))),
    "Not": _elementwise(_not),
    "And": _elementwise(_and),
    "Or": _elementwise(_or),
    "Where": _where,
    "Cast": _cast,
    "Identity": lambda node, x: x,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Gather": _gather,
    "Slice": _slice,
    "Reshape": _reshape,
    "Transpose": lambda node, x: x.transpose(node.attrs.get("perm")),
    "Split": _split,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Range": _range,
    "ReduceProd": _reduce(lambda a, b: a * b),
    "ReduceSum": _reduce(lambda a, b: a + b),
    "ReduceMax": _reduce(maximum),
    "ReduceMin": _reduce(minimum),
}

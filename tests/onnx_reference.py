"""The meaning of the normalised graph in numpy, node by node: what all else is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from windows_reference import WINDOW_OPS, depthwise

from apq_tvm.onnx_import.control.execute import Runner, execute
from apq_tvm.onnx_import.symbolic.dims import evaluate, is_run
from apq_tvm.onnx_import.symbolic.onnx_inference import node_proto
from apq_tvm.types import Array, ImportedModel, Node

RunNode = Callable[[Node, list[Any], int], list[Array]]


def run_reference(
    model: ImportedModel, feeds: Mapping[str, Array], run_node: RunNode | None = None
) -> dict[str, Array]:
    """Run a normalised graph.

    Parameters
    ----------
    model : ImportedModel
    feeds : mapping of str to ndarray
        Every input by name.
    run_node : callable, optional
        ``(node, inputs, opset) -> outputs`` for ONNX operators; onnx's reference evaluator, which
        has gaps (pooling, Softmax before opset 13), by default.

    Returns
    -------
    dict of str to ndarray
        Every output by name, in ONNX order.
    """
    symbols = {
        dim: size
        for spec in model.inputs
        for dim, size in zip(spec.shape, feeds[spec.name].shape, strict=True)
        if isinstance(dim, str)
    }
    values: dict[str, Any] = {"": None, **model.weights, **feeds}

    def run(_: int, node: Node) -> None:
        given = [values[name] for name in node.inputs]
        attrs = dict(node.attrs)
        if "shape" in attrs:
            attrs["shape"] = tuple(evaluate(dim, symbols) for dim in attrs["shape"])
        if node.op in _OPS:
            results = [_OPS[node.op](attrs, symbols, *given)]
        else:
            results = (run_node or run_with_onnx)(node, given, model.opset)
        for name, result in zip(node.outputs, results, strict=False):
            values[name] = np.asarray(result)

    runner = Runner(run, values.__getitem__, values.__setitem__, np.int64, np.stack)
    execute(model.nodes, runner, symbols)
    return {spec.name: values[spec.name] for spec in model.outputs}


def one_node_model(node: Node, opset: int) -> Any:
    """An ``onnx.ModelProto`` of one ONNX operator, its inputs and outputs named as in the graph."""
    from onnx import helper

    inputs = [helper.make_empty_tensor_value_info(n) for n in dict.fromkeys(node.inputs) if n]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.outputs if name]
    graph = helper.make_graph([node_proto(node)], node.name, inputs, outputs)
    # The normalisations may stand in a graph older than the operator.
    version = max(opset, {"LayerNormalization": 17, "RMSNormalization": 23}.get(node.op, opset))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


def run_with_onnx(node: Node, given: list[Any], opset: int) -> list[Array]:
    """One ONNX operator by onnx's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    feeds = {name: np.asarray(v) for name, v in zip(node.inputs, given, strict=True) if name}
    results = iter(ReferenceEvaluator(one_node_model(node, opset)).run(None, feeds))
    return [next(results) if name else np.empty(0) for name in node.outputs]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array, approximate: str = "none") -> Array:
    """GELU in float64: ``x * Phi(x)``, or the tanh approximation."""
    wide = x.astype(np.float64)
    if approximate == "tanh":
        gate = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    else:
        gate = _erf(wide / math.sqrt(2))
    return np.asarray(0.5 * wide * (1 + gate), np.float32)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, "tanh"),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "sigmoid_ratio": _sigmoid,
    "tanh_ratio": np.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1).astype(np.float32),
    "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1).astype(np.float32),
}


def _linear(
    attrs: Any, _: Any, x: Array, w: Array, bias: Any = None, residual: Any = None
) -> Array:
    y = x @ w.T
    if bias is not None:
        y = y + bias
    if attrs.get("after"):
        return ACTIVATIONS[attrs["activation"]](y + residual)
    y = ACTIVATIONS[attrs["activation"]](y)
    return y if residual is None else np.asarray(y + residual)


_COMPARED = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)


def _trees(attrs: Any, _: Any, x: Array, *tables: Array) -> Array:
    nodes, first, targets, values, roots, depths, *rest = tables
    features, thresholds, yes, no = np.ascontiguousarray(nodes.T)
    thresholds = thresholds.view(np.float32) if x.dtype == np.float32 else rest.pop(0)
    join = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}[attrs["how"]]
    start = {"SUM": 0.0, "MIN": np.inf, "MAX": -np.inf}[attrs["how"]]
    y = np.full((len(x), attrs["targets"]), start, x.dtype)
    for row, total in zip(x, y, strict=True):
        for root, depth in zip(roots.reshape(-1), depths.repeat(roots.shape[1]), strict=True):
            at = root
            for _ in range(depth):
                mode = rest[0][at] if len(attrs["modes"]) > 1 else attrs["modes"][0]
                answer = (
                    bool(_COMPARED[mode](row[features[at]], thresholds[at])) if mode >= 0 else 0
                )
                if attrs["missing"] and np.isnan(row[features[at]]) and rest[-1][at]:
                    answer = True
                at = yes[at] if answer else no[at]
            for entry in range(first[at], first[at + 1]):
                total[targets[entry]] = join(total[targets[entry]], values[entry])
    return y


def _embedding(attrs: Any, _: Any, table: Array, ids: Array) -> Array:
    return np.take(table, ids, axis=0)


def _matmul(attrs: Any, _: Any, a: Array, b: Array) -> Array:
    product = a.transpose(attrs["perm_a"]) @ b.transpose(attrs["perm_b"])
    return np.asarray(product.transpose(attrs["perm_out"]))


def _softmax(attrs: Any, _: Any, x: Array, mask: Any = None) -> Array:
    scores = x * np.float32(attrs["scale"])
    scores = scores if mask is None else scores + mask
    top = scores.max(axis=-1, keepdims=True)
    if attrs["zero_masked"]:
        top = np.maximum(top, np.finfo(np.float32).min)
    with np.errstate(invalid="ignore"):  # a row of -inf alone is NaN, as in ONNX
        e = np.exp(scores - top)
    total = e.sum(axis=-1, keepdims=True)
    return np.asarray(e / (np.maximum(total, 1e-30) if attrs["zero_masked"] else total))


def _slice(attrs: Any, symbols: Mapping[str, int], x: Array) -> Array:
    for axis, start, step in zip(attrs["axes"], attrs["starts"], attrs["steps"], strict=True):
        at = evaluate(start, symbols) + np.arange(attrs["shape"][axis]) * step
        x = np.take(x, at, axis)
    return x


def _range(attrs: Any, symbols: Mapping[str, int]) -> Array:
    (count,) = attrs["shape"]
    values = evaluate(attrs["start"], symbols) + np.arange(count) * attrs["delta"]
    return np.asarray(values, attrs["dtype"])


def _dims(attrs: Any, symbols: Mapping[str, int]) -> Array:
    values = [evaluate(dim, symbols) for dim in attrs["dims"]]
    return np.asarray(values, attrs["dtype"]).reshape(attrs["shape"])


def _depthwise(
    attrs: Any, _: Any, x: Array, w: Array, bias: Any = None, residual: Any = None
) -> Array:
    return ACTIVATIONS[attrs["activation"]](depthwise(attrs, x, w, bias))


def _append_cache(attrs: Any, _: Any, past: Any, new: Array, start: Array) -> Array:
    whole = np.zeros(attrs["shape"], np.float32)
    for b, first in enumerate(start):
        known = 0 if past is None else min(first, past.shape[2])
        whole[b, :, :known] = past[b, :, :known] if known else 0
        part = whole[b, :, first : first + new.shape[1]]
        part[:] = new[b].transpose(1, 0, 2)[:, : part.shape[1]]
    return whole


def _pad(attrs: Any, symbols: Mapping[str, int], x: Array, value: Any = None) -> Array:
    fill = {} if value is None else {"constant_values": np.asarray(value).item()}
    for axis, (size, wanted) in enumerate(zip(x.shape, attrs["shape"], strict=True)):
        before = evaluate(attrs["before"][axis], symbols)
        after = wanted - size - before
        widths = [(0, 0)] * x.ndim
        widths[axis] = (max(before, 0), max(after, 0))
        x = np.pad(x, widths, attrs["mode"], **fill)
        x = np.take(x, range(max(-before, 0), x.shape[axis] - max(-after, 0)), axis)
    return x


def _pool_first(attrs: Any, symbols: Mapping[str, int], x: Array) -> Array:
    """Window by window, over elements of the image alone."""
    result = np.empty(attrs["shape"], x.dtype)
    starts = [evaluate(d, symbols) for d in attrs["begins"]]
    ends = [evaluate(d, symbols) for d in attrs["ends"]]
    for at in np.ndindex(*attrs["shape"][2:]):
        part, count = x, 1
        for axis, where in enumerate(at):
            first = where * attrs["strides"][axis] - starts[axis]
            taps = first + np.arange(attrs["kernel"][axis]) * attrs["dilations"][axis]
            size = x.shape[2 + axis]
            inside = taps[(taps >= 0) & (taps < size)]
            count *= int((taps < size + ends[axis]).sum()) if attrs["padding"] else len(inside)
            part = np.take(part, inside, 2 + axis)
        axes = tuple(range(2, x.ndim))
        if attrs["kind"] == "max":
            whole = part.max(axes)
        elif attrs["kind"] == "lp":
            whole = (np.abs(part) ** attrs["p"]).sum(axes) ** (1 / attrs["p"])
        else:
            whole = part.sum(axes) / count
        result[(slice(None), slice(None), *at)] = whole
    return result


def _sizes(attrs: Any, symbols: dict[str, int], value: Array) -> Array:
    """What a run computes becomes known as a dimension, or must be what it is taken for."""
    for dim, size in zip(attrs["dims"], value.ravel().tolist(), strict=True):
        if isinstance(dim, str) and is_run(dim):
            symbols[dim] = size
        assert size == evaluate(dim, symbols) >= 0
    return value


def _numbers(attrs: Any, symbols: Mapping[str, int], *given: Array) -> Array:
    assert attrs["rule"] == "choose", "the others have tests of their own, against ONNX Runtime"
    pairs = np.asarray([evaluate(dim, symbols) for dim in attrs["extents"]]).reshape(2, -1)
    return pairs[0 if given[0] else 1]


def _one_hot(attrs: Any, _: Any, ids: Array, values: Array) -> Array:
    axis = attrs["axis"] % (ids.ndim + 1)
    places = np.arange(attrs["shape"][axis])
    wrapped = np.where(ids < 0, ids + len(places), ids)
    hot = np.expand_dims(wrapped, -1) == places
    return np.moveaxis(np.where(hot, values[1], values[0]), -1, axis)


_OPS: dict[str, Callable[..., Array]] = {
    "apq.NonZero": lambda attrs, _, x: np.stack(np.nonzero(x)),
    "apq.Numbers": _numbers,
    "apq.OneHot": _one_hot,
    "apq.Sizes": _sizes,
    "apq.Tile": lambda attrs, _, x: np.tile(
        x, [n // d if d else 1 for n, d in zip(attrs["shape"], x.shape, strict=True)]
    ),
    "apq.Assume": lambda attrs, _, x: x.reshape(attrs["shape"]),
    "apq.AssumeHere": lambda attrs, _, x: x.reshape(attrs["shape"]),
    "apq.Pad": _pad,
    "apq.PoolFirst": _pool_first,
    **WINDOW_OPS,
    "apq.Trees": _trees,
    "apq.Product": lambda attrs, _, a, b: a * b,
    "apq.Activation": lambda attrs, _, x: ACTIVATIONS[attrs["activation"]](x),
    "apq.Depthwise": _depthwise,
    "apq.Linear": _linear,
    "apq.Embedding": _embedding,
    "apq.MatMul": _matmul,
    "apq.Softmax": _softmax,
    "apq.Gelu": lambda attrs, _, x: gelu(x, attrs["approximate"]),
    "apq.Reshape": lambda attrs, _, x: x.reshape(attrs["shape"]),
    "apq.Expand": lambda attrs, _, x: np.broadcast_to(x, attrs["shape"]),
    "apq.Slice": _slice,
    "apq.Full": lambda attrs, _: np.full(attrs["shape"], attrs["value"], attrs["dtype"]),
    "apq.Range": _range,
    "apq.Dims": _dims,
    "apq.AppendCache": _append_cache,
}

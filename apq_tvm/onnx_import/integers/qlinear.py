"""Operators on integers with scales beside them (``QLinearMatMul`` ...) as operators on floats.

Each dequantizes its inputs, computes, and rounds its output: that rounding is what the operator
means, and others read it. Weights keep their codes; the rounding of an input that another operator
of this kind made is dropped before a layer (`quantized.keep_codes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

Rule = Callable[[Graph, Node], list[Node]]


def qlinear_matmul(graph: Graph, node: Node) -> list[Node]:
    """``QLinearMatMul``.

    Raises
    ------
    UnsupportedModel
        Scales of the input or output that are no single constant.
    """
    steps = Steps(graph, node)
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.inputs
    left = _number(steps, a, a_scale, a_zero)
    right = _weight(steps, b, b_scale, b_zero, (graph.rank(b) or 2) - 1)
    product = graph.fresh(f"{node.name}.product")
    steps.add(Node("MatMul", node.name, (left, right), (product,)))
    return steps.done(_rounded(steps, product, y_scale, y_zero))


def qlinear_conv(graph: Graph, node: Node) -> list[Node]:
    """``QLinearConv``; its bias holds integers of the scale of the product.

    Raises
    ------
    UnsupportedModel
        Scales of the input or output that are no single constant, a bias that is no constant.
    """
    steps = Steps(graph, node)
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b = (*node.inputs, "")[:9]
    inputs = [_number(steps, x, x_scale, x_zero), _weight(steps, w, w_scale, w_zero, 0)]
    if b:
        given, scales = graph.weights.get(b), [graph.weights.get(v) for v in (x_scale, w_scale)]
        if given is None or scales[0] is None or scales[1] is None:
            raise steps.refuse(f"its bias {graph.describe(b)} is no constant with constant scales")
        unit = scales[0].reshape(-1).astype(np.float32) * scales[1].reshape(-1)
        bias = (given.astype(np.float32) * unit).astype(np.float32)
        inputs.append(graph.add_weight(f"{b}.float", bias))
    product = graph.fresh(f"{node.name}.product")
    steps.add(Node("Conv", node.name, tuple(inputs), (product,), dict(node.attrs)))
    return steps.done(_rounded(steps, product, y_scale, y_zero))


def qgemm(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.QGemm``; its bias holds integers of the scale of the product.

    Raises
    ------
    UnsupportedModel
        Scales of the input or output that are no single constant, a bias that is no constant.
    """
    steps, attrs = Steps(graph, node), dict(node.attrs)
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = (*node.inputs, *[""] * 3)[:9]
    turned = int(attrs.get("transB", 0))
    inputs = [_number(steps, a, a_scale, a_zero), _weight(steps, b, b_scale, b_zero, 1 - turned)]
    if c:
        given, scales = graph.weights.get(c), [graph.weights.get(v) for v in (a_scale, b_scale)]
        if given is None or scales[0] is None or scales[1] is None:
            raise steps.refuse(f"its bias {graph.describe(c)} is no constant with constant scales")
        unit = np.float32(attrs.get("alpha", 1.0)) * scales[0].reshape(-1) * scales[1].reshape(-1)
        bias = (given.astype(np.float32) * unit).astype(np.float32)
        inputs.append(graph.add_weight(f"{c}.float", bias))
    product = graph.fresh(f"{node.name}.product")
    steps.add(Node("Gemm", node.name, tuple(inputs), (product,), attrs))
    return steps.done(_rounded(steps, product, y_scale, y_zero) if y_scale else product)


def _binary(op: str) -> Rule:
    """A rule for an operator on two inputs, both with scale and zero point."""

    def rule(graph: Graph, node: Node) -> list[Node]:
        steps = Steps(graph, node)
        a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (*node.inputs, "")[:8]
        result = steps(op, _number(steps, a, a_scale, a_zero), _number(steps, b, b_scale, b_zero))
        return steps.done(_rounded(steps, result, y_scale, y_zero))

    return rule


def _unary(op: str, *kept: str) -> Rule:
    """A rule for an operator on one input; `kept` are the attributes that mean the same."""

    def rule(graph: Graph, node: Node) -> list[Node]:
        steps = Steps(graph, node)
        x, scale, zero, y_scale, y_zero = (*node.inputs, "")[:5]
        attrs = {key: node.attrs[key] for key in kept if key in node.attrs}
        result = steps(op, _number(steps, x, scale, zero), **attrs)
        return steps.done(_rounded(steps, result, y_scale, y_zero))

    return rule


def _mean(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.QLinearReduceMean``, by default over all axes."""
    steps = Steps(graph, node)
    x, scale, zero, y_scale, y_zero = (*node.inputs, "")[:5]
    axes = tuple(node.attrs.get("axes") or range(len(steps.shape(x))))
    number, keep = _number(steps, x, scale, zero), bool(node.attrs.get("keepdims", 1))
    result = reduced(steps, "ReduceMean", number, axes, keep)
    return steps.done(_rounded(steps, result, y_scale, y_zero))


def _softmax(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.QLinearSoftmax``, which says itself whose opset's Softmax it is."""
    if int(node.attrs.get("opset", 13)) < 13:
        raise Steps(graph, node).refuse("Softmax of an opset before 13 is not read here")
    return _unary("Softmax", "axis")(graph, node)


def _concat(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.QLinearConcat``: scale and zero point of the output come first."""
    steps, (scale, zero, *given) = Steps(graph, node), node.inputs
    parts = [_number(steps, *given[at : at + 3]) for at in range(0, len(given), 3)]
    result = steps("Concat", *parts, axis=node.attrs["axis"])
    return steps.done(_rounded(steps, result, scale, zero))


def _pool(op: str) -> Rule:
    """A rule for an average over windows, whose attributes are those of the operator on floats."""
    return _channels_first(lambda graph, node: _unary(op, *node.attrs)(graph, node))


def _channels_first(rule: Rule) -> Rule:
    """A rule for images whose channels may come last: ``channels_last``, which none has behind."""

    def moved(graph: Graph, node: Node) -> list[Node]:
        attrs = dict(node.attrs)
        last = attrs.pop("channels_last", 0)
        plain = replace(node, attrs=attrs)
        if not last:
            return rule(graph, plain)
        steps, (x, *others) = Steps(graph, node), node.inputs
        rank = len(steps.shape(x))
        first = steps.transpose(x, 0, rank - 1, *range(1, rank - 1))
        y = graph.fresh(f"{node.outputs[0]}.first")
        made = rule(graph, replace(plain, inputs=(first, *others), outputs=(y,)))
        perm = (0, *range(2, rank), 1)
        back = Node(
            "Transpose", graph.fresh(f"{node.name}.back"), (y,), node.outputs, {"perm": perm}
        )
        return [*steps.nodes, *made, back]

    return moved


def _where(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.QLinearWhere``."""
    steps, (condition, *given) = Steps(graph, node), node.inputs
    chosen = [_number(steps, *given[at : at + 3]) for at in (0, 3)]
    return steps.done(_rounded(steps, steps("Where", condition, *chosen), *given[6:8]))


def _number(steps: Steps, value: str, scale: str, zero: str) -> str:
    """The float values of integers with one scale."""
    return steps("DequantizeLinear", value, *_scalars(steps, scale, zero))


def _rounded(steps: Steps, value: str, scale: str, zero: str) -> str:
    return steps("QuantizeLinear", value, *_scalars(steps, scale, zero))


def _scalars(steps: Steps, *values: str) -> list[str]:
    """Constants of one entry as scalars; absent ones are left out."""
    graph = steps.graph
    for value in values:
        if value and graph.scalar(value) is None:
            raise UnsupportedModel(
                f"{steps.title}: {graph.describe(value)} is no single constant; only weights can "
                "have several scales"
            )
    return [_reshaped(graph, value, ()) for value in values if value]


def _weight(steps: Steps, value: str, scale: str, zero: str, axis: int) -> str:
    """The float values of integers with one scale, or one for each entry of an axis."""
    graph, given = steps.graph, []
    for name in (scale, zero):
        array = graph.weights.get(name) if name else None
        if array is not None:
            name = _reshaped(graph, name, () if array.size == 1 else (array.size,))
        given += [name] if name else []
    return steps("DequantizeLinear", value, *given, axis=axis)


def _reshaped(graph: Graph, value: str, shape: tuple[int, ...]) -> str:
    """A constant in another shape, under a name of its own."""
    if graph.weights[value].shape == shape:
        return value
    name = f"{value}.{'x'.join(map(str, shape)) or 'scalar'}"
    graph.weights.setdefault(name, graph.weights[value].reshape(shape))
    return name


QLINEAR: dict[str, Rule] = {
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
    "com.microsoft.QGemm": qgemm,
    "com.microsoft.QLinearAdd": _binary("Add"),
    "com.microsoft.QLinearAveragePool": _pool("AveragePool"),
    "com.microsoft.QLinearConcat": _concat,
    "com.microsoft.QLinearConv": _channels_first(qlinear_conv),
    "com.microsoft.QLinearGlobalAveragePool": _pool("GlobalAveragePool"),
    "com.microsoft.QLinearLeakyRelu": _unary("LeakyRelu", "alpha"),
    "com.microsoft.QLinearMul": _binary("Mul"),
    "com.microsoft.QLinearSigmoid": _unary("Sigmoid"),
    "com.microsoft.QLinearReduceMean": _mean,
    "com.microsoft.QLinearSoftmax": _softmax,
    "com.microsoft.QLinearWhere": _where,
}

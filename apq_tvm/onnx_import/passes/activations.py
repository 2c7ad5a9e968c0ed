"""Activations and residual Adds move into the layer before them."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.onnx_import.graph import Graph, with_attrs
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node

PLAIN = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid"}
LAYERS = ("apq.Linear", "apq.Depthwise")


def _near(value: float | None, target: float) -> bool:
    """Equal up to the rounding of a constant stored in half precision or as a short decimal."""
    return value is not None and abs(value - target) <= 1e-3 * abs(target)


def _split(graph: Graph, node: Node | None) -> tuple[str, float] | None:
    """``(x, c)`` of a commutative node over a value and a scalar constant."""
    if node is None:
        return None
    for x, c in (node.inputs, node.inputs[::-1]):
        value = graph.scalar(c)
        if value is not None and x not in graph.weights:
            return x, value
    return None


def _factors(graph: Graph, value: str) -> tuple[list[str], float]:
    """`value` as product of values and one constant, through Mul, and Div by constants."""
    todo, values, constant = [value], [], 1.0
    while todo:
        name = todo.pop()
        c = graph.scalar(name)
        node = graph.made_by(name, "Mul", "Div")
        if c is not None:
            constant *= c
        elif node is not None and (name == value or graph.only_use(name)):
            divisor = graph.scalar(node.inputs[1])
            if node.op == "Mul":
                todo += node.inputs
            elif divisor:
                todo.append(node.inputs[0])
                constant /= divisor
            else:
                values.append(name)
        else:
            values.append(name)
    return values, constant


def fuse_gelu(graph: Graph) -> None:
    """Write GELU in its many spellings as ``apq.Gelu``."""
    for node in graph.each():
        if node.op == "Gelu" and graph.dtype(node.inputs[0]) == "float32":
            kind = node.attrs.get("approximate", "none")
            graph.replace(node, replace(node, op="apq.Gelu", attrs={"approximate": kind}))
        elif node.op == "Mul":
            found = _gelu(graph, node)
            if found is not None:
                x, kind = found
                attrs = {"approximate": kind}
                graph.replace(node, Node("apq.Gelu", node.name, (x,), node.outputs, attrs))
    graph.sweep()


def _gelu(graph: Graph, node: Node) -> tuple[str, str] | None:
    """``0.5 * x * (1 + erf(x / sqrt(2)))``, or by tanh (Hendrycks and Gimpel 2016, section 2)."""
    values, constant = _factors(graph, node.outputs[0])
    if len(values) != 2:
        return None
    for x, gate in (values, values[::-1]):
        one = _split(graph, graph.made_by(gate, "Add")) if graph.only_use(gate) else None
        if one is None or graph.dtype(x) != "float32":
            continue
        inner = graph.made_by(one[0], "Erf", "Tanh")
        if inner is None or not graph.only_use(one[0]):
            continue
        # 0.5 may have been multiplied into the gate: 0.5 * erf(...) + 0.5 is not looked for.
        if not (_near(constant, 0.5) and _near(one[1], 1.0)):
            continue
        if inner.op == "Erf" and _is_erf_argument(graph, inner.inputs[0], x):
            return x, "none"
        if inner.op == "Tanh" and _is_tanh_argument(graph, inner.inputs[0], x):
            return x, "tanh"
    return None


def _is_erf_argument(graph: Graph, value: str, x: str) -> bool:
    """``x / sqrt(2)``."""
    values, constant = _factors(graph, value)
    return values == [x] and _near(constant, 0.5**0.5)


def _is_tanh_argument(graph: Graph, value: str, x: str) -> bool:
    """``sqrt(2 / pi) * (x + 0.044715 * x**3)``."""
    values, constant = _factors(graph, value)
    if not _near(constant, 0.7978845608) or not values:
        return False
    if sorted(values).count(x) == 1 and len(values) == 2:
        # sqrt(2 / pi) * x * (1 + 0.044715 * x**2)
        rest = next(v for v in values if v != x)
        one = _split(graph, graph.made_by(rest, "Add"))
        return one is not None and _near(one[1], 1.0) and _is_power(graph, one[0], x, 2)
    total = graph.made_by(values[0], "Add") if len(values) == 1 else None
    if total is None or x not in total.inputs:
        return False
    cubic = total.inputs[1] if total.inputs[0] == x else total.inputs[0]
    return _is_power(graph, cubic, x, 3)


def _is_power(graph: Graph, value: str, x: str, power: int) -> bool:
    """``0.044715 * x**power``, as Pow or as products."""
    values, constant = _factors(graph, value)
    if not _near(constant, 0.044715):
        return False
    count = 0
    for name in values:
        node = graph.made_by(name, "Pow")
        exponent = graph.scalar(node.inputs[1]) if node is not None else None
        if name == x:
            count += 1
        elif node is not None and node.inputs[0] == x and exponent in (2.0, 3.0):
            count += int(exponent)
        else:
            square = _factors(graph, name)[0]
            if square == [x] * len(square) and len(square) > 1 and _factors(graph, name)[1] == 1.0:
                count += len(square)
            else:
                return False
    return count == power


def fuse_hard(graph: Graph) -> None:
    """Write HardSwish in its spellings, and Clip to 0..6, as ``apq.Activation``."""
    for node in graph.each():
        if not node.outputs or graph.dtype(node.outputs[0]) != "float32":
            continue
        x, name = "", ""
        if node.op == "HardSwish":
            x, name = node.inputs[0], "hardswish"
        elif node.op == "HardSigmoid" and _sixth(node):
            x, name = node.inputs[0], "hardsigmoid"
        elif node.op == "Clip" and _clips(graph, node, 6.0):
            x, name = node.inputs[0], "relu6"
        elif node.op in ("Mul", "Div"):
            x = _hard_swish(graph, node)
            name = "hardswish"
        if x:
            attrs = {"activation": name}
            graph.replace(node, Node("apq.Activation", node.name, (x,), node.outputs, attrs))
    graph.sweep()


def _sixth(node: Node) -> bool:
    """HardSigmoid with torch's slope."""
    slope, shift = node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)
    return _near(slope, 1 / 6) and shift == 0.5


def _clips(graph: Graph, node: Node, top: float) -> bool:
    """A Clip to 0..top."""
    low, high = (*node.inputs, "", "")[1:3]
    return graph.scalar(low) == 0.0 and graph.scalar(high) == top


def _hard_swish(graph: Graph, node: Node) -> str:
    """The x of ``x * clip(x + 3, 0, 6) / 6`` or ``x * hardsigmoid(x)``, or ``""``."""
    values, constant = _factors(graph, node.outputs[0])
    if len(values) != 2:
        return ""
    for x, gate in (values, values[::-1]):
        maker = graph.maker.get(gate)
        if maker is None or not graph.only_use(gate):
            continue
        hard = maker.op == "apq.Activation" and maker.attrs["activation"] == "hardsigmoid"
        if hard and maker.inputs[0] == x and _near(constant, 1.0):
            return x
        six = maker.op == "apq.Activation" and maker.attrs["activation"] == "relu6"
        three = _split(graph, graph.made_by(maker.inputs[0], "Add")) if six else None
        if three is not None and three[0] == x and three[1] == 3.0 and _near(constant, 1 / 6):
            return x
    return ""


def fuse_activations(graph: Graph) -> None:
    """Let a layer apply the activation that alone reads it."""
    for node in graph.each():
        x, name, uses = _activation(graph, node)
        layer = graph.made_by(x, *LAYERS) if name else None
        if layer is None or graph.uses[x] != uses or _is_output(graph, x):
            continue
        if layer.attrs["activation"] or layer.inputs[3]:
            continue
        graph.replace(node, with_attrs(replace(layer, outputs=node.outputs), {"activation": name}))
    graph.sweep()


def fuse_last_activations(graph: Graph) -> None:
    """Let a layer that adds a residual apply the activation that alone reads the sum."""
    for node in graph.each():
        x, name, uses = _activation(graph, node)
        layer = graph.made_by(x, "apq.Linear") if name else None
        if layer is None or graph.uses[x] != uses or _is_output(graph, x):
            continue
        if layer.attrs["activation"] or not layer.inputs[3]:
            continue
        attrs = {"activation": name, "after": True}
        graph.replace(node, with_attrs(replace(layer, outputs=node.outputs), attrs))
    graph.sweep()


def _activation(graph: Graph, node: Node) -> tuple[str, str, int]:
    """What a node is applied to, its name among the activations or ``""``, how often it reads."""
    x = node.inputs[0] if node.inputs else ""
    if node.op == "apq.Gelu":
        return x, "gelu_tanh" if node.attrs["approximate"] == "tanh" else "gelu", 1
    if node.op == "apq.Activation":
        return x, str(node.attrs["activation"]), 1
    if node.op == "Mul":
        x = _silu(graph, node)
        return x, "silu" if x else "", 2
    return x, PLAIN.get(node.op, ""), 1


def _is_output(graph: Graph, value: str) -> bool:
    return any(spec.name == value for spec in graph.outputs)


def _silu(graph: Graph, node: Node) -> str:
    """The x of ``x * sigmoid(x)``, or ``""``."""
    for x, gate in (node.inputs, node.inputs[::-1]):
        sigmoid = graph.made_by(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] == x and graph.only_use(gate):
            return x
    return ""


def fuse_residuals(graph: Graph) -> None:
    """Let a layer add the value of its own shape that is added to it alone."""
    order = {out: i for i, node in enumerate(graph.nodes) for out in node.outputs}
    for node in graph.each():
        if node.op != "Add":
            continue
        # Of two layers the later one adds the earlier one's result.
        pairs = sorted(
            (node.inputs, node.inputs[::-1]), key=lambda p: order.get(p[0], -1), reverse=True
        )
        for y, residual in pairs:
            layer = graph.made_by(y, "apq.Linear")
            if layer is None or not graph.only_use(y) or residual in graph.weights:
                continue
            if layer.inputs[3] or not same_shape(graph.shape(y), graph.shape(residual)):
                continue
            inputs = (*layer.inputs[:3], residual)
            graph.replace(node, replace(layer, inputs=inputs, outputs=node.outputs))
            break
    graph.sweep()

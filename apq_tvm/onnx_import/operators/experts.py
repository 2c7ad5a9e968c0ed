"""Mixtures of experts: ``com.microsoft.MoE`` and ``QMoE`` as linear layers that a run may skip.

Every expert is an ``If`` around its two or three layers, which read the tokens that chose it alone.
Layouts and formulas are those of the operators' schemas in onnxruntime 1.31; what they leave open
is as its CPU kernels answer: what experts count is the softmax of their scores, over all (``MoE``)
or the chosen ones (``QMoE``), and ``gelu`` is the one by tanh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from apq_tvm.onnx_import.control.bodies import Body, captured_by, with_captures
from apq_tvm.onnx_import.graph import FLOATS, Graph
from apq_tvm.onnx_import.integers.codes import Codes
from apq_tvm.onnx_import.integers.packed import (
    check_bits,
    check_size,
    constant,
    scales_of,
    store,
    unpack,
)
from apq_tvm.onnx_import.operators.standard import reduced
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Array, Node

MOST = 1 << 10
"""Experts."""

Activation = Callable[["_Expert", str], str]


@dataclass(frozen=True)
class Projection:
    """One of the layers that every expert has.

    Parameters
    ----------
    weight : callable
        ``(expert, part)`` → name of the weight of those outputs.
    bias : float32 [E, N] or None
    part : str
        Of the outputs, as `_taken` has them.
    """

    weight: Callable[[int, str], str]
    bias: Array | None
    part: str = ""


def mixture(graph: Graph, node: Node) -> list[Node]:
    """``MoE``: experts whose weights are floats.

    Raises
    ------
    ImportFailed
        Weights or biases of other sizes than the operator's.
    UnsupportedModel
        Weights that are no constants, a sparse mixer, or an activation that is not known.
    """
    steps = Steps(graph, node)
    hidden, experts = _sizes(steps)
    inner = constant(graph, node.inputs[4], "weights", steps.title).shape[-1]
    given = partial(_floats, steps, experts)
    first, gates = _first(steps, inner, lambda at, n: given(2 + 4 * at, 3 + 4 * at, n, hidden))
    last = _there(steps, given(4, 5, hidden, inner), "fc2")
    shares = steps("Softmax", node.inputs[1], axis=-1)
    chosen, places = _top(steps, shares, experts)
    chosen = _normalised(steps, chosen)
    return _combined(steps, first, gates, last, _spread(steps, chosen, places, experts))


def quantized_mixture(graph: Graph, node: Node) -> list[Node]:
    """``QMoE``: experts whose weights are codes of 2, 4 or 8 bits, which are kept.

    Raises
    ------
    ImportFailed
        Weights, scales, zero points or biases of other sizes than the operator's.
    UnsupportedModel
        As of `mixture`; weights of floats of 4 or 8 bits, or in a device's own order.
    """
    steps = Steps(graph, node)
    kind = node.attrs.get("quant_type", "int")
    if kind != "int" or any(map(steps.input, range(15, 21))):
        raise steps.refuse(f"its quant_type is {kind!r}; only 'int' can be compiled")
    if node.attrs.get("weights_prepacked", -1) == 1:
        raise steps.refuse("its weights are prepacked for one device; save the model without that")
    hidden, experts = _sizes(steps)
    packed = constant(graph, node.inputs[5], "weights", steps.title)
    inner = packed.shape[-1] * 8 // _bits(steps, 2)
    given = partial(_codes, steps, experts)
    first, gates = _first(steps, inner, lambda at, n: given(1 + 2 * at, n, hidden))
    last = _there(steps, given(2, hidden, inner), "fc2")
    values, places = _top(steps, node.inputs[1], experts)
    if not steps.input(14):
        chosen = steps("Softmax", values, axis=-1)
    else:
        chosen = _normalised(steps, steps("GatherElements", node.inputs[14], places, axis=1))
    return _combined(steps, first, gates, last, _spread(steps, chosen, places, experts))


def _sizes(steps: Steps) -> tuple[int, int]:
    """Features of a token and how many experts there are."""
    node = steps.node
    if node.attrs.get("use_sparse_mixer", 0):
        raise steps.refuse("use_sparse_mixer cannot be compiled")
    for value in node.inputs[:2]:
        if steps.graph.dtype(value) != "float32":
            raise steps.refuse(f"its input {steps.graph.describe(value)} is no tensor of floats")
    hidden = steps.size(steps.shape(node.inputs[0], 2, 3)[-1], "last dimension")
    experts = steps.size(steps.shape(node.inputs[1], 2)[1], "number of experts")
    if experts > MOST:
        raise steps.refuse(f"{experts} experts; up to {MOST} can be compiled")
    return hidden, experts


def _there(steps: Steps, projection: Projection | None, name: str) -> Projection:
    if projection is None:
        raise steps.refuse(f"its {name} is missing")
    return projection


def _first(
    steps: Steps, inner: int, given: Callable[[int, int], Projection | None]
) -> tuple[Projection, Projection | None]:
    """The layer whose results are activated, and the one that they are multiplied by.

    Both may lie in one weight: row by row in turns, or one below the other.
    """
    fused = int(steps.node.attrs.get("swiglu_fusion", 0)) if _kind(steps) == "swiglu" else 0
    if fused not in (0, 1, 2):
        raise steps.refuse(f"its swiglu_fusion is {fused}; 0, 1 and 2 are legal")
    first = _there(steps, given(0, inner * (2 if fused else 1)), "fc1")
    third = None if fused else given(1, inner)
    if _kind(steps) == "swiglu" and not fused and third is None:
        raise steps.refuse("swiglu needs fc3, or swiglu_fusion for an fc1 that holds both")
    if not fused:
        return first, third
    halves = (".even", ".odd") if fused == 1 else (".low", ".high")
    return replace(first, part=halves[0]), replace(first, part=halves[1])


def _kind(steps: Steps) -> str:
    kind = str(steps.node.attrs.get("activation_type", "relu"))
    if kind not in ACTIVATIONS:
        raise steps.refuse(f"its activation is {kind!r}; {', '.join(ACTIVATIONS)} can be compiled")
    return kind


def _floats(steps: Steps, experts: int, at: int, bias: int, n: int, k: int) -> Projection | None:
    """Weights [E, N, K] of floats; None if they are absent."""
    graph, name = steps.graph, steps.input(at)
    if not name:
        return None
    array = constant(graph, name, "weights", steps.title)
    if array.shape != (experts, n, k) or array.dtype.name not in FLOATS:
        wanted = f"[{experts}, {n}, {k}]"
        raise steps.refuse(f"its weights {graph.describe(name)} are not floats {wanted}")

    def weight(expert: int, part: str) -> str:
        own = f"{name}.{expert}{part}"
        if own not in graph.weights:
            graph.weights[own] = np.ascontiguousarray(_taken(array[expert], part), np.float32)
        return own

    return Projection(weight, _bias(steps, bias, experts, n))


def _codes(steps: Steps, experts: int, number: int, n: int, k: int) -> Projection | None:
    """Weights of ``fc{number}``, packed codes with scales and perhaps zero points."""
    graph, title, bits = steps.graph, steps.title, _bits(steps, number)
    at = 3 * number - 1
    name, scales, zeros = steps.input(at), steps.input(at + 1), steps.input(10 + number)
    if not name:
        return None
    size = int(steps.node.attrs.get("block_size", 0)) or k
    if size < 1 or k % size or k * bits % 8:
        raise steps.refuse(f"blocks of {size} do not divide its {k} inputs")
    blocks, why = k // size, f"{experts} experts of {n}x{k} and {bits} bits"
    packed = constant(graph, name, "weights", title)
    check_size(packed, "uint8", experts * n * k * bits // 8, why, name, title)
    packed = packed.reshape(experts, n, -1)
    scale = scales_of(graph, scales, experts * n * blocks, title).reshape(experts, n, blocks)
    zero = np.full(scale.shape, 1 << (bits - 1))
    if zeros:
        zero = constant(graph, zeros, "zero points", title)
        rows, count = (n, blocks) if "block_size" in steps.node.attrs else (1, n)
        check_size(zero, "uint8", experts * rows * -(-count * bits // 8), why, zeros, title)
        zero = unpack(zero.reshape(experts, rows, -1), bits, count).reshape(scale.shape)
    source = f"QMoE of {bits} bits in blocks of {size}"

    def weight(expert: int, part: str) -> str:
        values, own, middle = (_taken(array[expert], part) for array in (packed, scale, zero))
        kept = Codes(unpack(values, bits, k), bits, 0, own, middle, (1, size), source)
        return store(graph, name, f".{expert}{part}", kept)

    return Projection(weight, _bias(steps, at + 2, experts, n))


def _bits(steps: Steps, number: int) -> int:
    attrs = steps.node.attrs
    bits = int(attrs.get(f"fc{number}_expert_weight_bits", attrs.get("expert_weight_bits", 4)))
    check_bits(bits, steps.title)
    return bits


def _bias(steps: Steps, at: int, experts: int, n: int) -> Array | None:
    name = steps.input(at)
    if not name:
        return None
    array = constant(steps.graph, name, "bias", steps.title)
    if array.shape != (experts, n):
        wanted = f"[{experts}, {n}]"
        raise steps.refuse(f"its bias {steps.graph.describe(name)} is not {wanted}")
    return array.astype(np.float32)


def _taken(array: Array, part: str) -> Array:
    """All entries along the first axis, every other one, or half of them."""
    if part in (".even", ".odd"):
        return array[part == ".odd" :: 2]
    half = len(array) // 2
    return array[half:] if part == ".high" else array[:half] if part == ".low" else array


def _top(steps: Steps, scores: str, experts: int) -> tuple[str, str]:
    """Scores of the experts that every token chooses, and which they are, [T, k]."""
    count = int(steps.node.attrs.get("k", 1))
    if not 0 < count <= experts:
        raise steps.refuse(f"its k is {count}, of {experts} experts")
    base, fresh = steps.node.name, steps.graph.fresh
    values, places = fresh(f"{base}.top"), fresh(f"{base}.places")
    inputs = (scores, steps.constant(np.asarray([count], np.int64)))
    steps.add(Node("TopK", fresh(f"{base}.topk"), inputs, (values, places)))
    return values, places


def _normalised(steps: Steps, chosen: str) -> str:
    """What the chosen experts count, as shares of their sum if the operator asks for that."""
    if not steps.node.attrs.get("normalize_routing_weights", 0):
        return chosen
    return steps("Div", chosen, reduced(steps, "ReduceSum", chosen, (1,)))


def _spread(steps: Steps, chosen: str, places: str, experts: int) -> str:
    """What every expert counts for every token, [T, E]."""
    nothing = steps.expand(steps.number(0), steps.shape(chosen)[0], experts)
    return steps("ScatterElements", nothing, places, chosen, axis=1)


class _Expert:
    """The nodes of one expert, as the body of its ``If``."""

    def __init__(self, steps: Steps, number: int) -> None:
        self.graph, self.attrs = steps.graph, steps.node.attrs
        self.name, self.number = f"{steps.node.name}.expert{number}", number
        self.nodes: list[Node] = []
        self.weights: dict[str, Array] = {}

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        made = f"{self.name}.{len(self.nodes)}"
        self.nodes.append(Node(op, f"{made}.{op.lower()}", inputs, (made,), attrs))
        return made

    def number_of(self, key: str, default: float) -> str:
        """An attribute as a constant."""
        name = f"{self.name}.{key}"
        self.weights[name] = np.asarray(self.attrs.get(key, default), np.float32)
        return name

    def chosen(self, share: str) -> str:
        """Tokens that chose it, int64 [n, 1]."""
        return self("Transpose", self("NonZero", share), perm=(1, 0))

    def rows(self, x: str, chosen: str) -> str:
        """Those of them alone, [n, ...]."""
        return self("GatherND", x, chosen)

    def linear(self, x: str, layer: Projection, which: str) -> str:
        """``x`` by one of the layers."""
        weight, bias, made = layer.weight(self.number, layer.part), "", f"{self.name}.{which}"
        self.weights[weight] = self.graph.weights[weight]
        if layer.bias is not None:
            bias = f"{made}.bias"
            self.weights[bias] = np.ascontiguousarray(_taken(layer.bias[self.number], layer.part))
        attrs = {"activation": ""}
        self.nodes.append(Node("apq.Linear", made, (x, weight, bias, ""), (made,), attrs))
        return made

    def body(self, result: str) -> Body:
        """All of it."""
        captured = captured_by((), (result,), self.nodes, self.weights)
        return Body((), (result,), tuple(self.nodes), self.weights, captured)


def _clamped(expert: _Expert, x: str, both: bool) -> str:
    """At most ``swiglu_limit``; at least its negative too, if so."""
    if "swiglu_limit" not in expert.attrs:
        return x
    limit = expert.number_of("swiglu_limit", 0)
    x = expert("Min", x, limit)
    return expert("Max", x, expert("Neg", limit)) if both else x


def _swish(expert: _Expert, x: str) -> str:
    alpha = expert.number_of("activation_alpha", 1)
    return expert("Mul", x, expert("Sigmoid", expert("Mul", x, alpha)))


ACTIVATIONS: dict[str, Activation] = {
    "relu": lambda expert, x: expert("Relu", x),
    "gelu": lambda expert, x: expert("apq.Gelu", x, approximate="tanh"),
    "silu": lambda expert, x: expert("Mul", x, expert("Sigmoid", x)),
    "swiglu": lambda expert, x: _swish(expert, _clamped(expert, x, both=False)),
    "identity": lambda expert, x: x,
}


def _combined(
    steps: Steps,
    first: Projection,
    gates: Projection | None,
    last: Projection,
    shares: str,
) -> list[Node]:
    """The sum of what the experts say, each times what it counts for a token."""
    graph, kind, hidden = steps.graph, _kind(steps), steps.shape(steps.node.inputs[0])[-1]
    tokens, experts = steps.shape(shares)
    x = steps.reshape(steps.node.inputs[0], tokens, hidden)
    counted = reduced(steps, "ReduceMax", steps("Abs", shares), (0,), keep=False)
    asked = steps("Greater", counted, steps.number(0))
    total, shares = steps.expand(steps.number(0), tokens, hidden), steps.transpose(shares, 1, 0)
    for number in range(steps.size(experts, "number of experts")):
        expert, at = _Expert(steps, number), steps.constant(np.asarray(number, np.int64))
        condition = steps("Gather", asked, at, axis=0)
        share = steps("Gather", shares, at, axis=0)
        chosen = expert.chosen(share)
        read = expert.rows(x, chosen)
        y = ACTIVATIONS[kind](expert, expert.linear(read, first, "fc1"))
        if gates is not None:
            gate = expert.linear(read, gates, "fc3")
            if kind == "swiglu":
                gate = _clamped(expert, gate, both=True)
                gate = expert("Add", gate, expert.number_of("activation_beta", 0))
            y = expert("Mul", y, gate)
        y = expert(
            "Mul",
            expert.linear(y, last, "fc2"),
            expert.rows(steps.reshape(share, tokens, 1), chosen),
        )
        y = expert("Add", y, expert.rows(total, chosen))
        then = expert.body(expert("ScatterND", total, chosen, y))
        made = graph.fresh(f"{expert.name}.total")
        attrs = {"then_branch": then, "else_branch": Body((), (total,), (), {}, (total,))}
        node = Node("If", graph.fresh(expert.name), (condition,), (made,), attrs)
        steps.nodes.append(with_captures(node, 1))
        graph.shapes[made], graph.dtypes[made] = (tokens, hidden), "float32"
        total = made
    return steps.done(steps.reshape(total, *steps.shape(steps.node.inputs[0])))

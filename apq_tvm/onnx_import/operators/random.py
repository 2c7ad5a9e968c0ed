"""Operators that draw numbers: a hash of each entry's place, so that every run draws the same.

What ONNX Runtime draws differs from run to run unless ``seed`` is set; ours also differs from node
to node by name. The hash is of int64 without overflow, which every back end computes alike.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np

from apq_tvm.onnx_import.graph import Graph, np_dtype, type_number
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim, product
from apq_tvm.types import Node

WORD, HALF, ROUNDS = 1 << 31, 1 << 15, 4


def _uniform(steps: Steps, dims: tuple[Dim, ...], lane: int = 0) -> str:
    """float32 in (0, 1), of 23 bits; other numbers for another `lane`.

    A round is RC6's ``x (2x + 1)``, which permutes the words of 31 bits, and a rotation.
    """
    seed = steps.node.attrs.get("seed", 0.0)
    salt = crc32(f"{steps.node.name} {seed} {lane}".encode()) % WORD
    x, word, half = steps.range(product(dims)), _whole(steps, WORD), _whole(steps, HALF)
    for _ in range(ROUNDS):
        x = steps("Mod", steps("Add", x, _whole(steps, salt)), word)
        odd = steps("Add", steps("Add", x, x), _whole(steps, 1))
        x = steps("Mod", steps("Mul", x, odd), word)
        low = steps("Mul", steps("Mod", x, half), _whole(steps, WORD // HALF))
        x = steps("Add", low, steps("Div", x, half))
    top = steps("Cast", steps("Div", x, _whole(steps, WORD >> 23)), to=type_number("float32"))
    middle = steps("Add", top, steps.number(0.5))
    return steps.reshape(steps("Mul", middle, steps.number(2.0**-23)), *dims)


def _whole(steps: Steps, value: int) -> str:
    return steps.number(value, "int64")


def _normal(steps: Steps, dims: tuple[Dim, ...]) -> str:
    """Box and Muller's: the length of a vector and the cosine of its angle."""
    log = steps("Log", _uniform(steps, dims))
    length = steps("Sqrt", steps("Mul", log, steps.number(-2.0)))
    angle = steps("Mul", _uniform(steps, dims, 1), steps.number(2 * np.pi))
    return steps("Mul", length, steps("Cos", angle))


def _dims(steps: Steps) -> tuple[Dim, ...]:
    """Of the input, or as the attribute says."""
    if steps.node.inputs:
        return steps.shape(steps.node.inputs[0])
    return tuple(int(size) for size in steps.node.attrs["shape"])


def _made(steps: Steps, x: str, low: float, span: float) -> list[Node]:
    """``x * span + low`` in the type that the node asks for."""
    x = steps("Add", steps("Mul", x, steps.number(span)), steps.number(low))
    return steps.done(_cast(steps, x))


def _cast(steps: Steps, x: str) -> str:
    number = steps.node.attrs.get("dtype")
    given = steps.graph.dtype(steps.node.inputs[0]) if steps.node.inputs else None
    dtype = np_dtype(number) if number else given or "float32"
    return x if steps.graph.dtype(x) == dtype else steps("Cast", x, to=type_number(dtype))


def normal(graph: Graph, node: Node) -> list[Node]:
    """RandomNormal and RandomNormalLike."""
    steps = Steps(graph, node)
    mean, scale = (float(node.attrs.get(key, d)) for key, d in (("mean", 0.0), ("scale", 1.0)))
    return _made(steps, _normal(steps, _dims(steps)), mean, scale)


def uniform(graph: Graph, node: Node) -> list[Node]:
    """RandomUniform and RandomUniformLike."""
    steps = Steps(graph, node)
    low, high = (float(node.attrs.get(key, d)) for key, d in (("low", 0.0), ("high", 1.0)))
    return _made(steps, _uniform(steps, _dims(steps)), low, high - low)


def bernoulli(graph: Graph, node: Node) -> list[Node]:
    """1 with the probability that x says."""
    steps = Steps(graph, node)
    x = steps("Cast", node.inputs[0], to=type_number("float32"))
    return steps.done(_cast(steps, steps("Less", _uniform(steps, _dims(steps)), x)))


def multinomial(graph: Graph, node: Node) -> list[Node]:
    """Classes by their log-probabilities: the largest of those plus Gumbel's noise."""
    steps, count = Steps(graph, node), int(node.attrs.get("sample_size", 1))
    batch, classes = steps.shape(node.inputs[0], 2)
    log = steps("Neg", steps("Log", _uniform(steps, (batch, count, classes))))
    x = steps.reshape(steps("Cast", node.inputs[0], to=type_number("float32")), batch, 1, classes)
    drawn = steps("ArgMax", steps("Sub", x, steps("Log", log)), axis=2, keepdims=0)
    dtype = np_dtype(node.attrs.get("dtype", type_number("int32")))
    return steps.done(drawn if dtype == "int64" else steps("Cast", drawn, to=type_number(dtype)))


RANDOM: dict[str, Callable[[Graph, Node], list[Node]]] = {
    "Bernoulli": bernoulli,
    "Multinomial": multinomial,
    "RandomNormal": normal,
    "RandomNormalLike": normal,
    "RandomUniform": uniform,
    "RandomUniformLike": uniform,
}

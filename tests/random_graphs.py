"""Small random graphs over the operators there are, to be compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx_models import NodeSpec

Shape = tuple[int | str, ...]

SIZES = ({"b": 1}, {"b": 5})
"""What the symbolic dimension is at a run."""


@dataclass
class Named:
    """What a random graph draws from, and names in it.

    Parameters
    ----------
    prefix : str
        Starts every name.
    rng : numpy.random.Generator
    """

    prefix: str
    rng: np.random.Generator
    count: int = 0

    def name(self) -> str:
        """A name nothing has."""
        self.count += 1
        return f"{self.prefix}{self.count}"


@dataclass
class RandomGraph(Named):
    """Nodes are added by `grow`; values are float32, or int64 from 0 to 4."""

    nodes: list[NodeSpec] = field(default_factory=list)
    inputs: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    floats: dict[str, Shape] = field(default_factory=dict)
    integers: dict[str, Shape] = field(default_factory=dict)

    def start(self) -> None:
        """One float and one integer input."""
        for kind, pool in (("float32", self.floats), ("int64", self.integers)):
            rank = int(self.rng.integers(1, 5))
            shape: Shape = tuple(int(d) for d in self.rng.integers(1, 7, rank))
            if self.rng.random() < 0.7:
                shape = ("b", *shape[1:])
            name = self.name()
            self.inputs[name] = (kind, shape)
            pool[name] = shape

    def weight(self, array: Any) -> str:
        """A constant."""
        name = self.name()
        self.weights[name] = np.asarray(array)
        return name

    def pick(self, pool: Mapping[str, Shape], *ranks: int) -> tuple[str, Shape] | None:
        """A value, of one of these ranks if any are given."""
        fitting = [(n, s) for n, s in pool.items() if not ranks or len(s) in ranks]
        return fitting[int(self.rng.integers(len(fitting)))] if fitting else None

    def add(self, op: str, read: str, shape: Shape, pool: str = "floats", **attrs: Any) -> None:
        """A node with one output."""
        out = self.name()
        self.nodes.append((op, read, out, attrs))
        getattr(self, pool)[out] = shape

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def axis(self, shape: Shape, *, fixed: bool = False) -> int | None:
        """An axis, counted from either end; `fixed` ones have a number as extent."""
        axes = [i for i, d in enumerate(shape) if not fixed or isinstance(d, int)]
        if not axes:
            return None
        axis = axes[self.number(0, len(axes) - 1)]
        return axis - len(shape) if self.rng.random() < 0.3 else axis

    def along(self, pool: Mapping[str, Shape], *ranks: int) -> tuple[str, Shape, int, int] | None:
        """A value, as by `pick`, and one of its axes that has a number as extent, with that."""
        found = self.pick(pool, *ranks)
        axis = None if found is None else self.axis(found[1], fixed=True)
        return None if found is None or axis is None else (*found, axis, int(found[1][axis]))


def grow(graph: RandomGraph, steps: int) -> None:
    """Add up to `steps` nodes; those whose operator finds no operand are left out."""
    graph.start()
    for _ in range(steps):
        RULES[graph.number(0, len(RULES) - 1)](graph)


UNARY = (
    "Abs Neg Relu Sigmoid Tanh Erf Softplus Elu LeakyRelu HardSigmoid Selu Softsign Sin Cos Atan "
    "Mish HardSwish Identity ThresholdedRelu Celu"
).split()
BINARY = "Add Sub Mul Max Min".split()
REDUCTIONS = "ReduceSum ReduceMean ReduceMax ReduceMin ReduceL2 ReduceLogSumExp ReduceSumSquare"


def _unary(graph: RandomGraph) -> None:
    if (found := graph.pick(graph.floats)) is not None:
        graph.add(UNARY[graph.number(0, len(UNARY) - 1)], *found)


def _binary(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats)
    if found is None:
        return
    x, shape = found
    kind = graph.number(0, 2)
    op = BINARY[graph.number(0, len(BINARY) - 1)]
    if kind == 0:  # with itself, transformed elsewhere or not
        same = [n for n, s in graph.floats.items() if s == shape]
        other = same[graph.number(0, len(same) - 1)]
    else:
        tail = [d if isinstance(d, int) and graph.rng.random() < 0.6 else 1 for d in shape]
        other = graph.weight(
            graph.rng.standard_normal(tail[graph.number(0, len(tail)) :], np.float32)
        )
    read = f"{x} {other}" if graph.rng.random() < 0.5 else f"{other} {x}"
    graph.add(op, read, shape)


def _integer(graph: RandomGraph) -> None:
    found = graph.pick(graph.integers)
    if found is None:
        return
    x, shape = found
    divisor = graph.weight(np.int64(graph.number(2, 5)))
    if graph.rng.random() < 0.5:
        moved = graph.name()
        shift = graph.weight(np.int64(graph.number(-7, 7)))
        graph.nodes.append(("Add", f"{x} {shift}", moved))
        graph.add("Mod", f"{moved} {divisor}", shape, "integers")
    else:
        graph.add("Div", f"{x} {divisor}", shape, "integers")


def _reduce(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats)
    if found is None or not found[1]:
        return
    x, shape = found
    axis = graph.axis(shape)
    assert axis is not None
    keep = graph.number(0, 1)
    out = tuple(
        d if i != axis % len(shape) else 1
        for i, d in enumerate(shape)
        if keep or i != axis % len(shape)
    )
    op = REDUCTIONS.split()[graph.number(0, 6)]
    axes = graph.weight(np.asarray([axis], np.int64))
    graph.add(op, f"{x} {axes}", out, keepdims=keep)


def _transpose(graph: RandomGraph) -> None:
    if (found := graph.pick(graph.floats, 2, 3, 4)) is not None:
        x, shape = found
        perm = [int(i) for i in graph.rng.permutation(len(shape))]
        graph.add("Transpose", x, tuple(shape[i] for i in perm), perm=perm)


def _reshape(graph: RandomGraph) -> None:
    """Two neighbouring numbers become one, or one axis of 1 comes."""
    if (found := graph.pick(graph.floats)) is None:
        return
    x, shape = found
    pairs = [
        i
        for i in range(len(shape) - 1)
        if isinstance(shape[i], int) and isinstance(shape[i + 1], int)
    ]
    if pairs and graph.rng.random() < 0.6:
        at = pairs[graph.number(0, len(pairs) - 1)]
        merged: Shape = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])  # type: ignore[operator]
        target = [0 if i < at else -1 if isinstance(d, str) else d for i, d in enumerate(merged)]
        graph.add("Reshape", f"{x} {graph.weight(np.asarray(target, np.int64))}", merged)
    elif len(shape) < 5:
        at = graph.number(0, len(shape))
        axes = graph.weight(np.asarray([at], np.int64))
        graph.add("Unsqueeze", f"{x} {axes}", (*shape[:at], 1, *shape[at:]))


def _slice(graph: RandomGraph) -> None:
    if (found := graph.along(graph.floats)) is None:
        return
    x, shape, axis, extent = found
    start, stop, step = (
        graph.number(-extent, extent - 1),
        graph.number(-extent, extent + 3),
        graph.number(1, 2),
    )
    if graph.rng.random() < 0.3:
        start, stop, step = stop, start, -step
    kept = len(range(extent)[slice(start, stop, step)])
    if not kept:
        return
    parts = [graph.weight(np.asarray([v], np.int64)) for v in (start, stop, axis, step)]
    out = list(shape)
    out[axis] = kept
    graph.add("Slice", " ".join([x, *parts]), tuple(out))


def _pad(graph: RandomGraph) -> None:
    if (found := graph.along(graph.floats)) is None:
        return
    x, shape, axis, extent = found
    modes = ["constant", "edge"] + (["reflect"] if extent > 2 else [])
    mode = modes[graph.number(0, len(modes) - 1)]
    pads = np.zeros((2, len(shape)), np.int64)
    pads[:, axis] = graph.rng.integers(0, 3, 2)
    out = list(shape)
    out[axis] = extent + int(pads.sum())
    graph.add("Pad", f"{x} {graph.weight(pads.reshape(-1))}", tuple(out), mode=mode)


def _concat(graph: RandomGraph) -> None:
    if (found := graph.along(graph.floats)) is not None:
        x, shape, axis, extent = found
        out = list(shape)
        out[axis] = 2 * extent
        graph.add("Concat", f"{x} {x}", tuple(out), axis=axis)


def _gather(graph: RandomGraph) -> None:
    """By a constant, or by integers of the graph along an axis that is long enough."""
    if (found := graph.along(graph.floats)) is None:
        return
    x, shape, axis, extent = found
    at = axis % len(shape)
    other = graph.pick(graph.integers, 0, 1, 2)
    if extent >= 5 and other is not None and len(shape) + len(other[1]) < 6:
        ids, rows = other
        if shape.count("b") + rows.count("b") > 1:
            return
    else:
        rows = tuple(int(d) for d in graph.rng.integers(1, 4, graph.number(0, 2)))
        ids = graph.weight(graph.rng.integers(-extent, extent, rows))
    graph.add("Gather", f"{x} {ids}", (*shape[:at], *rows, *shape[at + 1 :]), axis=axis)


def _scatter(graph: RandomGraph) -> None:
    found = graph.along(graph.floats, 1, 2, 3)
    if found is None or "b" in found[1]:
        return
    x, shape, axis, extent = found
    rows = tuple(graph.number(1, int(d)) for d in shape)
    ids = graph.weight(graph.rng.integers(-extent, extent, rows))
    updates = graph.weight(graph.rng.standard_normal(rows, np.float32))
    graph.add("ScatterElements", f"{x} {ids} {updates}", shape, axis=axis, reduction="add")


def _top_k(graph: RandomGraph) -> None:
    # Of inputs alone: equal numbers that differ by rounding would change places.
    found = graph.along({n: shape for n, (kind, shape) in graph.inputs.items() if kind[0] == "f"})
    if found is None:
        return
    x, shape, axis, extent = found
    k = graph.number(1, extent)
    out = list(shape)
    out[axis] = k
    values, ids = graph.name(), graph.name()
    attrs = {"axis": axis, "largest": graph.number(0, 1)}
    graph.nodes.append(("TopK", f"{x} {graph.weight(np.asarray([k]))}", f"{values} {ids}", attrs))
    graph.floats[values] = tuple(out)


def _softmax(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats)
    if found is not None and found[1]:
        op = ("Softmax", "LogSoftmax")[graph.number(0, 1)]
        graph.add(op, *found, axis=graph.axis(found[1]))


def _cumsum(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats)
    if found is not None and found[1]:
        axis = graph.weight(np.int64(graph.axis(found[1])))
        flags = {"exclusive": graph.number(0, 1), "reverse": graph.number(0, 1)}
        graph.add("CumSum", f"{found[0]} {axis}", found[1], **flags)


def _matmul(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats, 2, 3, 4)
    if found is None or not isinstance(found[1][-1], int):
        return
    x, shape = found
    columns = graph.number(1, 9)
    w = graph.weight(graph.rng.standard_normal((shape[-1], columns), np.float32))
    graph.add("MatMul", f"{x} {w}", (*shape[:-1], columns))


def _norm(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats, 2, 3, 4)
    if found is None or not isinstance(found[1][-1], int) or found[1][-1] < 2:
        return
    x, shape = found
    scale, bias = (graph.weight(graph.rng.standard_normal(shape[-1], np.float32)) for _ in "ab")
    graph.add("LayerNormalization", f"{x} {scale} {bias}", shape, epsilon=0.1)


def _select(graph: RandomGraph) -> None:
    found = graph.pick(graph.floats)
    if found is None:
        return
    x, shape = found
    test, zero = graph.name(), graph.weight(np.float32(0.1))
    graph.nodes.append((("Greater", "LessOrEqual")[graph.number(0, 1)], f"{x} {zero}", test))
    graph.add("Where", f"{test} {x} {zero}", shape)


def _convert(graph: RandomGraph) -> None:
    if (found := graph.pick(graph.integers)) is not None:
        graph.add("Cast", *found, to=1)


def _one_hot(graph: RandomGraph) -> None:
    found = graph.pick(graph.integers, 0, 1, 2, 3)
    if found is not None:
        depth, values = graph.weight(np.int64(4)), graph.weight(np.asarray([0.5, 2], np.float32))
        graph.add("OneHot", f"{found[0]} {depth} {values}", (*found[1], 4))


RULES: list[Callable[[RandomGraph], None]] = [
    *(_unary, _unary, _binary, _binary, _integer, _reduce, _transpose, _reshape, _slice, _pad),
    *(_concat, _gather, _scatter, _top_k, _softmax, _cumsum, _matmul, _norm, _select, _convert),
    _one_hot,
]

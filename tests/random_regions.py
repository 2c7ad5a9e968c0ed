"""Random branches and loops, inside of each other and beside operators that are fused, to be
compared with ONNX Runtime. Opset 17: all values are float32 [b, 4]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from random_graphs import Named

WIDTH = 4
ALONE = "Relu Neg Abs Tanh Sigmoid Identity".split()
PAIRED = "Add Sub Mul Max".split()
ROUNDS = (1, 2, 3, 90)
"""Of loops: few are written out, many are not."""

node, info = helper.make_node, helper.make_tensor_value_info


@dataclass
class RandomRegions(Named):
    """Nodes that read ``x``, ``z`` and the numbers of rounds ``any`` and ``some`` (one or more)."""

    weights: list[Any] = field(default_factory=list)

    def constant(self, value: Any) -> str:
        """A weight of the outermost graph."""
        name = self.name()
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def pick(self, values: list[str]) -> str:
        """Of all, or of the last, so that chains grow."""
        late = values[-3:] if self.rng.random() < 0.4 else values
        return str(self.rng.choice(late))

    def grow(self, values: list[str], steps: int, depth: int) -> list[Any]:
        """So many operators, which add what they make to `values`; regions up to `depth`."""
        made: list[Any] = []
        for _ in range(steps):
            kinds = [self.alone, self.paired, self.product, self.beside]
            kinds += [self.branch, self.loop] if depth else []
            nodes, results = kinds[int(self.rng.integers(len(kinds)))](values, depth)
            made += nodes
            values += results
        return made

    def alone(self, values: list[str], _: int) -> tuple[list[Any], list[str]]:
        """An elementwise operator, or one along rows."""
        out = self.name()
        if self.rng.random() < 0.2:
            return [node("Softmax", [self.pick(values)], [out], axis=-1)], [out]
        return [node(str(self.rng.choice(ALONE)), [self.pick(values)], [out])], [out]

    def paired(self, values: list[str], _: int) -> tuple[list[Any], list[str]]:
        """An elementwise operator of two, one of them a mean at times."""
        mean, out = self.name(), self.name()
        op, first = str(self.rng.choice(PAIRED)), self.pick(values)
        if self.rng.random() < 0.7:
            return [node(op, [first, self.pick(values)], [out])], [out]
        axis = int(self.rng.integers(2))
        means = node("ReduceMean", [self.pick(values)], [mean], axes=[axis], keepdims=1)
        return [means, node(op, [first, mean], [out])], [out]

    def product(self, values: list[str], _: int) -> tuple[list[Any], list[str]]:
        """A linear layer."""
        out = self.name()
        weight = self.constant((self.rng.standard_normal((WIDTH, WIDTH)) / 2).astype("f"))
        return [node("MatMul", [self.pick(values), weight], [out])], [out]

    def beside(self, values: list[str], _: int) -> tuple[list[Any], list[str]]:
        """Part of two tensors joined."""
        both, out = self.name(), self.name()
        start = int(self.rng.integers(WIDTH + 1))
        ends = [self.constant(np.array([v])) for v in (start, start + WIDTH, 1)]
        joined = node("Concat", [self.pick(values), self.pick(values)], [both], axis=1)
        return [joined, node("Slice", [both, *ends], [out])], [out]

    def branch(self, values: list[str], depth: int) -> tuple[list[Any], list[str]]:
        """An If whose condition depends on data."""
        total, condition = self.name(), self.name()
        outs = [self.name() for _ in range(int(self.rng.integers(1, 3)))]
        bodies = []
        for _ in range(2):
            inner = list(values)
            nodes = self.grow(inner, int(self.rng.integers(4)), depth - 1)
            given, results = self.copies("Identity", inner, len(outs))
            typed = [info(name, TensorProto.FLOAT, None) for name in results]
            bodies.append(helper.make_graph([*nodes, *given], "branch", [], typed))
        limit = self.constant(np.float32(self.rng.normal()))
        return [
            node("ReduceSum", [self.pick(values)], [total], keepdims=0),
            node("Greater", [total, limit], [condition]),
            node("If", [condition], outs, then_branch=bodies[0], else_branch=bodies[1]),
        ], outs

    def loop(self, values: list[str], depth: int) -> tuple[list[Any], list[str]]:
        """A Loop of a known number of rounds, of one that a run gives, or until something holds."""
        kept, collected = int(self.rng.integers(1, 3)), bool(self.rng.integers(2))
        number, go, again = self.name(), self.name(), self.name()
        states = [self.name() for _ in range(kept)]
        inner = [*values, *states]
        nodes = self.grow(inner, int(self.rng.integers(1, 5)), depth - 1)
        given, results = self.copies("Tanh", inner, kept + collected)
        trip = self.constant(np.int64(self.rng.choice(ROUNDS)))
        goes_on = [node("Identity", [go], [again])]
        kind = self.rng.integers(3)
        if kind == 1:
            trip = "some" if collected else "any"
        elif kind == 2:
            total, limit = self.name(), self.constant(np.float32(abs(self.rng.normal()) * 3))
            goes_on = [
                node("ReduceSum", [inner[-1]], [total], keepdims=0),
                node("Less", [total, limit], [again]),
            ]
        body = helper.make_graph(
            [*nodes, *given, *goes_on],
            "round",
            [
                info(number, TensorProto.INT64, []),
                info(go, TensorProto.BOOL, []),
                *(info(name, TensorProto.FLOAT, None) for name in states),
            ],
            [
                info(again, TensorProto.BOOL, []),
                *(info(name, TensorProto.FLOAT, None) for name in results),
            ],
        )
        outs = [self.name() for _ in results]
        before = [trip, self.constant(np.array(True)), *(self.pick(values) for _ in states)]
        made = [node("Loop", before, outs, body=body)]
        if collected:
            summed, axis = self.name(), self.constant(np.array([0]))
            made.append(node("ReduceSum", [outs.pop(), axis], [summed], keepdims=0))
            outs.append(summed)
        return made, outs

    def copies(self, op: str, values: list[str], count: int) -> tuple[list[Any], list[str]]:
        """Results of a region, of the last that it made or that stand before it."""
        outs = [self.name() for _ in range(count)]
        return [node(op, [str(self.rng.choice(values[-4:]))], [out]) for out in outs], outs


def model(seed: int, graphs: int, steps: int) -> Any:
    """Some random graphs in one model, with the last two values of each as outputs."""
    rng = np.random.default_rng(seed)
    nodes: list[Any] = []
    weights: list[Any] = []
    outputs: list[str] = []
    for number in range(graphs):
        graph = RandomRegions(f"g{number}.", rng)
        values = ["x", "z"]
        nodes += graph.grow(values, steps, 2)
        last, names = graph.copies("Identity", values, 2)
        nodes += last
        outputs += names
        weights += graph.weights
    inputs = [info(name, TensorProto.FLOAT, ["b", WIDTH]) for name in ("x", "z")]
    inputs += [info(name, TensorProto.INT64, []) for name in ("any", "some")]
    results = [info(name, TensorProto.FLOAT, None) for name in outputs]
    made = helper.make_model(
        helper.make_graph(nodes, "regions", inputs, results, weights),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    made.ir_version = 8
    return made

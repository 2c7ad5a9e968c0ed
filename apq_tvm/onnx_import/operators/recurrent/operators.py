"""The steps of LSTM, GRU and RNN (ONNX operator specification, opsets 7 to 22)."""

from __future__ import annotations

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.recurrent.functions import clipping
from apq_tvm.onnx_import.operators.recurrent.layer import Direction, Layer, R, W
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.types import Node

INITIAL_H, INITIAL_C, PEEPHOLES = 5, 6, 7


def _input_products(layer: Layer, direction: Direction, bias: str) -> str:
    """``x · Wᵀ + bias`` of all steps: one linear layer."""
    matrix = layer.matrix(W, direction)
    return layer.linear(f"{direction.name}.input", layer.x, matrix, bias)


def _sum(layer: Layer, direction: Direction) -> str:
    """Both biases in one, where nothing comes between them."""
    first, second = layer.bias(direction)
    return layer.steps("Add", first, second) if first else ""


def rnn(graph: Graph, node: Node) -> list[Node]:
    """``Ht = f(Xt · Wᵀ + Ht-1 · Rᵀ + Wb + Rb)``."""
    steps = Steps(graph, node)
    layer, apply = Layer(steps, 1, ("Tanh",)), clipping(steps)

    def products(direction: Direction) -> tuple[str, list[str]]:
        x = _input_products(layer, direction, _sum(layer, direction))
        return x, [layer.matrix(R, direction)]

    def step(direction: Direction, x: str, state: list[str], captured: list[str]) -> list[str]:
        y = layer.linear(f"{direction.name}.recurrent", state[0], captured[0])
        return [apply(direction.functions[0], steps("Add", y, x))]

    return layer.run(products, step, [INITIAL_H])


def gru(graph: Graph, node: Node) -> list[Node]:
    """Gates z, r, h; ``linear_before_reset`` says what the reset gate multiplies."""
    steps = Steps(graph, node)
    layer, apply = Layer(steps, 3, ("Sigmoid", "Tanh")), clipping(steps)
    late = bool(node.attrs.get("linear_before_reset", 0))

    def products(direction: Direction) -> tuple[str, list[str]]:
        first, second = layer.bias(direction)
        r = layer.matrix(R, direction)
        bias, inner = "", ""
        if first and late:
            # The bias of the recurrent product is reset with it.
            gates = steps("Add", layer.rows(first, 0, 2), layer.rows(second, 0, 2))
            bias = steps("Concat", gates, layer.rows(first, 2), axis=0)
            zero = steps.expand(steps.number(0.0, layer.dtype), 2 * layer.hidden)
            inner = steps("Concat", zero, layer.rows(second, 2), axis=0)
        elif first:
            bias = steps("Add", first, second)
        captured = [r, inner] if inner else [r]
        if not late:
            captured = [layer.gates_of(r, 0, 2), layer.gates_of(r, 2, 1)]
        return _input_products(layer, direction, bias), captured

    def step(direction: Direction, x: str, state: list[str], captured: list[str]) -> list[str]:
        h, (f, g), name = state[0], direction.functions, f"{direction.name}.recurrent"
        if late:
            y = layer.linear(name, h, *captured)
            z, r = (apply(f, steps("Add", layer.gate(y, i), layer.gate(x, i))) for i in (0, 1))
            reset = steps("Mul", r, layer.gate(y, 2))
        else:
            pair = layer.gates_of(x, 0, 2)
            both = apply(f, steps("Add", layer.linear(name, h, captured[0]), pair))
            z, r = layer.gate(both, 0), layer.gate(both, 1)
            reset = layer.linear(f"{name}.hidden", steps("Mul", r, h), captured[1])
        new = apply(g, steps("Add", reset, layer.gate(x, 2)))
        # (1 - z) * new + z * h
        return [steps("Add", new, steps("Mul", z, steps("Sub", h, new)))]

    return layer.run(products, step, [INITIAL_H])


def lstm(graph: Graph, node: Node) -> list[Node]:
    """Gates i, o, f, c; peepholes i, o, f."""
    return lstm_steps(Layer(Steps(graph, node), 4, ("Sigmoid", "Tanh", "Tanh")))


def lstm_steps(layer: Layer) -> list[Node]:
    """The nodes of an LSTM whose weights `layer` knows."""
    steps = layer.steps
    apply, coupled = clipping(steps), bool(steps.node.attrs.get("input_forget", 0))

    def products(direction: Direction) -> tuple[str, list[str]]:
        x, bias = layer.product(W, direction, layer.x, layer.matrix(W, direction)), ""
        if total := _sum(layer, direction):
            # Before the loop, which saves an addition in it; an exact layer adds it last.
            x, bias = (x, total) if layer.exact else (steps("Add", x, total), "")
        captured = [layer.matrix(R, direction), layer.of(PEEPHOLES, direction), bias]
        return x, [value for value in captured if value]

    def step(direction: Direction, x: str, state: list[str], captured: list[str]) -> list[str]:
        h, c = state
        f, g, out = direction.functions
        matrix, *rest = captured
        holes = rest.pop(0) if steps.input(PEEPHOLES) else ""
        sums = steps("Add", layer.product(R, direction, h, matrix), x)
        if rest:
            sums = steps("Add", sums, rest[0])

        def gate(index: int, hole: int, cell: str) -> str:
            total = layer.gate(sums, index)
            if holes:
                weight = layer.rows(holes, hole)
                total = steps("Add", total, layer.times(weight, cell))
            return apply(f, total)

        i = gate(0, 0, c)
        new = apply(g, layer.gate(sums, 3))
        if coupled:  # f = 1 - i
            cell = steps("Add", c, layer.times(i, steps("Sub", new, c)))
        else:
            cell = steps("Add", layer.times(gate(2, 2, c), c), layer.times(i, new))
        # Not what ``clip`` leaves of it, though ONNX says "the input of activations": so does
        # ONNX Runtime, by which models are judged.
        return [steps("Mul", gate(1, 1, cell), out.apply(steps, cell)), cell]

    return layer.run(products, step, [INITIAL_H, INITIAL_C])

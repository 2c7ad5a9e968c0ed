"""What LSTM, GRU and RNN share: directions, lengths of rows, the loop, the layout of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from apq_tvm.onnx_import.control.regions import Looped, end_loop, start_loop
from apq_tvm.onnx_import.operators.recurrent.functions import Function, read_functions
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.types import Node

X, W, R, BIAS, LENGTHS = range(5)
DIRECTIONS = {"forward": "0", "reverse": "1", "bidirectional": "01"}


@dataclass(frozen=True)
class Direction:
    """One direction of a layer.

    Parameters
    ----------
    index : int
        Among those of the layer.
    name : str
        Starts the names of its nodes.
    functions : list of Function
    backward : str
        "1" where the last entry is read first.
    """

    index: int
    name: str
    functions: list[Function]
    backward: str


Products = Callable[[Direction], tuple[str, list[str]]]
"""``direction -> (x [T, B, G * H], captured)``: the input products of all steps, and what else the
step reads."""

Step = Callable[[Direction, str, list[str], list[str]], list[str]]
"""``(direction, x [B, G * H], state, captured) -> state``: one step; the first of the state is what
the layer gives."""


class Layer:
    """A recurrent operator as steps.

    Parameters
    ----------
    steps : Steps
    gates : int
        Rows of W and R per hidden unit.
    functions : tuple of str
        Default activations of a direction.

    Attributes
    ----------
    exact : bool
        Whether sums and products are rounded where ONNX Runtime rounds them.

    Raises
    ------
    UnsupportedModel
        Shapes that are not known or do not fit, an attribute that is not known.
    """

    exact = False

    def __init__(self, steps: Steps, gates: int, functions: tuple[str, ...]) -> None:
        self.steps = steps
        attrs = steps.node.attrs
        text = str(attrs.get("direction", "forward"))
        if text not in DIRECTIONS:
            raise steps.refuse(f"its direction {text!r} is unknown")
        flags = DIRECTIONS[text]
        self.batch_first = bool(attrs.get("layout", 0))
        shape = steps.shape(steps.input(X), 3)
        # Sequences of rows inside, whatever the layout outside.
        self.x = steps.transpose(steps.input(X), 1, 0, 2) if self.batch_first else steps.input(X)
        self.batch, self.length = shape[:2] if self.batch_first else shape[1::-1]
        directions, *sides = steps.shape(steps.input(R), 3)
        self.hidden = steps.size(min(steps.size(d, "hidden size") for d in sides), "hidden size")
        if directions != len(flags) or sorted(map(str, sides)) != sorted(
            map(str, (self.hidden, gates * self.hidden))
        ):
            raise steps.refuse(
                f"its recurrent weights {steps.graph.describe(steps.input(R))} are not those of "
                f"{len(flags)} directions of {gates} gates"
            )
        told = int(attrs.get("hidden_size", self.hidden))
        if told != self.hidden:
            raise steps.refuse(f"its hidden_size is {told}, its weights are of {self.hidden}")
        self.gates = gates
        self.dtype = str(steps.graph.dtype(self.x))
        chosen = read_functions(steps, len(flags), functions)
        names = ("forward", "reverse") if len(flags) > 1 else (text,)
        self.directions = [
            Direction(i, f"{steps.node.name}.{name}", chosen[i], flag)
            for i, (name, flag) in enumerate(zip(names, flags, strict=True))
        ]

    def of(self, index: int, direction: Direction) -> str:
        """The part of an input [D, ..] that is a direction's; ``""`` if the input is absent."""
        value = self.steps.input(index)
        if not value:
            return ""
        at = self.steps.constant(np.asarray(direction.index, np.int64))
        return self.steps("Gather", value, at, axis=0)

    def matrix(self, index: int, direction: Direction) -> str:
        """A direction's weights turned over: [K, G * H]."""
        return self.steps("Transpose", self.of(index, direction), perm=(1, 0))

    def rows(self, value: str, first: int, count: int = 1) -> str:
        """Gates `first` to ``first + count`` of the rows of a value."""
        return self.steps.slice(value, 0, first * self.hidden, (first + count) * self.hidden)

    def gate(self, value: str, index: int) -> str:
        """One gate of a value [B, G * H]."""
        return self.gates_of(value, index, 1)

    def gates_of(self, value: str, first: int, count: int) -> str:
        """Some gates of a value [B, G * H]."""
        return self.steps.slice(value, 1, first * self.hidden, (first + count) * self.hidden)

    def linear(self, name: str, x: str, matrix: str, bias: str = "") -> str:
        """``x · matrix + bias``; with a constant matrix a layer called `name`."""
        steps = self.steps
        y = steps.graph.fresh(f"{name}.product")
        steps.add(Node("MatMul", steps.graph.fresh(name), (x, matrix), (y,)))
        return steps("Add", y, bias) if bias else y

    def product(self, index: int, direction: Direction, x: str, matrix: str) -> str:
        """``x · matrix``, which is that of input `index`."""
        part = {W: "input", R: "recurrent"}[index]
        return self.linear(f"{direction.name}.{part}", x, matrix)

    def times(self, a: str, b: str) -> str:
        """A product that something is added to."""
        return self.steps("apq.Product" if self.exact else "Mul", a, b)

    def bias(self, direction: Direction) -> tuple[str, str]:
        """Biases of the input and of the recurrent product [G * H], or ``""`` twice."""
        both = self.of(BIAS, direction)
        if not both:
            return "", ""
        return self.rows(both, 0, self.gates), self.rows(both, self.gates, self.gates)

    def initial(self, index: int, direction: Direction) -> str:
        """An initial state [B, H] of a direction; 0 if the input is absent."""
        steps, value = self.steps, self.steps.input(index)
        if not value:
            return steps.expand(steps.number(0.0, self.dtype), self.batch, self.hidden)
        at = steps.constant(np.asarray(direction.index, np.int64))
        return steps("Gather", value, at, axis=1 if self.batch_first else 0)

    def run(self, products: Products, step: Step, states: Sequence[int]) -> list[Node]:
        """The nodes of the whole layer.

        Parameters
        ----------
        products, step : callable
        states : sequence of int
            Inputs that hold the initial states, in the order of the state.
        """
        steps = self.steps
        inside, read = (self._inside() if steps.input(LENGTHS) else ""), self._read()
        outputs, finals = [], []
        for direction in self.directions:
            y, final = self._loop(direction, products, step, states, inside)
            outputs.append(y)
            finals.append([self._of_rows(*pair, read) for pair in zip(final, states, strict=True)])
        results = [self._outputs(outputs) if steps.wants(0) else ""]
        for i in range(len(states)):
            results.append(self._final([f[i] for f in finals]) if steps.wants(1 + i) else "")
        return steps.done(*results)

    def _inside(self) -> str:
        """Whether a step is one of a row's: bool [T, B, 1]."""
        steps = self.steps
        at = steps.reshape(steps.range(self.length), self.length, 1, 1)
        lengths = steps("Cast", steps.input(LENGTHS), to=7)
        return steps("Less", at, steps.reshape(lengths, 1, self.batch, 1))

    def _read(self) -> str:
        """Whether a row has a step at all: bool [B, 1] or [1, 1]; ``""`` if all have."""
        steps = self.steps
        if steps.input(LENGTHS):
            lengths = steps.reshape(steps.input(LENGTHS), self.batch, 1)
        elif self.length and isinstance(self.length, int):
            return ""
        else:
            lengths = steps.reshape(steps.dim(self.length), 1, 1)
        return steps("Greater", steps("Cast", lengths, to=7), steps.number(0, "int64"))

    def _of_rows(self, final: str, initial: int, read: str) -> str:
        """A last state; 0 for rows without a step, as ONNX Runtime has it (ONNX does not say)."""
        steps = self.steps
        if not read or not steps.input(initial):  # which is 0 then
            return final
        return steps("Where", read, final, steps.number(0.0, self.dtype))

    def _loop(
        self,
        direction: Direction,
        products: Products,
        step: Step,
        states: Sequence[int],
        inside: str,
    ) -> tuple[str, list[str]]:
        """One direction: what it gives [T, B, H], and its last state."""
        steps = self.steps
        x, captured = products(direction)
        state = [self.initial(index, direction) for index in states]
        if self.length == 1 and not inside:
            one = (self.batch, self.gates * self.hidden)
            made = step(direction, steps.reshape(x, *one), state, captured)
            return steps.reshape(made[0], 1, self.batch, self.hidden), made
        scanned = [x, inside] if inside else [x]
        backward = direction.backward * len(scanned)
        looped = Looped(state, captured, scanned, backward, self.length)
        loop = start_loop(steps, direction.name, looped)
        made = step(direction, loop.entries[0], loop.carried, loop.captured)
        y = made[0]
        if inside:
            flag, zero = loop.entries[1], steps.number(0.0, self.dtype)
            # Behind its end a row keeps its state and gives 0.
            y = steps("Where", flag, made[0], zero)
            pairs = zip(made, loop.carried, strict=True)
            made = [steps("Where", flag, new, old) for new, old in pairs]
        wanted = [y] if steps.wants(0) else []
        backward = direction.backward * len(wanted)
        finals, collected = end_loop(steps, loop, made, wanted, backward)
        return (collected[0] if collected else ""), finals

    def _outputs(self, values: Sequence[str]) -> str:
        """[T, D, B, H], or [B, T, D, H]."""
        shape: tuple[Dim, ...] = (self.length, 1, self.batch, self.hidden)
        axis = 1
        if self.batch_first:
            values = [self.steps.transpose(value, 1, 0, 2) for value in values]
            shape, axis = (self.batch, self.length, 1, self.hidden), 2
        return self._joined([self.steps.reshape(value, *shape) for value in values], axis)

    def _final(self, values: Sequence[str]) -> str:
        """[D, B, H], or [B, D, H]."""
        axis = 1 if self.batch_first else 0
        shape: tuple[Dim, ...] = (1, self.batch, self.hidden)
        if self.batch_first:
            shape = (self.batch, 1, self.hidden)
        return self._joined([self.steps.reshape(value, *shape) for value in values], axis)

    def _joined(self, values: Sequence[str], axis: int) -> str:
        return values[0] if len(values) == 1 else self.steps("Concat", *values, axis=axis)

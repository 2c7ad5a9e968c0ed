"""Writing one operator as several: a short hand for nodes, constants and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.carry import reshape_to
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.types import Array, Node


class Steps:
    """The nodes that take the place of one node, in order.

    Every method adds a node and returns the value it makes, with its type and shape inferred.
    Constants are named after what they hold, so that equal steps of different layers are equal
    nodes, which `cleanup.merge_equal_nodes` computes once.

    Parameters
    ----------
    graph : Graph
    node : Node
        What is being replaced; its name starts the names of the steps.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.nodes: list[Node] = []

    @property
    def title(self) -> str:
        """Operator and name, for errors."""
        return f"{self.node.op.rpartition('.')[2]} {self.node.name!r}"

    def refuse(self, why: str) -> UnsupportedModel:
        """The error that names this operator and why it cannot be compiled."""
        return UnsupportedModel(f"{self.title}: {why}")

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add ``op(*inputs)`` with one output."""
        value = self.graph.fresh(f"{self.node.name}.{op.removeprefix('apq.').lower()}")
        self.add(Node(op, self.graph.fresh(f"{value}.node"), inputs, (value,), attrs))
        return value

    def add(self, node: Node) -> None:
        """Add a node that has its names already."""
        infer(self.graph, node)
        self.nodes.append(node)

    def done(self, *results: str) -> list[Node]:
        """The nodes, with `results` as outputs of the operator; ``""`` where nobody reads one."""
        for result, output in zip(results, self.node.outputs, strict=False):
            if result and output:
                name = self.graph.fresh(f"{self.node.name}.{output}")
                self.nodes.append(Node("Identity", name, (result,), (output,)))
        return self.nodes

    def input(self, index: int) -> str:
        """Name of an input, ``""`` if it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def wants(self, index: int) -> bool:
        """Whether an output is asked for."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def shape(self, value: str, *ranks: int) -> tuple[Dim, ...]:
        """Dimensions of a value.

        Raises
        ------
        UnsupportedModel
            They are not known before run time, or there are others than `ranks` of them.
        """
        shape = self.graph.known_shape(value)
        if shape is None:
            raise self.refuse(
                f"the shape of its input {self.graph.describe(value)} is not known before run time"
            )
        if ranks and len(shape) not in ranks:
            wanted = " or ".join(map(str, ranks))
            raise self.refuse(
                f"its input {self.graph.describe(value)} has {len(shape)} dimensions, not {wanted}"
            )
        return shape

    def size(self, dim: Dim, what: str) -> int:
        """A dimension that must be a number.

        Raises
        ------
        UnsupportedModel
            It is symbolic.
        """
        if not isinstance(dim, int):
            raise self.refuse(f"its {what} is {dim}, but must be a number")
        return dim

    def constant(self, array: Array) -> str:
        """A small constant, shared with all that are equal."""
        flat = "_".join(map(str, array.reshape(-1).tolist()))
        name = f"{array.dtype.name}{list(array.shape) or ''}:{flat}".replace(" ", "")
        self.graph.weights.setdefault(name, array)
        return name

    def number(self, value: float, dtype: str = "float32") -> str:
        """A scalar constant."""
        return self.constant(np.asarray(value, dtype))

    def reshape(self, x: str, *dims: Dim) -> str:
        """`x` in another shape."""
        value = self.graph.fresh(f"{self.node.name}.reshape")
        node = Node("Reshape", self.graph.fresh(f"{value}.node"), (x,), (value,))
        self.add(reshape_to(self.graph, node, self.graph.shape(x), dims))
        return value

    def transpose(self, x: str, *perm: int) -> str:
        """`x` with its axes in another order."""
        return self("Transpose", x, perm=perm)

    def unsqueeze(self, x: str, axis: int) -> str:
        """``x`` with an axis of 1, which opset 13 made an input."""
        if self.graph.opset < 13:
            return self("Unsqueeze", x, axes=(axis,))
        return self("Unsqueeze", x, self.constant(np.asarray([axis], np.int64)))

    def slice(self, x: str, axis: int, start: int, end: int) -> str:
        """Entries `start` to `end` along a numbered axis."""
        ends = [self.constant(np.asarray([v], np.int64)) for v in (start, end, axis)]
        return self("Slice", x, *ends)

    def expand(self, x: str, *dims: Dim) -> str:
        """`x` broadcast to a shape."""
        return self("apq.Expand", x, shape=tuple(as_attr(d) for d in dims))

    def range(self, count: Dim) -> str:
        """``0 .. count - 1`` as int64."""
        attrs = {"shape": (as_attr(count),), "start": 0, "delta": 1, "dtype": "int64"}
        return self("apq.Range", **attrs)

    def dim(self, dim: Dim) -> str:
        """A dimension as int64 scalar."""
        if isinstance(dim, int):
            return self.number(dim, "int64")
        return self("apq.Dims", dims=(as_attr(dim),), shape=(), dtype="int64")

"""How large a value may be: a file of a few bytes must not make anybody allocate many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import equal, product
from apq_tvm.types import Array, Node

# Elements along one axis, and in a tensor as far as its dimensions are numbers.
LARGEST_DIM = 10**9 - 1  # as `apq_tvm.onnx_import.symbolic.dims.LONGEST`
LARGEST_TENSOR = 1 << 38

# Constants may be folded to so many entries in all, or so many for each that the file has.
FREE_ENTRIES, FOR_EACH = 1 << 22, 8


def check_sizes(graph: Graph, node: Node) -> None:
    """Refuse outputs that nobody has the memory for.

    Raises
    ------
    ImportFailed
        Naming the node and the shape.
    """
    for value in node.outputs:
        shape = graph.shape(value) if value else None
        numbers = [dim for dim in shape or () if isinstance(dim, int)]
        if any(not 0 <= dim <= LARGEST_DIM for dim in numbers) or prod(numbers) > LARGEST_TENSOR:
            raise ImportFailed(
                f"{node.op} {node.name!r}: its output {graph.describe(value)} has an axis of less "
                f"than 0 or more than {LARGEST_DIM} elements, or more than {LARGEST_TENSOR} in all"
            )
    if node.op == "Reshape":
        x, y = graph.known_shape(node.inputs[0]), graph.known_shape(node.outputs[0])
        if x is not None and y is not None and equal(product(x), product(y)) is False:
            raise ImportFailed(
                f"Reshape {node.name!r}: {graph.describe(node.inputs[0])} has not as many elements "
                f"as {graph.describe(node.outputs[0])}"
            )


class Budget:
    """What folding may still allocate, in entries."""

    def __init__(self, weights: Iterable[Array]) -> None:
        self.left = FREE_ENTRIES + FOR_EACH * sum(array.size for array in weights)

    def takes(self, entries: int) -> bool:
        """Whether so many may be allocated; they are then."""
        if entries > self.left:
            return False
        self.left -= entries
        return True


# Operators whose output is no larger than their inputs together, though ONNX does not infer it.
SHRINKING = frozenset(("NonZero", "Compress", "Unique", "Gather", "Slice", "Split", "Reshape"))


def computed_entries(graph: Graph, node: Node, inputs: Mapping[str, Array]) -> int | None:
    """Entries of the largest output of a node of constants; None if that is not known."""
    largest = 0
    for value in filter(None, node.outputs):
        shape = graph.known_shape(value)
        if shape is None and node.op not in SHRINKING:
            return None
        dims = [array.size * max(array.ndim, 1) for array in inputs.values()]
        sizes = [sum(dims)] if shape is None else list(shape)
        if not all(isinstance(dim, int) for dim in sizes):
            return None
        largest = max(largest, prod(int(dim) for dim in sizes if isinstance(dim, int)))
    return largest

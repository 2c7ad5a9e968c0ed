"""How large a value may be: a file of a few bytes must not make anybody allocate many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from apq_tvm.errors import ImportFailed
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.dims import equal, product
from apq_tvm.types import Array, Node

# Elements along one axis, and in a tensor as far as its dimensions are numbers.
LARGEST_DIM = 10**9 - 1  # as `apq_tvm.onnx_import.symbolic.dims.LONGEST`
LARGEST_TENSOR = 1 << 38
MOST_AXES = 64  # numpy's limit

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
        if len(shape or ()) > MOST_AXES:
            raise ImportFailed(
                f"{node.op} {node.name!r}: its output {value!r} has {len(shape or ())} axes; the "
                f"most is {MOST_AXES}"
            )
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


# What onnx's reference computes by loops in Python, a window or a box at a time: entries in all.
LOOPED = frozenset(
    "AveragePool Col2Im Conv ConvInteger ConvTranspose DeformConv DFT GRU GlobalLpPool GridSample "
    "LRN LSTM LpPool MatMulInteger MaxPool MaxUnpool NonMaxSuppression QLinearConv RNN Resize "
    "STFT TfIdfVectorizer Upsample".split()
)
LOOPED_ENTRIES = 1 << 12
# The same, an entry at a time.
STEPPED = frozenset(
    "Compress Det GatherElements GatherND OneHot ReverseSequence Scatter ScatterElements ScatterND "
    "Unique".split()
)
STEPPED_ENTRIES = 1 << 20
# Products that a contraction of constants may have.
PRODUCTS = 1 << 28


class Budget:
    """What folding may still allocate, in entries, and what it may still compute slowly."""

    def __init__(self, weights: Iterable[Array]) -> None:
        self.left = FREE_ENTRIES + FOR_EACH * sum(array.size for array in weights)
        self.looped, self.stepped = LOOPED_ENTRIES, STEPPED_ENTRIES

    def takes(self, node: Node, inputs: Sequence[Array], entries: int) -> bool:
        """Whether so many may be made of `inputs`; they are then."""
        work = entries + sum(array.size for array in inputs)
        if node.op == "Einsum" and prod(array.size for array in inputs) > PRODUCTS:
            return False
        looped = work if node.op in LOOPED else 0
        stepped = work if node.op in STEPPED else 0
        if entries > self.left or looped > self.looped or stepped > self.stepped:
            return False
        self.left -= entries
        self.looped -= looped
        self.stepped -= stepped
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

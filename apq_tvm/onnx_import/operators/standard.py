"""Standard operators that are written in others, where they are used as only some models do."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    as_attr,
    equal,
    maximum,
    product,
    symbols,
)
from apq_tvm.onnx_import.symbolic.geometry import halves
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node


def reduced(steps: Steps, op: str, x: str, axes: tuple[int, ...], keep: bool = True) -> str:
    """A reduction; since opset 18 (ReduceSum: 13) its axes are an input."""
    since = 13 if op == "ReduceSum" else 18
    if steps.graph.opset < since:
        return steps(op, x, axes=axes, keepdims=int(keep))
    return steps(op, x, steps.constant(np.asarray(axes, np.int64)), keepdims=int(keep))


def normalization(graph: Graph, node: Node) -> list[Node] | None:
    """LayerNormalization and RMSNormalization, whose scale and bias may have to be broadcast.

    Raises
    ------
    ValueError
        They cannot be.
    """
    steps = Steps(graph, node)
    x, *given = (value for value in node.inputs if value)
    shape = steps.shape(x)
    axis = int(node.attrs.get("axis", -1)) % len(shape)
    if all(same_shape(graph.shape(value), shape[axis:]) for value in given):
        return None
    if any(node.outputs[1:]):
        raise steps.refuse("its mean and deviation cannot be had where its scale is broadcast")
    kind, ones = str(graph.dtype(x)), tuple(as_attr(dim) for dim in shape[axis:])
    one = steps("apq.Full", shape=ones, value=np.ones((), kind), dtype=kind)
    made = steps(node.op, x, one, axis=axis, epsilon=node.attrs.get("epsilon", 1e-5))
    for op, value in zip(("Mul", "Add"), given, strict=False):
        made = steps(op, made, value)
    if not same_shape(graph.shape(made), shape):
        raise ValueError(f"its scale or bias is larger than {graph.describe(x)}")
    return steps.done(made)


def batch_normalization(graph: Graph, node: Node) -> list[Node] | None:
    """BatchNormalization in training mode: with the statistics of its own input.

    Raises
    ------
    UnsupportedModel
        Outputs for training of an opset before 14 are read.
    """
    steps = Steps(graph, node)
    if not node.attrs.get("training_mode", 0):
        if any(node.outputs[1:]):
            raise steps.refuse("its outputs for training cannot be computed; export for inference")
        return None
    x, scale, bias, mean, variance = node.inputs
    shape = steps.shape(x)
    axes = tuple(i for i in range(len(shape)) if i != 1)
    momentum = float(node.attrs.get("momentum", 0.9))

    def per_channel(value: str) -> str:
        (channels,) = steps.shape(value, 1)
        return steps.reshape(value, *(channels if i == 1 else 1 for i in range(len(shape))))

    def running(old: str, new: str) -> str:
        kept = steps("Mul", old, steps.number(momentum, str(graph.dtype(old))))
        return steps("Add", kept, steps("Mul", new, steps.number(1 - momentum, kind)))

    kind = str(graph.dtype(x))
    current = reduced(steps, "ReduceMean", x, axes)
    centred = steps("Sub", x, current)
    spread = reduced(steps, "ReduceMean", steps("Mul", centred, centred), axes)
    epsilon = steps.number(float(node.attrs.get("epsilon", 1e-5)), kind)
    scaled = steps("Div", centred, steps("Sqrt", steps("Add", spread, epsilon)))
    y = steps("Add", steps("Mul", scaled, per_channel(scale)), per_channel(bias))
    results = [y]
    for index, old, new in ((1, mean, current), (2, variance, spread)):
        wanted = steps.wants(index)
        results.append(running(old, steps.reshape(new, shape[1])) if wanted else "")
    return steps.done(*results)


def dropout(graph: Graph, node: Node) -> list[Node] | None:
    """Dropout that is told to drop something.

    Raises
    ------
    UnsupportedModel
        Its training mode is on, or decided at run time: what it drops is random.
    """
    steps = Steps(graph, node)
    mode, ratio = steps.input(2), steps.input(1)
    if not mode or graph.scalar(mode) == 0 or graph.scalar(ratio or mode) == 0:
        return _mask_of_ones(steps) if steps.wants(1) else None
    if ratio and graph.scalar(ratio) == 0:
        return _mask_of_ones(steps) if steps.wants(1) else None
    raise steps.refuse(
        "it is in training mode, so its result is random; export the model in inference mode "
        "(model.eval())"
    )


def _mask_of_ones(steps: Steps) -> list[Node]:
    x = steps.node.inputs[0]
    shape = steps.shape(x)
    mask = steps.expand(steps.constant(np.asarray(True)), *shape)
    return steps.done(steps("Identity", x), mask)


def lp_normalization(graph: Graph, node: Node) -> list[Node]:
    """``x / norm(x)`` along one axis, and 0 where the norm is 0."""
    steps, x = Steps(graph, node), node.inputs[0]
    axis, p = int(node.attrs.get("axis", -1)), int(node.attrs.get("p", 2))
    norm = reduced(steps, "ReduceL1" if p == 1 else "ReduceL2", x, (axis,))
    zero = steps.number(0, str(graph.dtype(x)))
    one = steps.number(1, str(graph.dtype(x)))
    nothing = steps("Equal", norm, zero)
    divided = steps("Div", x, steps("Where", nothing, one, norm))
    return steps.done(steps("Where", nothing, zero, divided))


LARGEST_MATRIX = 4
"""Rows of a matrix whose determinant is written out."""


def _without(numbers: tuple[int, ...], left: int) -> tuple[int, ...]:
    """The numbers but for one."""
    return tuple(number for number in numbers if number != left)


class _Minors:
    """Determinants of parts of square matrices [..., n, n], written out."""

    def __init__(self, steps: Steps, x: str) -> None:
        self.steps, self.x, self.shape = steps, x, steps.shape(x)
        size = steps.size(self.shape[-1], "matrix size")
        if not 1 <= size <= LARGEST_MATRIX:
            most = f"{LARGEST_MATRIX} x {LARGEST_MATRIX}"
            raise steps.refuse(f"matrices of {size} x {size}; up to {most} can be compiled")
        self.rows = tuple(range(size))
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}

    def entry(self, row: int, column: int) -> str:
        """One entry of each matrix, [...]."""
        steps, axis = self.steps, len(self.shape) - 1
        part = steps.slice(steps.slice(self.x, axis - 1, row, row + 1), axis, column, column + 1)
        return steps.reshape(part, *self.shape[:-2])

    def of(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> str:
        """The determinant of these rows and columns, [...], written once."""
        if (rows, columns) not in self.known:
            self.known[rows, columns] = self._by_first_row(rows, columns)
        return self.known[rows, columns]

    def _by_first_row(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> str:
        if len(rows) == 1:
            return self.entry(rows[0], columns[0])
        total = ""
        for i, column in enumerate(columns):
            rest = self.of(rows[1:], _without(columns, column))
            term = self.steps("Mul", self.of(rows[:1], (column,)), rest)
            total = self.steps("Sub" if i % 2 else "Add", total, term) if total else term
        return total


def det(graph: Graph, node: Node) -> list[Node]:
    """Determinants of small matrices, written out.

    Raises
    ------
    UnsupportedModel
        The matrices are larger.
    """
    minors = _Minors(Steps(graph, node), node.inputs[0])
    return minors.steps.done(minors.of(minors.rows, minors.rows))


def inverse(graph: Graph, node: Node) -> list[Node]:
    """``com.microsoft.Inverse`` of small matrices, by Cramer's rule.

    Raises
    ------
    UnsupportedModel
        The matrices are larger.
    """
    minors = _Minors(Steps(graph, node), node.inputs[0])
    steps, rows, kind = minors.steps, minors.rows, str(graph.dtype(node.inputs[0]))
    whole, found = minors.of(rows, rows), []
    for row, column in itertools.product(rows, rows):
        one = steps.number(-1.0 if (row + column) % 2 else 1.0, kind)
        if len(rows) > 1:
            one = steps("Mul", minors.of(_without(rows, column), _without(rows, row)), one)
        found.append(steps.unsqueeze(steps("Div", one, whole), len(minors.shape) - 2))
    entries = steps("Concat", *found, axis=len(minors.shape) - 2)
    return steps.done(steps.reshape(entries, *minors.shape))


def group_normalization(graph: Graph, node: Node) -> list[Node] | None:
    """GroupNormalization of float32 as exporters write it, whose groups are rows of memory."""
    x, scale, bias = node.inputs[:3]
    steps, groups = Steps(graph, node), int(node.attrs["num_groups"])
    shape, of_groups = graph.known_shape(x), graph.opset < 21  # one number for each group
    if graph.dtype(x) != "float32" or shape is None or len(shape) < 2:
        return None
    if not isinstance(shape[1], int) or groups < 1 or shape[1] % groups:
        return None
    wanted = (groups if of_groups else shape[1],)
    if any(graph.known_shape(value) != wanted for value in (scale, bias)):
        return None
    given: tuple[str, ...] = (scale, bias)
    if not of_groups:
        numbers = {f"group.{name}.{groups}": value for name, value in (("scale", 1), ("bias", 0))}
        for name, value in numbers.items():
            graph.weights.setdefault(name, np.full(groups, value, np.float32))
        given = tuple(numbers)
    rows = steps.reshape(x, shape[0], groups, shape[1] // groups * product(shape[2:]))
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    normal = steps("InstanceNormalization", rows, *given, epsilon=epsilon)
    result = steps.reshape(normal, *shape)
    if not of_groups:
        channels = (shape[1], *(1 for _ in shape[2:]))
        scale, bias = (steps.reshape(value, *channels) for value in (scale, bias))
        result = steps("Add", steps("Mul", result, scale), bias)
    return steps.done(result)


def space_to_depth(graph: Graph, node: Node) -> list[Node] | None:
    """SpaceToDepth whose channels come before the places inside of a block (mode CRD)."""
    if node.attrs.get("mode", "DCR") != "CRD":
        return None
    steps, x, by = Steps(graph, node), node.inputs[0], int(node.attrs["blocksize"])
    n, c, height, width = steps.shape(x, 4)
    rows, columns = height // by, width // by
    blocks = steps.transpose(steps.reshape(x, n, c, rows, by, columns, by), 0, 1, 3, 5, 2, 4)
    return steps.done(steps.reshape(blocks, n, c * by * by, rows, columns))


def squeeze(graph: Graph, node: Node) -> list[Node] | None:
    """Squeeze of dimensions that only a run knows: they are taken as 1, which it checks.

    Raises
    ------
    UnsupportedModel
        There are no axes, and whether a dimension is 1 is known when the model runs.
    """
    shape = graph.known_shape(node.inputs[0])
    if shape is None:
        return None
    if "axes" not in node.attrs and len(node.inputs) < 2:
        _sure(graph, node, shape)
        return None
    axes = graph.weights.get(node.inputs[1]) if len(node.inputs) > 1 else node.attrs["axes"]
    if axes is None:
        return None
    rank = len(shape)
    dropped = {int(axis) % rank for axis in np.ravel(axes) if -rank <= axis < rank}
    if not any(equal(shape[axis], 1) is None for axis in dropped):
        return None
    steps = Steps(graph, node)
    whole = [1 if i in dropped else dim for i, dim in enumerate(shape)]
    sure = steps("apq.AssumeHere", node.inputs[0], shape=tuple(map(as_attr, whole)))
    rest = [dim for i, dim in enumerate(shape) if i not in dropped]
    return steps.done(steps.reshape(sure, *rest))


def tile(graph: Graph, node: Node) -> list[Node] | None:
    """Tile where all sizes are numbers: `apq_tvm.lower` has a kernel that divides no index."""
    shape, repeats = graph.known_shape(node.inputs[0]), graph.weights.get(node.inputs[1])
    numbers = [dim for dim in shape or () if isinstance(dim, int)]
    if shape is None or repeats is None or len(numbers) != len(shape):
        return None  # `apq_tvm.onnx_import.symbolic` knows others
    whole = tuple(dim * int(times) for dim, times in zip(numbers, repeats.ravel(), strict=True))
    return [Node("apq.Tile", node.name, node.inputs[:1], node.outputs, {"shape": whole})]


def _sure(graph: Graph, node: Node, shape: Sequence[Dim]) -> None:
    """Every dimension that is 1 goes, so all must be numbers."""
    unsure = {name for dim in shape if equal(dim, 1) is None for name in symbols(dim)}
    if unsure:
        fixed = " ".join(f"--dim {name}=SIZE" for name in sorted(unsure))
        raise Steps(graph, node).refuse(
            f"it drops the dimensions that are 1, and of {graph.describe(node.inputs[0])} only a "
            f"run knows which; fix them ({fixed}), or export it with axes"
        )


def conv_transpose(graph: Graph, node: Node) -> list[Node] | None:
    """ConvTranspose to a given output shape: padding that makes it so.

    Raises
    ------
    UnsupportedModel
        A kernel whose size is not known before run time.
    """
    wanted = node.attrs.get("output_shape")
    if not wanted:
        return None
    steps = Steps(graph, node)
    rank = len(steps.shape(node.inputs[0])) - 2
    sizes = [d for d in steps.shape(node.inputs[0])[2:] if isinstance(d, int)]
    if len(sizes) < rank:
        return _cut_to_shape(steps, wanted[-rank:])
    kernel = [steps.size(d, "kernel size") for d in steps.shape(node.inputs[1])[2:]]
    strides, dilations = (node.attrs.get(k, (1,) * rank) for k in ("strides", "dilations"))
    extra = list(node.attrs.get("output_padding", (0,) * rank))
    before, after = [], []
    for i, out in enumerate(wanted[-rank:]):
        total = strides[i] * (sizes[i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - out
        if total < 0:  # more than the kernel reaches: zeros behind
            extra[i], total = extra[i] - total, 0
        first, last = halves(total, node.attrs.get("auto_pad") == "SAME_UPPER")
        before.append(first)
        after.append(last)
    dropped = ("output_shape", "auto_pad", "pads", "output_padding")
    attrs = {key: value for key, value in node.attrs.items() if key not in dropped}
    attrs |= {"pads": (*before, *after), "output_padding": tuple(extra)}
    return [Node(node.op, node.name, node.inputs, node.outputs, attrs)]


def _cut_to_shape(steps: Steps, wanted: Sequence[int]) -> list[Node]:
    """Everything that a ConvTranspose of symbolic sizes reaches, cut or filled to `wanted`."""
    graph, node, rank = steps.graph, steps.node, len(wanted)
    dropped = ("output_shape", "auto_pad", "pads")
    attrs = {key: value for key, value in node.attrs.items() if key not in dropped}
    whole = steps("ConvTranspose", *node.inputs[:2], **attrs, pads=(0,) * (2 * rank))
    shape = steps.shape(whole)
    before: list[Dim] = []
    for out, size in zip(wanted, shape[2:], strict=True):
        cut = halves(maximum(size - out, 0), node.attrs.get("auto_pad") == "SAME_UPPER")
        before.append(-cut[0])
    y = steps(
        "apq.Pad",
        whole,
        mode="constant",
        before=(0, 0, *(as_attr(dim) for dim in before)),
        shape=(*(as_attr(dim) for dim in shape[:2]), *wanted),
    )
    if steps.input(2):
        (channels,) = graph.shape(node.inputs[2]) or (None,)
        bias = steps.reshape(node.inputs[2], 1, channels or shape[1], *[1] * rank)
        y = steps("Add", y, bias)
    return steps.done(y)


def max_unpool(graph: Graph, node: Node) -> list[Node]:
    """MaxUnpool: its values scattered over zeros, by places in the flattened result.

    Raises
    ------
    UnsupportedModel
        An output shape is given: what its places count in is nowhere said.
    """
    steps = Steps(graph, node)
    if steps.input(2):
        raise steps.refuse("its output shape is given; leave that to the kernel and its pads")
    x, places = node.inputs[:2]
    shape = steps.shape(x)
    kernel = node.attrs["kernel_shape"]
    rank = len(kernel)
    strides, pads = (
        node.attrs.get(key, (fill,) * count)
        for key, fill, count in (("strides", 1, rank), ("pads", 0, 2 * rank))
    )
    out = [
        (dim - 1) * strides[i] + kernel[i] - pads[i] - pads[i + rank]
        for i, dim in enumerate(shape[2:])
    ]
    whole = product([*shape[:2], *out])
    dtype = str(graph.dtype(x))
    zeros = steps("apq.Full", shape=(as_attr(whole),), value=np.zeros((), dtype), dtype=dtype)
    count = product(shape)
    flat, at = steps.reshape(x, count), steps.reshape(places, count)
    y = steps("ScatterElements", zeros, at, flat, axis=0)
    return steps.done(steps.reshape(y, *shape[:2], *out))

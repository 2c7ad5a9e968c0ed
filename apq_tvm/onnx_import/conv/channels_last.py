"""Images with their channels last, from the first convolution to whatever cannot take them so.

Values keep their order in the graph around; a *twin* is the same image with its channels last. One
walk writes every operator that may work on twins on them, makes a twin where a convolution needs
one, and turns back only what some other operator reads. So layout changes between neighbouring
convolutions never come to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from apq_tvm.onnx_import.conv.layers import convolution
from apq_tvm.onnx_import.conv.pools import SEPARABLE, global_pooling, pooling, stored_axes
from apq_tvm.onnx_import.conv.resample import resize, transposed
from apq_tvm.onnx_import.graph import Graph, Shape, with_attrs
from apq_tvm.onnx_import.passes.expand import REDUCTIONS, UNARY
from apq_tvm.onnx_import.symbolic.dims import as_attr
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.shape_rules import ELEMENTWISE
from apq_tvm.types import Node

Rule = Callable[["ChannelsLast", Node], bool]


def channels_last(graph: Graph) -> None:
    """Rewrite convolutions as linear layers, and poolings and what lies between, channels last."""
    if any(node.op in ("Conv", "ConvTranspose", *SEPARABLE) for node in graph.nodes):
        ChannelsLast(graph).run()


class ChannelsLast:
    """The walk; rules ask it for twins and give it nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._twin: dict[str, str] = {}
        self._first = {spec.name for spec in graph.inputs}
        self._nodes: list[Node] = []

    def run(self) -> None:
        """Rewrite the graph's nodes."""
        for node in self.graph.nodes:
            rule = RULES.get(node.op)
            if rule is not None and rule(self, node):
                continue
            for value in node.inputs:
                self._turn_back(value)
            self._first.update(node.outputs)
            self._nodes.append(node)
        for spec in self.graph.outputs:
            self._turn_back(spec.name)
        self.graph.nodes = self._nodes
        self.graph.index()
        self.graph.sweep()

    def add(self, node: Node, known: bool = False) -> None:
        """Add a node; its outputs are typed unless they are `known`."""
        if not known:
            infer(self.graph, node)
        self._nodes.append(node)

    def emit(self, node: Node) -> None:
        """Add a node that makes a value in its own order."""
        self._first.update(node.outputs)
        self._nodes.append(node)

    def has(self, value: str) -> bool:
        """Whether `value` has a twin."""
        return value in self._twin

    def last(self, value: str) -> str:
        """The twin of `value`, made if there is none."""
        if value not in self._twin:
            twin = self.made(value)
            rank = self.graph.rank(value) or 0
            self._move(value, twin, (0, *range(2, rank), 1))
        return self._twin[value]

    def made(self, value: str) -> str:
        """Name of the twin of `value` that the caller makes, its type recorded."""
        graph = self.graph
        twin = self._twin[value] = graph.fresh(f"{value}.last")
        shape = graph.shape(value)
        assert shape is not None
        graph.shapes[twin] = (shape[0], *shape[2:], shape[1])
        graph.dtypes[twin] = str(graph.dtype(value))
        return twin

    def _turn_back(self, value: str) -> None:
        if value in self._twin and value not in self._first:
            self._first.add(value)
            rank = self.graph.rank(value) or 0
            self._move(self._twin[value], value, (0, rank - 1, *range(1, rank - 1)))

    def _move(self, source: str, target: str, perm: tuple[int, ...]) -> None:
        """``target = transpose(source)``; a reshape where that moves nothing."""
        graph = self.graph
        shape, result = graph.known_shape(source), graph.known_shape(target)
        name = graph.fresh(f"{target}.order")
        wide = [i for i in perm if shape is None or shape[i] != 1]
        if result is not None and wide == sorted(wide):
            attrs = {"shape": tuple(as_attr(dim) for dim in result)}
            self._nodes.append(Node("apq.Reshape", name, (source,), (target,), attrs))
        else:
            self._nodes.append(Node("Transpose", name, (source,), (target,), {"perm": perm}))


def _place(axis: int, rank: int) -> int:
    """Where an axis lies in the twin."""
    axis %= rank
    return axis if axis == 0 else rank - 1 if axis == 1 else axis - 1


def _image(last: ChannelsLast, value: str) -> bool:
    """Whether `value` has a twin with a known type."""
    return last.has(value) and last.graph.shape(value) is not None


def _unary(last: ChannelsLast, node: Node) -> bool:
    """One image in, one out, element by element; other inputs are constants of one entry."""
    graph, x = last.graph, node.inputs[0]
    if not _image(last, x) or len(node.outputs) != 1:
        return False
    others = [v for v in node.inputs[1:] if v]
    if any(v not in graph.weights or graph.weights[v].size != 1 for v in others):
        return False
    infer(graph, node)
    inputs = (last.last(x), *node.inputs[1:])
    last.add(replace(node, inputs=inputs, outputs=(last.made(node.outputs[0]),)))
    return True


def _assume(last: ChannelsLast, node: Node) -> bool:
    """Sizes that are checked: those of the twin."""
    if not _image(last, node.inputs[0]) or last.graph.known_shape(node.outputs[0]) is None:
        return False
    y = last.made(node.outputs[0])
    attrs = {"shape": tuple(as_attr(dim) for dim in last.graph.known_shape(y) or ())}
    last.add(Node("apq.Assume", node.name, (last.last(node.inputs[0]),), (y,), attrs))
    return True


def _broadcasting(last: ChannelsLast, node: Node) -> bool:
    """Elementwise operators of several inputs."""
    graph, y = last.graph, node.outputs[0]
    shape = graph.shape(y)
    if shape is None or len(shape) < 3 or graph.dtype(y) is None:
        return False
    images = [v for v in node.inputs if last.has(v) and graph.rank(v) == len(shape)]
    if not images or any(last.has(v) and v not in images for v in node.inputs):
        return False
    if not all(_follows(graph, v, len(shape)) for v in node.inputs if v):
        return False
    inputs = tuple(_operand(last, v, len(shape)) for v in node.inputs)
    last.add(replace(node, inputs=inputs, outputs=(last.made(y),)))
    return True


def _follows(graph: Graph, value: str, rank: int) -> bool:
    """Whether an operand can be brought into the order of the twins."""
    shape = graph.shape(value)
    if shape is None or graph.dtype(value) is None:
        return False
    return value in graph.weights or len(shape) == rank or _one(shape)


def _one(shape: Shape) -> bool:
    return all(dim == 1 for dim in shape)


def _operand(last: ChannelsLast, value: str, rank: int) -> str:
    graph = last.graph
    array = graph.weights.get(value)
    if array is None:
        shape = graph.shape(value)
        return last.last(value) if shape is not None and len(shape) == rank else value
    if array.size == 1:
        return value
    wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
    name = f"{value}.last{rank}"
    if name not in graph.weights:
        graph.weights[name] = np.ascontiguousarray(np.moveaxis(wide, 1, -1))
    return name


def _axis(last: ChannelsLast, node: Node) -> bool:
    """Concat, Split and the like: an axis that moves; every input is an image."""
    graph, rank = last.graph, graph_rank(last, node)
    data = node.inputs if node.op == "Concat" else node.inputs[:1]
    if rank is None or "axis" not in node.attrs or not any(last.has(v) for v in data):
        return False
    if any(graph.rank(v) != rank or graph.dtype(v) is None for v in data):
        return False
    if any(graph.shape(v) is None for v in node.outputs):
        return False
    if node.op in ("Softmax", "LogSoftmax") and graph.opset < 13:
        return False
    inputs = tuple(
        (_operand(last, v, rank) if v in graph.weights else last.last(v)) if v in data else v
        for v in node.inputs
    )
    new = replace(node, inputs=inputs, outputs=tuple(last.made(v) for v in node.outputs))
    last.add(with_attrs(new, {"axis": _place(int(node.attrs["axis"]), rank)}))
    return True


def graph_rank(last: ChannelsLast, node: Node) -> int | None:
    """Rank of the first input."""
    rank = last.graph.rank(node.inputs[0])
    return rank if rank is not None and rank >= 3 else None


def _reduction(last: ChannelsLast, node: Node) -> bool:
    """Reductions and ArgMax; without their axes the result has no channels to move."""
    graph, x, rank = last.graph, node.inputs[0], graph_rank(last, node)
    axes = node.attrs.get("axes", node.attrs.get("axis"))
    given = len(node.inputs) > 1 and bool(node.inputs[1])
    if given:
        weight = graph.weights.get(node.inputs[1])
        axes = None if weight is None else tuple(int(a) for a in weight.reshape(-1))
    if rank is None or axes is None or not _image(last, x):
        return False
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    if not axes or graph.shape(node.outputs[0]) is None:
        return False
    moved = tuple(_place(int(a), rank) for a in axes)
    kept = [_place(i, rank) for i in range(rank) if i not in {int(a) % rank for a in axes}]
    keep = bool(node.attrs.get("keepdims", 1))
    if not keep and kept != sorted(kept):
        return False
    new = replace(node, inputs=(last.last(x), *node.inputs[1:]))
    if given:
        new = replace(new, inputs=(last.last(x), stored_axes(graph, moved)))
    elif "axis" in node.attrs:
        new = with_attrs(new, {"axis": moved[0]})
    else:
        new = with_attrs(new, {"axes": moved})
    if keep:
        last.add(replace(new, outputs=(last.made(node.outputs[0]),)))
    else:
        last.emit(new)
    return True


def _pad(last: ChannelsLast, node: Node) -> bool:
    """Constant padding on all axes."""
    graph, x, rank = last.graph, node.inputs[0], graph_rank(last, node)
    pads = graph.weights.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if rank is None or pads is None or not _image(last, x) or len(node.inputs) > 3:
        return False
    if pads.size != 2 * rank or graph.shape(node.outputs[0]) is None:
        return False
    moved = pads.reshape(2, rank)[:, (0, *range(2, rank), 1)].reshape(-1)
    name = graph.add_weight(f"{node.inputs[1]}.last", np.ascontiguousarray(moved))
    inputs = (last.last(x), name, *node.inputs[2:])
    last.add(replace(node, inputs=inputs, outputs=(last.made(node.outputs[0]),)))
    return True


def _slice(last: ChannelsLast, node: Node) -> bool:
    """Slice along constant axes, and ``apq.Slice``."""
    graph, x, rank = last.graph, node.inputs[0], graph_rank(last, node)
    if rank is None or not _image(last, x) or graph.known_shape(node.outputs[0]) is None:
        return False
    if node.op == "apq.Slice":
        y = last.made(node.outputs[0])
        attrs = {
            "axes": tuple(_place(int(a), rank) for a in node.attrs["axes"]),
            "shape": tuple(as_attr(dim) for dim in graph.known_shape(y) or ()),
        }
        last.add(with_attrs(replace(node, inputs=(last.last(x),), outputs=(y,)), attrs))
        return True
    if len(node.inputs) < 4 or any(v and v not in graph.weights for v in node.inputs[1:]):
        return False
    axes = tuple(_place(int(a), rank) for a in graph.weights[node.inputs[3]].reshape(-1))
    inputs = (last.last(x), *node.inputs[1:3], stored_axes(graph, axes), *node.inputs[4:])
    last.add(replace(node, inputs=inputs, outputs=(last.made(node.outputs[0]),)))
    return True


def _squeezed(last: ChannelsLast, node: Node) -> bool:
    """Squeeze and Unsqueeze of spatial axes, where some are left."""
    graph, x, rank = last.graph, node.inputs[0], graph_rank(last, node)
    axes, y = node.attrs.get("axes"), node.outputs[0]
    given = len(node.inputs) > 1
    if given and node.inputs[1] in graph.weights:
        axes = tuple(int(a) for a in graph.weights[node.inputs[1]].reshape(-1))
    result = graph.rank(y)
    if rank is None or axes is None or not _image(last, x) or result is None:
        return False
    wide = max(rank, result)
    if min(rank, result) < 3 or any(int(a) % wide < 2 for a in axes) or graph.dtype(y) is None:
        return False
    moved = tuple(sorted(_place(int(a), wide) for a in axes))
    new = replace(node, inputs=(last.last(x),), outputs=(last.made(y),))
    if given:
        last.add(replace(new, inputs=(new.inputs[0], stored_axes(graph, moved))))
    else:
        last.add(with_attrs(new, {"axes": moved}))
    return True


MORE_UNARY = (
    "Acos Acosh Asin Asinh Atan Atanh Celu Cosh Elu Gelu HardSigmoid HardSwish IsInf IsNaN "
    "LeakyRelu Mish Selu Shrink Sinh Softplus Softsign Tan ThresholdedRelu apq.Gelu "
    "QuantizeLinear DequantizeLinear BitwiseNot apq.Activation"
).split()

RULES: dict[str, Rule] = {
    **dict.fromkeys((*UNARY, *MORE_UNARY), _unary),
    **dict.fromkeys((*ELEMENTWISE, "PRelu"), _broadcasting),
    **dict.fromkeys((*REDUCTIONS, "ArgMax", "ArgMin"), _reduction),
    **dict.fromkeys(("Concat", "Split", "Softmax", "LogSoftmax"), _axis),
    **dict.fromkeys(("MaxPool", "AveragePool"), pooling),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), global_pooling),
    "Conv": convolution,
    "ConvTranspose": transposed,
    "Resize": resize,
    "Pad": _pad,
    "Slice": _slice,
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _squeezed),
    "apq.Assume": _assume,
    "apq.Slice": _slice,
}

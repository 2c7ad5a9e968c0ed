"""Convolutions on images whose channels come last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.passes.linear import stored
from apq_tvm.onnx_import.symbolic.dims import Dim, as_attr
from apq_tvm.onnx_import.symbolic.geometry import windows
from apq_tvm.types import Array, Node

if TYPE_CHECKING:
    from apq_tvm.onnx_import.conv.channels_last import ChannelsLast

RANKS = (3, 4, 5)
"""Of images: one to three spatial axes."""

LEAST_OUTPUTS = 16
"""Groups of fewer output channels are joined, with zeros between them: vectors have 16 lanes."""

NARROW = 8
"""Channels of a group whose convolution is a depthwise one: as columns of a product they would be
joined, with zeros between them, and of dozens of groups each pair a layer."""

NARROW_LANES = 4
"""Outputs of such a group are whole vectors, of the shortest kind."""

MOST_LAYERS = 64
"""Groups that become layers of their own."""

FEW_OUTPUTS = 4
"""Channels of a convolution whose every pixel is better multiplied by all taps than taken along by
each: a tile of a product has 8 columns at least, which 3 colours do not fill."""

LEAST_DEPTH = 16
"""Channels that such a product adds up."""

MOST_COLUMNS = 256
"""Of such a product."""

LARGEST_JOINED = 1 << 24
"""Elements of a weight with the zeros between joined groups: a file's few may ask for terabytes."""


def convolution(last: ChannelsLast, node: Node) -> bool:
    """``Conv`` with constant weights; whether it was written, and a note why it is no layer."""
    graph = last.graph
    if why := unfit(graph, node):
        note(graph, node, why)
        return False
    shape, w = graph.known_shape(node.inputs[0]), graph.weights[node.inputs[1]]
    assert shape is not None
    group = int(node.attrs.get("group", 1))
    if shape[1] != w.shape[1] * group or w.shape[0] % group:
        return False  # which ONNX Runtime refuses
    attrs = window_attrs(node, shape[2:], w.shape[2:])
    depthwise = group > 1 and w.shape[1] == 1 and w.shape[0] == group
    if depthwise or _narrow(graph, node, w, group):
        _depthwise(last, node, attrs)
        several = f"{w.shape[1]} inputs and {w.shape[0] // group} outputs"
        each = "one channel" if depthwise else several
        note(graph, node, f"groups of {each} are a kernel of their own, in float")
        return True
    if _few_outputs(graph, node, w, attrs):
        _as_sum(last, node, w, attrs)
        return True
    joined = _joined(group, w.shape[0] // group)
    if group // joined > MOST_LAYERS or (joined > 1 and w.size * joined > LARGEST_JOINED):
        note(graph, node, f"its {group} groups would be too many layers or too large a one")
        return False
    _grouped(last, node, attrs, group, joined)
    return True


def unfit(graph: Graph, node: Node) -> str:
    """Why a ``Conv`` or ``ConvTranspose`` cannot be a layer; ``""`` if its operands do not say."""
    x, w = node.inputs[0], graph.weights.get(node.inputs[1])
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    shape, out = graph.known_shape(x), graph.known_shape(node.outputs[0])
    if w is None or (bias and bias not in graph.weights):
        return "its weight or bias is no constant"
    if shape is None or out is None:
        return f"the shape of {graph.describe(x)} is not known"
    if not float_image(graph, x) or w.dtype != np.float32 or w.ndim != len(shape):
        return f"{graph.describe(x)} is {graph.dtype(x)} of rank {len(shape)}: no float32 of 3 to 5"
    return ""


def note(graph: Graph, node: Node, why: str) -> None:
    """Say why a convolution is no layer, beside what is known of its codes."""
    graph.notes[node.name] = "; ".join(filter(None, (why, graph.notes.get(node.name))))


def window_attrs(node: Node, sizes: Sequence[Dim], kernel: Sequence[int]) -> dict[str, Any]:
    """Where windows lie, with ``auto`` where padding hangs on sizes that are not known."""
    found = windows(node, sizes, kernel)
    if found.fixed:
        return {**found.attrs, "auto": ""}
    return {**found.attrs, "begins": (), "ends": (), "auto": node.attrs["auto_pad"]}


def float_image(graph: Graph, x: str) -> bool:
    """Whether `x` is float32 of one to three spatial axes."""
    return graph.dtype(x) == "float32" and graph.rank(x) in RANKS


def _narrow(graph: Graph, node: Node, w: Array, group: int) -> bool:
    """Whether groups are too narrow for layers of their own, and the file has no codes of them."""
    outputs = w.shape[0] // group
    fits = max(w.shape[1], outputs) <= NARROW and outputs % NARROW_LANES == 0
    return group > 1 and fits and node.inputs[1] not in graph.codes


def _joined(group: int, outputs: int) -> int:
    """How many groups make one layer."""
    fitting = [d for d in range(1, group) if group % d == 0 and d * outputs >= LEAST_OUTPUTS]
    return min(fitting, default=group)


def _few_outputs(graph: Graph, node: Node, w: Array, attrs: dict[str, Any]) -> bool:
    """Whether `_as_sum` is faster: of one group, no strides and no codes of the file's."""
    outputs, taps = w.shape[0], int(np.prod(w.shape[2:]))
    plain = not attrs["auto"] and all(stride == 1 for stride in attrs["strides"])
    plain = plain and int(node.attrs.get("group", 1)) == 1 and node.inputs[1] not in graph.codes
    few = outputs <= FEW_OUTPUTS and 1 < taps and outputs * taps <= MOST_COLUMNS
    return plain and few and w.shape[1] >= LEAST_DEPTH


def _as_sum(last: ChannelsLast, node: Node, w: Array, attrs: dict[str, Any]) -> None:
    """A convolution as the transposed one by the kernel's mirror image."""
    sides = range(2, w.ndim)
    reaches = [(k - 1) * d for k, d in zip(attrs["kernel"], attrs["dilations"], strict=True)]
    begins = [reach - begin for reach, begin in zip(reaches, attrs["begins"], strict=True)]
    where = {**attrs, "begins": tuple(begins)}
    windows_and_sum(last, node, np.flip(w, tuple(sides)).swapaxes(0, 1), where)


def windows_and_sum(
    last: ChannelsLast, node: Node, w: Array, where: Mapping[str, Sequence[int]]
) -> None:
    """The layer that makes a window of every pixel, and the windows' sum where they overlap.

    Parameters
    ----------
    last : ChannelsLast
    node : Node
        ``Conv`` or ``ConvTranspose``, whose inputs are an image, a weight and maybe a bias.
    w : float32 [Cin, Cout, *kernel]
    where : mapping
        ``strides``, ``dilations`` and ``begins`` of windows in the result.
    """
    graph, x = last.graph, node.inputs[0]
    shape, rank = graph.known_shape(x), w.ndim - 2
    assert shape is not None
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    rows = w.transpose(*range(2, w.ndim), 1, 0).reshape(-1, w.shape[0])  # [taps * Cout, Cin]
    weight = stored(graph, node.inputs[1], ".rows", rows)
    source, windows = last.last(x), graph.fresh(f"{node.outputs[0]}.windows")
    graph.shapes[windows], graph.dtypes[windows] = (shape[0], *shape[2:], len(rows)), "float32"
    layer = Node("apq.Linear", node.name, (source, weight, "", ""), (windows,), {"activation": ""})
    last.add(layer, known=True)
    y = last.made(node.outputs[0])
    given = {
        **{key: where[key] for key in ("strides", "dilations", "begins")},
        "kernel": tuple(int(k) for k in w.shape[2:]),
        "ends": (0,) * rank,
        "auto": "",
        "shape": shape_attr(graph, y),
    }
    inputs = (windows, bias) if bias else (windows,)
    last.add(Node("apq.Fold", graph.fresh(f"{node.name}.fold"), inputs, (y,), given))


def _depthwise(last: ChannelsLast, node: Node, attrs: dict[str, Any]) -> None:
    graph = last.graph
    w = graph.weights[node.inputs[1]]
    rows = w.reshape(*w.shape[:2], -1).transpose(2, 1, 0).reshape(-1, w.shape[0])
    taps = stored(graph, node.inputs[1], ".taps", rows)
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    y = last.made(node.outputs[0])
    attrs = {**attrs, "activation": "", "shape": shape_attr(graph, y)}
    if int(node.attrs["group"]) < w.shape[0]:
        attrs["inputs"] = int(w.shape[1])
    inputs = (last.last(node.inputs[0]), taps, bias, "")
    last.add(Node("apq.Depthwise", node.name, inputs, (y,), attrs))


def shape_attr(graph: Graph, value: str) -> tuple[int | str, ...]:
    """The known shape of `value` as an attribute."""
    shape = graph.known_shape(value)
    assert shape is not None
    return tuple(as_attr(dim) for dim in shape)


def _grouped(
    last: ChannelsLast, node: Node, attrs: dict[str, Any], group: int, joined: int
) -> None:
    """One layer for every `joined` groups."""
    graph, x = last.graph, last.last(node.inputs[0])
    w = graph.weights[node.inputs[1]]
    bias = graph.weights[node.inputs[2]] if len(node.inputs) > 2 and node.inputs[2] else None
    y = last.made(node.outputs[0])
    layers = group // joined
    rows, depth = w.shape[0] // layers, w.shape[1] * joined
    parts = []
    for i in range(layers):
        tail = f".{i}" if layers > 1 else ""
        matrix = _matrix(w[i * rows : (i + 1) * rows], joined)
        weight = stored(graph, node.inputs[1], f".rows{tail}", matrix)
        if layers == joined == 1:
            _carry_codes(graph, node.inputs[1], weight)
        shift = ""
        if bias is not None:
            shift = stored(graph, node.inputs[2], f".part{tail}", bias[i * rows : (i + 1) * rows])
        name = f"{node.name}{tail}"
        out = y if layers == 1 else graph.fresh(f"{y}{tail}")
        source = _windows(last, node, x, attrs, (i * depth, depth), graph.known_shape(y) or ())
        linear = (source, weight, shift, "")
        result = (*(graph.known_shape(y) or ())[:-1], rows)
        graph.shapes[out], graph.dtypes[out] = result, "float32"
        last.add(Node("apq.Linear", name, linear, (out,), {"activation": ""}), known=True)
        parts.append(out)
    if layers > 1:
        name = graph.fresh(f"{node.name}.concat")
        last.add(Node("Concat", name, tuple(parts), (y,), {"axis": int(w.ndim) - 1}))


def _matrix(w: Array, joined: int) -> Array:
    """[Cout, Cin / group, *kernel] of `joined` groups as [Cout, taps * Cin], tap-major."""
    outputs, depth, taps = w.shape[0], w.shape[1], int(np.prod(w.shape[2:]))
    flat = w.reshape(outputs, depth, taps).transpose(0, 2, 1)  # [Cout, taps, Cin / group]
    if joined == 1:
        return flat.reshape(outputs, -1)
    wide = np.zeros((outputs, taps, joined, depth), np.float32)
    each = outputs // joined
    for g in range(joined):
        wide[g * each : (g + 1) * each, :, g] = flat[g * each : (g + 1) * each]
    return wide.reshape(outputs, -1)


def _carry_codes(graph: Graph, source: str, target: str) -> None:
    """The codes of a weight whose taps now come first."""
    codes, w = graph.codes.get(source), graph.weights[source]
    if codes is None:
        return
    order = np.arange(w[0].size).reshape(w.shape[1], -1).T.reshape(-1)
    moved = codes.reordered(order)
    if moved is not None:
        graph.codes[target] = moved


def _windows(
    last: ChannelsLast, node: Node, x: str, attrs: dict[str, Any], channels: tuple[int, int],
    out: Sequence[Dim],
) -> str:  # fmt: skip
    """The rows that a layer multiplies: pixels as they are, or windows of them."""
    graph = last.graph
    shape = graph.known_shape(x)
    assert shape is not None
    plain = all(v == 1 for key in ("kernel", "strides") for v in attrs[key])
    plain = plain and not any((*attrs["begins"], *attrs["ends"]))
    whole = channels == (0, shape[-1])
    if plain and whole:
        return x
    width = int(np.prod(attrs["kernel"])) * channels[1]
    rows = graph.fresh(f"{x}.windows")
    given = {**attrs, "channels": channels, "shape": (*map(as_attr, out[:-1]), width)}
    last.add(Node("apq.Windows", graph.fresh(f"{node.name}.windows"), (x,), (rows,), given))
    return rows

"""``Resize`` and ``ConvTranspose`` on images whose channels come last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from apq_tvm.onnx_import.conv.layers import float_image, shape_attr
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.passes.linear import stored
from apq_tvm.types import Node

if TYPE_CHECKING:
    from apq_tvm.onnx_import.conv.channels_last import ChannelsLast

COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


def resize(last: ChannelsLast, node: Node) -> bool:
    """Nearest and linear ``Resize`` of the spatial axes, by constant scales or to known sizes."""
    graph, x, attrs = last.graph, node.inputs[0], node.attrs
    shape, out = graph.known_shape(x), graph.shape(node.outputs[0])
    mode = attrs.get("mode", "nearest")
    coordinates = attrs.get("coordinate_transformation_mode", "half_pixel")
    if not last.has(x) or shape is None or out is None or not float_image(graph, x):
        return False
    if mode not in ("nearest", "linear") or coordinates not in COORDINATES:
        return False
    if attrs.get("antialias", 0) or attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return False
    scales = _scales(graph, node, len(shape))
    if scales is None or None in out[2:] or shape[1] != out[1]:
        return False
    graph.shapes[node.outputs[0]] = (*shape[:2], *out[2:])  # ONNX's inference may lose the batch
    y = last.made(node.outputs[0])
    given = {
        "mode": mode,
        "coordinates": coordinates,
        "rounding": attrs.get("nearest_mode", "round_prefer_floor"),
        "scales": scales,
        "shape": shape_attr(graph, y),
    }
    last.add(Node("apq.Resize", node.name, (last.last(x),), (y,), given))
    return True


def _scales(graph: Graph, node: Node, rank: int) -> tuple[float, ...] | None:
    """Output size over input size of the spatial axes; None if that is no constant."""
    axes = node.attrs.get("axes", tuple(range(rank)))
    given = graph.weights.get((*node.inputs, "", "")[2])
    if given is not None and given.size == len(axes):
        of = dict(zip((int(a) % rank for a in axes), given.reshape(-1).tolist(), strict=True))
        scales = [float(of.get(i, 1.0)) for i in range(rank)]
        return tuple(scales[2:]) if scales[:2] == [1.0, 1.0] else None
    if len(node.inputs) < 4 or not node.inputs[3]:
        return None
    shape, out = graph.shape(node.inputs[0]) or (), graph.shape(node.outputs[0]) or ()
    pairs = list(zip(shape[2:], out[2:], strict=True))
    if not all(isinstance(a, int) and isinstance(b, int) and a > 0 for a, b in pairs):
        return None
    return tuple(float(np.float32(int(b) / int(a))) for a, b in pairs)  # type: ignore[arg-type]


def transposed(last: ChannelsLast, node: Node) -> bool:
    """``ConvTranspose`` as the layer that makes every window, and their sum."""
    graph, x, attrs = last.graph, node.inputs[0], node.attrs
    w, shape = graph.weights.get(node.inputs[1]), graph.known_shape(x)
    out = graph.known_shape(node.outputs[0])
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    if w is None or shape is None or out is None or not float_image(graph, x):
        return False
    if w.dtype != np.float32 or w.ndim != len(shape) or (bias and bias not in graph.weights):
        return False
    # Where padding follows from the output's size the rule is older than ONNX Runtime's.
    auto = attrs.get("auto_pad", "NOTSET") or "NOTSET"
    if int(attrs.get("group", 1)) != 1 or attrs.get("output_shape") or auto.startswith("SAME"):
        return False
    kernel, rank = tuple(int(k) for k in w.shape[2:]), len(shape) - 2
    pads = attrs.get("pads") if auto == "NOTSET" else None
    begins = tuple(int(v) for v in (pads or (0,) * (2 * rank))[:rank])
    taps = int(np.prod(kernel))
    rows = w.transpose(*range(2, w.ndim), 1, 0).reshape(-1, w.shape[0])  # [taps * Cout, Cin]
    weight = stored(graph, node.inputs[1], ".rows", rows)
    source = last.last(x)
    windows = graph.fresh(f"{node.outputs[0]}.windows")
    graph.shapes[windows] = (shape[0], *shape[2:], taps * w.shape[1])
    graph.dtypes[windows] = "float32"
    layer = Node("apq.Linear", node.name, (source, weight, "", ""), (windows,), {"activation": ""})
    last.add(layer, known=True)
    y = last.made(node.outputs[0])
    given = {
        "kernel": kernel,
        "strides": tuple(int(v) for v in attrs.get("strides") or (1,) * rank),
        "dilations": tuple(int(v) for v in attrs.get("dilations") or (1,) * rank),
        "begins": begins,
        "ends": (0,) * rank,
        "auto": "",
        "shape": shape_attr(graph, y),
    }
    inputs = (windows, bias) if bias else (windows,)
    last.add(Node("apq.Fold", graph.fresh(f"{node.name}.fold"), inputs, (y,), given))
    return True

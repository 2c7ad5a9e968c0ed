"""``Resize`` and ``ConvTranspose`` on images whose channels come last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from apq_tvm.onnx_import.conv.layers import float_image, note, shape_attr, unfit, windows_and_sum
from apq_tvm.onnx_import.symbolic.dims import parse
from apq_tvm.onnx_import.symbolic.resize import rewrite_resize
from apq_tvm.types import Node

if TYPE_CHECKING:
    from apq_tvm.onnx_import.conv.channels_last import ChannelsLast

COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


def resize(last: ChannelsLast, node: Node) -> bool:
    """Nearest and linear ``Resize`` of the spatial axes, by constant scales or to known sizes."""
    graph, x = last.graph, node.inputs[0]
    shape = graph.known_shape(x)
    if not last.has(x) or shape is None or not float_image(graph, x):
        return False
    new = rewrite_resize(graph, node)
    attrs = new.attrs if isinstance(new, Node) else None
    if attrs is None or attrs["mode"] == "cubic" or attrs["coordinates"] not in COORDINATES:
        return False
    scales = dict(zip(attrs["axes"], attrs["scales"], strict=True))
    if attrs["antialias"] or min(scales) < 2 or 0.0 in scales.values():
        return False
    # ONNX's inference may lose the batch.
    graph.shapes[node.outputs[0]] = tuple(parse(dim) for dim in attrs["shape"])
    y = last.made(node.outputs[0])
    given = {
        **{key: attrs[key] for key in ("mode", "coordinates", "rounding")},
        "scales": tuple(float(np.float32(scales.get(i, 1.0))) for i in range(2, len(shape))),
        "shape": shape_attr(graph, y),
    }
    last.add(Node("apq.Resize", node.name, (last.last(x),), (y,), given))
    return True


def transposed(last: ChannelsLast, node: Node) -> bool:
    """``ConvTranspose`` as the layer that makes every window, and their sum; or a note why not."""
    graph, attrs = last.graph, node.attrs
    if why := unfit(graph, node) or _unlike(node):
        note(graph, node, why)
        return False
    w, auto = graph.weights[node.inputs[1]], attrs.get("auto_pad", "NOTSET") or "NOTSET"
    rank = w.ndim - 2
    pads = attrs.get("pads") if auto == "NOTSET" else None
    where = {
        "strides": tuple(int(v) for v in attrs.get("strides") or (1,) * rank),
        "dilations": tuple(int(v) for v in attrs.get("dilations") or (1,) * rank),
        "begins": tuple(int(v) for v in (pads or (0,) * (2 * rank))[:rank]),
    }
    windows_and_sum(last, node, w, where)
    return True


def _unlike(node: Node) -> str:
    """Why the attributes of a ``ConvTranspose`` are not those of a layer; ``""`` if they are."""
    if int(node.attrs.get("group", 1)) != 1:
        return "transposed convolutions of groups are no layers"
    # The rule by which padding follows from the output's size is older than ONNX Runtime's.
    padded = node.attrs.get("output_shape") or node.attrs.get("auto_pad", "").startswith("SAME")
    return "its padding follows from the size of its output" if padded else ""

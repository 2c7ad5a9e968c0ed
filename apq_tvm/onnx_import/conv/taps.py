"""Convolutions without taps that see nothing but padding, wherever their window lies.

DeepLab's pyramid looks 24 and 36 pixels away, its images of 224 pixels have 14 there: of nine taps
one is left (Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation",
arXiv:1706.05587, section 3.3).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apq_tvm.onnx_import.conv.layers import unfit, window_attrs
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.types import Node


def drop_padded_taps(graph: Graph) -> None:
    """Cut them off every ``Conv`` of known sizes whose weight has no codes of the file's."""
    for node in graph.each():
        if node.op == "Conv" and not unfit(graph, node) and node.inputs[1] not in graph.codes:
            _cut(graph, node)


def _cut(graph: Graph, node: Node) -> None:
    w, shape = graph.weights[node.inputs[1]], graph.known_shape(node.inputs[0])
    out = graph.known_shape(node.outputs[0])
    assert shape is not None and out is not None
    sizes = [dim for dim in (*shape[2:], *out[2:]) if isinstance(dim, int)]
    attrs = window_attrs(node, shape[2:], w.shape[2:])
    if len(sizes) < 2 * (w.ndim - 2) or attrs["auto"]:
        return
    kept, begins, ends = [slice(None)] * w.ndim, list(attrs["begins"]), list(attrs["ends"])
    for i, taps in enumerate(w.shape[2:]):
        size, count = sizes[i], sizes[w.ndim - 2 + i]
        by = attrs["strides"][i]
        moves = [k * attrs["dilations"][i] - begins[i] for k in range(taps)]
        # Window n's tap sees pixel n * by + move.
        seen = [max(0, -(move // by)) <= min(count - 1, (size - 1 - move) // by) for move in moves]
        if True not in seen:
            return
        first, last = seen.index(True), taps - 1 - seen[::-1].index(True)
        before = begins[i] - first * attrs["dilations"][i]
        behind = ends[i] - (taps - 1 - last) * attrs["dilations"][i]
        if before >= 0 and behind >= 0:
            kept[2 + i], begins[i], ends[i] = slice(first, last + 1), before, behind
    fewer = np.ascontiguousarray(w[tuple(kept)])
    if fewer.shape == w.shape:
        return
    name = graph.add_weight(f"{node.inputs[1]}.seen", fewer)
    given = {key: value for key, value in node.attrs.items() if key != "auto_pad"}
    given |= {"pads": (*begins, *ends), "kernel_shape": fewer.shape[2:]}
    inputs = (node.inputs[0], name, *node.inputs[2:])
    graph.replace(node, replace(node, inputs=inputs, attrs=given))

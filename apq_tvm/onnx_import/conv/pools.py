"""Poolings: axis by axis where windows are large, on images whose channels come last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from apq_tvm.onnx_import.conv.layers import RANKS, float_image, shape_attr, window_attrs
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.types import Node

if TYPE_CHECKING:
    from apq_tvm.onnx_import.conv.channels_last import ChannelsLast

SEPARABLE = ("MaxPool", "AveragePool")
"""The largest of the largest, and the mean of means: of a window, rows count alike."""

LEAST_CHANNELS = 8
"""Of an image that is turned for one operator alone: what a vector has."""


def separate_pools(graph: Graph) -> None:
    """Write poolings of large windows as one along each axis: sums of kernels, not products."""
    for node in graph.each():
        if node.op in SEPARABLE and len([out for out in node.outputs if out]) == 1:
            parts = _separated(graph, node)
            for part in parts:
                infer(graph, part)
            if parts:
                graph.replace(node, *parts)


def _separated(graph: Graph, node: Node) -> list[Node]:
    """One node for each axis; none where that is not half the work."""
    kernel = tuple(int(k) for k in node.attrs.get("kernel_shape", ()))
    rank, shape = len(kernel), graph.known_shape(node.inputs[0])
    if shape is None or len(shape) != rank + 2:
        return []
    given = {
        key: tuple(int(v) for v in node.attrs.get(key) or (1,) * rank)
        for key in ("strides", "dilations")
    }
    pads = tuple(int(v) for v in node.attrs.get("pads") or (0,) * (2 * rank))
    axes = [i for i, size in enumerate(kernel) if size > 1]
    if any(len(values) != rank for values in given.values()) or len(pads) != 2 * rank:
        return []
    if min((*kernel, *given["strides"], *given["dilations"]), default=0) < 1:
        return []
    if len(axes) < 2 or reduce(mul, kernel, 1) < 2 * _taps(kernel, given["strides"]):
        return []
    # Strides where nothing is pooled are the first pooling's.
    owners = [axes[0] if size == 1 else i for i, size in enumerate(kernel)]
    parts, x = [], node.inputs[0]
    for axis in axes:
        mine = [owner == axis for owner in owners]

        def only(values: Sequence[int], blank: int, mine: Sequence[bool] = mine) -> tuple[int, ...]:
            wide = zip(values, (*mine, *mine), strict=False)
            return tuple(value if here else blank for value, here in wide)

        attrs = {
            "kernel_shape": only(kernel, 1),
            **{key: only(values, 1) for key, values in given.items()},
            "pads": only(pads, 0),
        }
        last = axis == axes[-1]
        y = node.outputs[0] if last else graph.fresh(f"{node.outputs[0]}.along{axis}")
        name = node.name if last else graph.fresh(f"{node.name}.along{axis}")
        attrs = {key: value for key, value in attrs.items() if key in node.attrs}
        part = replace(node, name=name, inputs=(x,), outputs=(y,), attrs={**node.attrs, **attrs})
        parts.append(part)
        x = y
    return parts


def _taps(kernel: Sequence[int], strides: Sequence[int]) -> int:
    """For one position of the result, if every axis is pooled by itself, the first one first."""
    return sum(size * reduce(mul, strides[i + 1 :], 1) for i, size in enumerate(kernel) if size > 1)


def pooling(last: ChannelsLast, node: Node) -> bool:
    """``MaxPool`` and ``AveragePool`` of an image whose channels come last, or fill vectors."""
    graph, x = last.graph, node.inputs[0]
    shape, out = graph.known_shape(x), graph.known_shape(node.outputs[0])
    if shape is None or out is None or not float_image(graph, x):
        return False
    if len(node.outputs) > 1 or not isinstance(shape[1], int):
        return False
    if not last.has(x) and shape[1] < LEAST_CHANNELS:
        return False
    attrs = window_attrs(node, shape[2:], node.attrs["kernel_shape"])
    kind = "max" if node.op == "MaxPool" else "average"
    padding = bool(node.attrs.get("count_include_pad", 0))
    y = last.made(node.outputs[0])
    attrs |= {"kind": kind, "padding": padding, "shape": shape_attr(graph, y)}
    last.add(Node("apq.Pool", node.name, (last.last(x),), (y,), attrs))
    return True


def global_pooling(last: ChannelsLast, node: Node) -> bool:
    """``GlobalAveragePool`` and ``GlobalMaxPool`` as reductions over the middle axes."""
    graph, x = last.graph, node.inputs[0]
    rank = graph.rank(x)
    if not last.has(x) or rank not in RANKS:
        return False
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    axes = tuple(range(1, rank - 1))
    y = last.made(node.outputs[0])
    inputs: tuple[str, ...] = (last.last(x),)
    attrs: dict[str, Any] = {"keepdims": 1}
    if graph.opset >= 18:
        inputs = (*inputs, stored_axes(graph, axes))
    else:
        attrs["axes"] = axes
    last.add(Node(op, node.name, inputs, (y,), attrs))
    return True


def stored_axes(graph: Graph, axes: Sequence[int]) -> str:
    """Axes as a constant, stored once."""
    name = f"axes.{'_'.join(map(str, axes))}"
    graph.weights.setdefault(name, np.asarray(axes, np.int64))
    return name

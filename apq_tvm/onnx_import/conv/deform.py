"""Deformable convolution (arXiv:1811.11168) in operators that are compiled well.

Every tap of the window is sampled where its offset says, by one ``apq.Sample`` whose points have
the taps below each other; what is left is a pointwise convolution, which is a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.onnx_import.symbolic.geometry import Windows, windows
from apq_tvm.onnx_import.symbolic.unify import same_shape
from apq_tvm.types import Node


def deform_conv(graph: Graph, node: Node) -> list[Node]:
    """``DeformConv`` of images (ONNX opset 19).

    Raises
    ------
    UnsupportedModel
        Inputs of other ranks than images have, weights of sizes that only a run knows, or sizes
        that do not fit each other.
    """
    steps = Steps(graph, node)
    x, weight, offset = node.inputs[:3]
    bias, mask = steps.input(3), steps.input(4)
    batch, channels, *image = steps.shape(x, 4)
    made, inner, *window = (steps.size(dim, "weight") for dim in steps.shape(weight, 4))
    columns = steps.size(channels, "number of channels")
    parts = int(node.attrs.get("offset_group", 1))
    taps, sizes = window[0] * window[1], steps.shape(offset, 4)[2:]
    lie = windows(node, image, window)
    if parts < 1 or columns % parts:
        raise steps.refuse(f"its {columns} channels are no {parts} groups of offsets")
    for value, each in ((offset, 2), (mask, 1)):
        if value and not _fits(steps.shape(value, 4), each * parts * taps, lie, sizes):
            raise steps.refuse(
                f"its input {graph.describe(value)} is not of {parts} groups of {each} numbers for "
                f"{window[0]} x {window[1]} taps at every pixel of its output"
            )
    both: tuple[Dim, ...] = (parts, taps, *sizes)
    moved = steps.reshape(offset, batch, parts, taps, 2, *sizes)
    places = []
    for axis in (1, 0):  # x comes first
        own = steps.reshape(steps.slice(moved, 3, axis, axis + 1), batch, *both)
        places.append(steps.unsqueeze(steps("Add", own, _rigid(steps, axis, lie, sizes)), 5))
    points = steps.reshape(
        steps("Concat", *places, axis=5), batch * parts, taps * sizes[0], sizes[1], 2
    )
    images = steps.reshape(x, batch * parts, columns // parts, *image)
    found = steps("apq.Sample", images, points)
    if mask:
        factor = steps.reshape(mask, batch * parts, 1, taps * sizes[0], sizes[1])
        found = steps("Mul", found, factor)
    found = steps.reshape(found, batch, columns * taps, *sizes)
    flat = steps.reshape(weight, made, inner * taps, 1, 1)
    given = (found, flat, bias) if bias else (found, flat)
    return steps.done(steps("Conv", *given, group=int(node.attrs.get("group", 1))))


def _fits(shape: Sequence[Dim], count: int, lie: Windows, sizes: Sequence[Dim]) -> bool:
    """Whether so many numbers are there, and are of the pixels that the convolution has."""
    known = ((out, size) for out, size in zip(lie.out, sizes, strict=True) if isinstance(out, int))
    if any(isinstance(size, int) and size != out for out, size in known):
        return False
    return shape[1] == count and same_shape(tuple(shape[2:]), tuple(sizes))


def _rigid(steps: Steps, axis: int, lie: Windows, sizes: tuple[Dim, ...]) -> str:
    """Where taps lie without offsets along an axis of the image: [taps, rows, columns], or 1s."""
    tap = np.indices(lie.kernel)[axis].reshape(-1) * lie.dilations[axis] - lie.begins[axis]
    first = steps("Mul", steps.range(sizes[axis]), steps.number(lie.strides[axis], "int64"))
    line = steps.reshape(first, *((sizes[0], 1) if axis == 0 else (1, sizes[1])))
    at = steps("Add", steps.constant(tap.astype(np.int64).reshape(-1, 1, 1)), line)
    return steps("Cast", at, to=1)

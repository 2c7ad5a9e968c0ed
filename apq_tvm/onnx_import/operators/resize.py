"""Resize that TVM's importer computes otherwise: cubic, antialiased, by scales that do not divide.

TVM takes the ratio of the sizes for the scale; ONNX takes the scale as it was given. With sizes
that are numbers each axis is a product with a matrix of interpolation weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.operators.steps import Steps
from apq_tvm.onnx_import.symbolic.dims import product
from apq_tvm.onnx_import.symbolic.infer import infer
from apq_tvm.onnx_import.symbolic.resize import resized
from apq_tvm.types import Array, Node

LARGEST = 1 << 24
"""Weights of one axis, and the places they are computed from."""


def resize(graph: Graph, node: Node) -> list[Node] | None:
    """Resize by matrices; None where TVM's own is right, or sizes are not known before run time.

    Raises
    ------
    UnsupportedModel
        A matrix would be larger than a file may ask for.
    """
    attrs = node.attrs
    infer(graph, node)
    source, target = graph.known_shape(node.inputs[0]), graph.known_shape(node.outputs[0])
    scales, mode = _scales(graph, node), attrs.get("mode", "nearest")
    coordinates = attrs.get("coordinate_transformation_mode", "half_pixel")
    if source is None or target is None or scales is None or mode == "nearest":
        return None
    axes = [i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
    sizes = [(source[i], target[i]) for i in axes]
    numbers = [(a, b) for a, b in sizes if isinstance(a, int) and isinstance(b, int)]
    odd = any(abs(a * scales[i] - b) > 1e-3 for i, (a, b) in zip(axes, numbers, strict=False))
    special = mode == "cubic" or attrs.get("antialias", 0) or attrs.get("exclude_outside", 0)
    if len(numbers) < len(sizes) or not (odd or special) or coordinates == "tf_crop_and_resize":
        return None
    steps, x, shape = Steps(graph, node), node.inputs[0], list(source)
    for axis, (before, after) in zip(axes, numbers, strict=True):
        try:
            matrix = interpolation(before, after, scales[axis], attrs)
        except ValueError as error:
            raise steps.refuse(str(error)) from None
        shape[axis] = after
        x = _along(steps, x, axis, matrix)
    return steps.done(x)


def _scales(graph: Graph, node: Node) -> list[float] | None:
    """The scale of every axis, as given or as the policy makes it; None if a run makes one."""
    source, found = graph.shape(node.inputs[0]), resized(graph, node)
    if source is None or found is None:
        return None
    scales = [1.0] * len(source)
    for axis, _, scale in found:
        scales[axis] = scale
    return scales if all(scales) else None


def interpolation(before: int, after: int, scale: float, attrs: Any) -> Array:
    """Weights [before, after] of one axis (ONNX Resize, modes linear and cubic).

    Parameters
    ----------
    before, after : int
        Extents.
    scale : float
    attrs : mapping
        The node's.

    Raises
    ------
    ValueError
        More than `LARGEST` weights.
    """
    narrow = min(scale, 1.0) if attrs.get("antialias", 0) else 1.0
    cubic = attrs.get("mode") == "cubic"
    reach = int(np.ceil((2 if cubic else 1) / narrow)) + 1
    if after * max(before, 2 * reach + 1) > LARGEST:
        raise ValueError(
            f"an axis of {before} resized to {after} by {scale:g} takes a matrix of more than "
            f"{LARGEST} weights"
        )
    positions = _positions(
        before, after, scale, attrs.get("coordinate_transformation_mode", "half_pixel")
    )
    first = np.floor(positions).astype(np.int64)[:, None]
    taps = first + np.arange(-reach, reach + 1)[None, :]
    distance = np.abs(taps - positions[:, None]) * narrow
    if cubic:
        weights = _cubic(distance, float(attrs.get("cubic_coeff_a", -0.75)))
    else:
        weights = np.clip(1 - distance, 0, None)
    if attrs.get("exclude_outside", 0):
        weights = np.where((taps >= 0) & (taps < before), weights, 0)
    weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((before, after))
    columns = np.broadcast_to(np.arange(after)[:, None], taps.shape)
    np.add.at(matrix, (np.clip(taps, 0, before - 1), columns), weights)
    return matrix


def _positions(before: int, after: int, scale: float, mode: str) -> Array:
    """Where the entries of the result lie in the source."""
    x, width = np.arange(after, dtype=np.float64), scale * before
    if mode == "align_corners":
        return np.zeros(after) if width == 1 else x * (before - 1) / (width - 1)
    if mode == "asymmetric":
        return x / scale
    if mode == "pytorch_half_pixel" and width == 1:
        return np.full(after, -0.5)
    shifted = (x + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        shifted = shifted + before / 2 * (1 - after / width)
    return shifted


def _cubic(x: Array, a: float) -> Array:
    """Keys' convolution kernel."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _along(steps: Steps, x: str, axis: int, matrix: Array) -> str:
    """`x` times a matrix along one axis; the matrix stays float in every scheme."""
    shape: Sequence[Any] = steps.shape(x)
    rank = len(shape)
    order = [*(i for i in range(rank) if i != axis), axis]
    lead = [shape[i] for i in order[:-1]]
    moved = steps.transpose(x, *order) if order != list(range(rank)) else x
    rows = steps.reshape(moved, product(lead), matrix.shape[0])
    name = f"{steps.node.name}.axis{axis}"
    weight = steps.graph.add_weight(name, matrix.astype(str(steps.graph.dtype(x))))
    plain = {"perm_a": (0, 1), "perm_b": (0, 1), "perm_out": (0, 1)}
    y = steps.reshape(steps("apq.MatMul", rows, weight, **plain), *lead, matrix.shape[1])
    back = [order.index(i) for i in range(rank)]
    return steps.transpose(y, *back) if order != list(range(rank)) else y

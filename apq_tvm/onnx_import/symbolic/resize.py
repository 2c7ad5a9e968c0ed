"""Resize (ONNX opset 11 to 19) and Upsample as ``apq.ResizeAxes``: sizes and scales."""

from __future__ import annotations

from collections.abc import Sequence

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import.graph import Graph
from apq_tvm.onnx_import.symbolic import ratios
from apq_tvm.onnx_import.symbolic.carry import Rewritten, carried
from apq_tvm.onnx_import.symbolic.dims import Dim
from apq_tvm.onnx_import.symbolic.ratios import Number, Ratio
from apq_tvm.onnx_import.symbolic.values import contents
from apq_tvm.types import Node

MODES = ("nearest", "linear", "cubic")
COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_crop_and_resize", "tf_half_pixel_for_nn"),
)
CROP = "tf_crop_and_resize"


def rewrite_resize(graph: Graph, node: Node) -> Rewritten:
    """``apq.ResizeAxes`` in place of Resize or Upsample; None while its sizes are not known.

    Raises
    ------
    ImportFailed
        Scales and sizes do not fit the input.
    UnsupportedModel
        A mode nobody knows, or a scale that only a run knows and that gives no whole size.
    """
    x, found = graph.known_shape(node.inputs[0]), resized(graph, node)
    if x is None or found is None:
        return None
    attrs = resize_attributes(node)
    count = len(found)
    roi = _roi(graph, node, count) if attrs["coordinates"] == CROP else [(0.0, 1.0)] * count
    shape = list(x)
    kept = []
    for (axis, size, scale), span in zip(found, roi, strict=True):
        shape[axis] = size
        if not (size == x[axis] and scale == 1 and span == (0.0, 1.0)):
            kept.append((axis, scale, span))
    if not kept:
        return node.inputs[0]
    return carried(
        "apq.ResizeAxes",
        node,
        shape,
        axes=tuple(axis for axis, _, _ in kept),
        scales=tuple(scale for _, scale, _ in kept),
        roi=tuple(edge for _, _, span in kept for edge in span),
        **attrs,
    )


def resized(graph: Graph, node: Node) -> list[tuple[int, Dim, float]] | None:
    """Axis, size and scale of every axis that a Resize or Upsample names; None if not known yet.

    A scale that only a run knows is 0. Raises as `rewrite_resize`.
    """
    x = graph.known_shape(node.inputs[0])
    at = (1, None) if node.op == "Upsample" else (2, 3)
    scales, sizes = (_given(graph, node, position) for position in at)
    if x is None or (scales is None and sizes is None):
        return None
    axes = [int(a) % len(x) for a in node.attrs.get("axes", ())] or list(range(len(x)))
    given = scales or sizes or []
    if len(given) != len(axes):
        raise ImportFailed(
            f"{node.op} {node.name!r}: {len(given)} scales or sizes for {len(axes)} axes"
        )
    extents = [x[a] for a in axes]
    if scales:
        pairs = [_by_scale(node, extent, s) for extent, s in zip(extents, scales, strict=True)]
    else:
        pairs = _by_sizes(node, extents, [int_or_dim(node, size) for size in given])
    return [(axis, *pair) for axis, pair in zip(axes, pairs, strict=True)]


def resize_attributes(node: Node) -> dict[str, object]:
    """Attributes of ``apq.ResizeAxes`` that say how, not how far.

    Raises
    ------
    UnsupportedModel
        A mode nobody knows.
    """
    attrs = node.attrs
    mode = attrs.get("mode", "nearest")
    coordinates = attrs.get("coordinate_transformation_mode", "half_pixel")
    if node.op == "Upsample":
        coordinates = "asymmetric"
    if mode not in MODES or coordinates not in COORDINATES:
        raise UnsupportedModel(
            f"{node.op} {node.name!r}: mode {mode!r} with coordinates {coordinates!r}; known are "
            f"{', '.join(MODES)} with {', '.join(COORDINATES)}"
        )
    nearest = attrs.get("nearest_mode", "round_prefer_floor")
    return {
        "mode": mode,
        "coordinates": coordinates,
        "rounding": "floor" if node.op == "Upsample" else nearest,
        "cubic_a": float(attrs.get("cubic_coeff_a", -0.75)),
        "exclude_outside": bool(attrs.get("exclude_outside", 0)),
        "extrapolation": float(attrs.get("extrapolation_value", 0.0)),
        "antialias": bool(attrs.get("antialias", 0)) and mode != "nearest",
    }


def _given(graph: Graph, node: Node, position: int | None) -> list[Number] | None:
    """Contents of an optional input that may be there and empty, which means absent."""
    if position is None or len(node.inputs) <= position or not node.inputs[position]:
        return None
    found = contents(graph, node.inputs[position])
    if found is None or any(entry is None for entry in found.ravel()):
        return None
    return list(found.ravel()) or None


def int_or_dim(node: Node, size: Number) -> Dim:
    """A size as the integer it must be."""
    if isinstance(size, Ratio):
        raise ImportFailed(f"{node.op} {node.name!r}: a size is no whole number")
    return size


def _by_scale(node: Node, extent: Dim, scale: Number) -> tuple[Dim, float]:
    """Output size and scale where a scale is given."""
    num, den = ratios.pair(scale)
    exact = ratios.mul(extent, scale)
    if exact is None:
        raise ImportFailed(f"{node.op} {node.name!r}: a scale is not positive")
    size = ratios.floor(exact)
    if isinstance(num, int) and isinstance(den, int):
        if num <= 0:
            raise ImportFailed(f"{node.op} {node.name!r}: the scale {num / den:g} is not positive")
        return size, num / den
    if isinstance(exact, Ratio):
        raise UnsupportedModel(
            f"{node.op} {node.name!r}: its scale ({num}) / ({den}) depends on the input and does "
            f"not make {extent} a whole number; export it with sizes"
        )
    return size, _ratio(size, extent)


def _ratio(size: Dim, extent: Dim) -> float:
    """The scale between two sizes, 0.0 if only a run knows it."""
    found = ratios.quotient(size, extent)
    num, den = (0, 1) if found is None else ratios.pair(found)
    return num / den if isinstance(num, int) and isinstance(den, int) else 0.0


def _by_sizes(node: Node, extents: Sequence[Dim], sizes: Sequence[Dim]) -> list[tuple[Dim, float]]:
    """Sizes and scales; ``keep_aspect_ratio_policy`` is one scale for all, and sizes by it."""
    policy = node.attrs.get("keep_aspect_ratio_policy", "stretch")
    pairs = list(zip(sizes, extents, strict=True))
    if policy == "stretch":
        return [(size, _ratio(size, extent)) for size, extent in pairs]
    if not all(isinstance(d, int) and d > 0 for d in (*extents, *sizes)):
        raise UnsupportedModel(
            f"Resize {node.name!r}: keep_aspect_ratio_policy {policy!r} of sizes that only a run "
            "knows, or of 0; fix the dimensions with --dim"
        )
    pick = min if policy == "not_larger" else max
    scale = pick(size / extent for size, extent in pairs)  # type: ignore[operator]
    return [(int(extent * scale + 0.5), scale) for extent in extents]  # type: ignore[operator]


def _roi(graph: Graph, node: Node, count: int) -> list[tuple[float, float]]:
    roi = graph.weights.get(node.inputs[1]) if len(node.inputs) > 1 else None
    if roi is None or roi.size != 2 * count:
        raise UnsupportedModel(
            f"Resize {node.name!r}: {CROP} needs a constant roi of {2 * count} numbers"
        )
    edges = [float(v) for v in roi.reshape(-1)]
    return list(zip(edges[:count], edges[count:], strict=True))

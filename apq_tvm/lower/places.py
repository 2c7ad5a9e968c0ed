"""MaxPool with indices, Col2Im, TensorScatter, RoiAlign."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from tvm import relax, tirx

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.arithmetic import elementwise
from apq_tvm.lower.nodes import Shapes, call
from apq_tvm.lower.relax_import import Convert
from apq_tvm.onnx_import.symbolic.geometry import windows
from apq_tvm.ops.graph.scatter import tensor_scatter
from apq_tvm.ops.images.places import col2im, max_pool_indices
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.types import ImportedModel, Node


def max_pool_converter(model: ImportedModel) -> Convert:
    """``apq.MaxPoolIndices``: MaxPool with both outputs."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        shapes, (x,) = Shapes(node), inputs
        data = shapes.of(x)
        spec = model.value_specs.get(node.outputs[0]) or model.value_specs.get(node.outputs[1])
        spatial, out = data[2:], () if spec is None else spec.shape[2:]
        numbers = [d for d in (*spatial, *out) if isinstance(d, int)]
        if len(numbers) != 2 * len(spatial):
            raise UnsupportedModel(
                f"MaxPool {node.name!r}: with indices its spatial sizes must be numbers, not "
                f"{list(spatial)}; export the model with fixed sizes"
            )
        lie = windows(node, numbers[: len(spatial)], node.attrs["kernel_shape"])
        geometry = Geometry.of(lie.attrs)
        columns = bool(node.attrs.get("storage_order", 0))
        dtype = str(x.ty.dtype)
        func = max_pool_indices(data, out, geometry, dtype, columns_first=columns)
        return call(bb, func, [x], shapes)

    return convert


def col2im_converter(model: ImportedModel) -> Convert:
    """``Col2Im`` of constant sizes."""

    def convert(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
        shapes, x = Shapes(node), inputs[0]
        image, kernel = (tuple(map(int, model.weights[v].reshape(-1))) for v in node.inputs[1:3])
        rank = len(kernel)
        strides = tuple(node.attrs.get("strides", (1,) * rank))
        dilations = tuple(node.attrs.get("dilations", (1,) * rank))
        pads = tuple(node.attrs.get("pads", (0,) * (2 * rank)))
        blocks = [
            (size + p + q - d * (k - 1) - 1) // s + 1
            for size, p, q, d, k, s in zip(
                image, pads[:rank], pads[rank:], dilations, kernel, strides, strict=True
            )
        ]
        data = shapes.of(x)
        if data[1:] and isinstance(data[2], int) and data[2] != prod(blocks):
            raise UnsupportedModel(
                f"Col2Im {node.name!r}: {data[2]} columns, but its image has {prod(blocks)} windows"
            )
        geometry = Geometry(kernel, strides, dilations, pads[:rank], pads[rank:])
        func = col2im(data, image, blocks, geometry, str(x.ty.dtype))
        return call(bb, func, [x], shapes)

    return convert


def convert_tensor_scatter(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``TensorScatter`` (ONNX opset 24)."""
    shapes = Shapes(node)
    args = [value for value in inputs if value is not None]
    cache, update = (shapes.of(value) for value in args[:2])
    func = tensor_scatter(
        cache,
        update,
        int(node.attrs.get("axis", -2)) % len(cache),
        str(args[0].ty.dtype),
        circular=node.attrs.get("mode", "linear") == "circular",
        starts=len(args) > 2,
    )
    return call(bb, func.with_attr("apq.layer", node.name), args, shapes)


def convert_roi_align(
    bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any], *, opset: int
) -> Any:
    """``RoiAlign``: TVM's, with the scale before the shift of half a pixel, and real images.

    Raises
    ------
    UnsupportedModel
        Mode ``max``, for which ONNX and TVM take the largest of different things.
    """
    x, rois, images = inputs
    default = "half_pixel" if opset >= 16 else "output_half_pixel"
    half = node.attrs.get("coordinate_transformation_mode", default) == "half_pixel"
    if node.attrs.get("mode", "avg") != "avg":
        raise UnsupportedModel(f"RoiAlign {node.name!r}: mode 'max' cannot be compiled, only 'avg'")
    dtype, scale = str(rois.ty.dtype), float(node.attrs.get("spatial_scale", 1.0))
    scaled = relax.op.multiply(rois, relax.const(scale, dtype))
    if half:
        scaled = relax.op.subtract(scaled, relax.const(0.5, dtype))
    last = x.ty.shape[0] - 1
    kept = elementwise(bb, lambda v: _clamped(v, last).astype(dtype), images)
    table = relax.op.concat([relax.op.expand_dims(kept, axis=1), bb.normalize(scaled)], axis=1)
    return relax.op.vision.roi_align(
        x,
        bb.normalize(table),
        pooled_size=tuple(int(node.attrs.get(k, 1)) for k in ("output_height", "output_width")),
        spatial_scale=1.0,
        sample_ratio=int(node.attrs.get("sampling_ratio", 0)),
        aligned=half,
        layout="NCHW",
        mode="avg",
    )


def _clamped(index: Any, last: Any) -> Any:
    number = index.astype("int64")
    return tirx.max(tirx.min(number, last), tirx.const(0, "int64"))


def place_converters(model: ImportedModel) -> dict[str, Convert]:
    """Converters by operator name."""
    return {
        "Col2Im": col2im_converter(model),
        "RoiAlign": partial(convert_roi_align, opset=model.opset),
        "TensorScatter": convert_tensor_scatter,
        "apq.MaxPoolIndices": max_pool_converter(model),
    }

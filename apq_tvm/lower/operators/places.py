"""MaxPool with indices, Col2Im, TensorScatter, RoiAlign, GridSample and its kin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from tvm import relax, te, tirx

from apq_tvm.errors import UnsupportedModel
from apq_tvm.lower.fusion import ALONE
from apq_tvm.lower.operators.nodes import Shapes, call
from apq_tvm.lower.relax_import import Convert
from apq_tvm.onnx_import.conv.pools import LEAST_CHANNELS
from apq_tvm.onnx_import.symbolic.geometry import windows
from apq_tvm.ops.graph.scatter import tensor_scatter
from apq_tvm.ops.images.places import col2im, max_pool_indices
from apq_tvm.ops.images.sample import corners, sampled
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

    def kept_inside(numbers: Any, of: Any) -> Any:
        last = of.shape[0] - 1
        return te.compute(numbers.shape, lambda *i: _clamped(numbers(*i), last).astype(dtype))

    kept = bb.emit_te(kept_inside, images, x, primfunc_name_hint="images")
    table = relax.op.concat([relax.op.expand_dims(kept, axis=1), bb.normalize(scaled)], axis=1)
    # By vectors of channels, which have the same four places and weights.
    last_channels = bb.emit(relax.op.permute_dims(x, (0, 2, 3, 1)))
    aligned = relax.op.vision.roi_align(
        last_channels,
        bb.normalize(table),
        pooled_size=tuple(int(node.attrs.get(k, 1)) for k in ("output_height", "output_width")),
        spatial_scale=1.0,
        sample_ratio=int(node.attrs.get("sampling_ratio", 0)),
        aligned=half,
        layout="NHWC",
        mode="avg",
    )
    return relax.op.permute_dims(bb.emit(aligned), (0, 3, 1, 2))


def convert_grid_sample(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``GridSample``: linear by vectors of channels, where they fill some; as TVM has it otherwise.

    Raises
    ------
    UnsupportedModel
        Cubic samples of volumes.
    """
    x, grid = inputs
    rank, attrs = len(x.ty.shape), node.attrs
    mode, padding = str(attrs.get("mode", "linear")), str(attrs.get("padding_mode", "zeros"))
    method = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    align = bool(attrs.get("align_corners", 0))
    if rank == 5 and method == "bicubic":
        raise UnsupportedModel(f"GridSample {node.name!r}: cubic samples of volumes are not done")
    channels = x.ty.shape[1]
    vectors = isinstance(channels, tirx.IntImm) and int(channels) >= LEAST_CHANNELS
    vectors = vectors and str(x.ty.dtype) == "float32"
    if rank != 4 or method != "bilinear" or padding == "reflection" or not vectors:
        places = bb.emit(relax.op.permute_dims(grid, (0, rank - 1, *range(1, rank - 1))))
        layout = "NCHW" if rank == 4 else "NCDHW"
        return relax.op.image.grid_sample(x, places, method, layout, padding, align)
    return _sampled(bb, x, grid, border=padding == "border", align=align)


def convert_sample(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Sample``: at places in pixels."""
    return _sampled(bb, *inputs, pixels=True)


def _sampled(bb: relax.BlockBuilder, x: Any, grid: Any, **how: bool) -> Any:
    """An image [N, C, H, W] at the points of a grid, linear between its pixels."""
    pixels = bb.emit(relax.op.permute_dims(x, (0, 2, 3, 1)))
    find = partial(corners, **how)
    around = bb.emit_te(find, grid, pixels, primfunc_name_hint="corners", primfunc_attrs=ALONE)
    found = [bb.emit(relax.TupleGetItem(around, i)) for i in range(2)]
    samples = bb.emit_te(
        sampled, pixels, *found, primfunc_name_hint="sampled", primfunc_attrs=ALONE
    )
    return relax.op.permute_dims(samples, (0, 3, 1, 2))


def _clamped(index: Any, last: Any) -> Any:
    number = index.astype("int64")
    return tirx.max(tirx.min(number, last), tirx.const(0, "int64"))


def place_converters(model: ImportedModel) -> dict[str, Convert]:
    """Converters by operator name."""
    return {
        "Col2Im": col2im_converter(model),
        "GridSample": convert_grid_sample,
        "RoiAlign": partial(convert_roi_align, opset=model.opset),
        "TensorScatter": convert_tensor_scatter,
        "apq.MaxPoolIndices": max_pool_converter(model),
        "apq.Sample": convert_sample,
    }

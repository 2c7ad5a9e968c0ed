"""Padding, pooling, resizing and overlapping windows in torch; `tests` have them in numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from apq_tvm.errors import UnsupportedModel

Tensor = Any
Attrs = Any

CROP = "tf_crop_and_resize"


def _shaped(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector as numbers along one of `rank` axes."""
    return values.reshape([-1 if i == axis else 1 for i in range(rank)])


def _pad(attrs: Attrs, x: Tensor, value: Tensor = None) -> Tensor:
    """Axis by axis, by the positions that elements come from."""
    outside = torch.zeros((), dtype=x.dtype) if value is None else value.reshape(()).to(x.dtype)
    for axis, (before, wanted) in enumerate(zip(attrs["before"], attrs["shape"], strict=True)):
        size = x.shape[axis]
        if before == 0 and wanted == size:
            continue
        at, mode = torch.arange(wanted) - before, attrs["mode"]
        if mode == "constant":
            inside = _shaped((at >= 0) & (at < size), axis, x.ndim)
            if size == 0:
                x = outside.expand([*x.shape[:axis], wanted, *x.shape[axis + 1 :]])
                continue
            x = torch.where(inside, x.index_select(axis, at.clamp(0, size - 1)), outside)
            continue
        if mode == "wrap":
            at = at % size
        elif mode == "reflect":
            turned = at % max(2 * (size - 1), 1)
            at = torch.minimum(turned, 2 * (size - 1) - turned)
        x = x.index_select(axis, at.clamp(0, size - 1))
    return x


def _pool_first(attrs: Attrs, x: Tensor) -> Tensor:
    """Every tap of all windows at once: [N, C, *out] of each."""
    out, kind = attrs["shape"][2:], attrs["kind"]
    least = torch.finfo(x.dtype).min if x.is_floating_point() else torch.iinfo(x.dtype).min
    total: Tensor = None
    count: Tensor = 0
    for tap in itertools.product(*map(range, attrs["kernel"])):
        value, inside, counted = x, torch.ones(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
        for i, t in enumerate(tap):
            size, before = x.shape[2 + i], attrs["begins"][i]
            at = torch.arange(out[i]) * attrs["strides"][i] - before + t * attrs["dilations"][i]
            there = (at >= 0) & (at < size)
            padded = at < size + attrs["ends"][i] if attrs["padding"] else there
            inside = inside & _shaped(there, i, len(tap))
            counted = counted & _shaped(padded, i, len(tap))
            value = value.index_select(2 + i, at.clamp(0, size - 1))
        value = torch.where(inside, value, least if kind == "max" else 0)
        if kind == "max":
            total = value if total is None else torch.maximum(total, value)
            continue
        value = value.abs().pow(attrs["p"]) if kind == "lp" else value
        total = value if total is None else total + value
        count = count + counted.to(x.dtype)
    if kind == "lp":
        return total.pow(1.0 / attrs["p"])
    return total if kind == "max" else total / count.clamp(min=1)


def _fold(attrs: Attrs, z: Tensor, bias: Tensor = None) -> Tensor:
    """Windows [N, *positions, taps * C] added up where they overlap."""
    n, *sizes, channels = attrs["shape"]
    rank, positions = len(sizes), z.shape[1:-1]
    starts = [torch.arange(p) * s - b for p, s, b in
              zip(positions, attrs["strides"], attrs["begins"], strict=True)]  # fmt: skip
    total = z.new_zeros((n, math.prod(sizes), channels))
    for number, tap in enumerate(itertools.product(*map(range, attrs["kernel"]))):
        flat, inside = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        for i, t in enumerate(tap):
            at = starts[i] + t * attrs["dilations"][i]
            inside = inside & _shaped((at >= 0) & (at < sizes[i]), i, rank)
            flat = flat * sizes[i] + _shaped(at, i, rank)
        inside = inside.expand(positions).reshape(-1)
        part = z[..., number * channels : (number + 1) * channels].reshape(n, -1, channels)
        total = total.index_add(1, flat.reshape(-1)[inside], part[:, inside])
    total = total.reshape(n, *sizes, channels)
    return total if bias is None else total + bias


def _coordinates(attrs: Attrs, number: int, size: int, out: int) -> Tensor:
    """float32 [out]: where along an axis each result is taken from (ONNX Resize)."""
    kind, at = attrs["coordinates"], torch.arange(out, dtype=torch.float32)
    scale = torch.tensor(attrs["scales"][number] or out / size, dtype=torch.float32)
    if kind == "asymmetric":
        return at / scale
    if kind == "tf_half_pixel_for_nn":
        return (at + 0.5) / scale
    if kind == "align_corners":
        return at * ((size - 1) / max(out - 1, 1))
    if kind == CROP:
        start, stop = attrs["roi"][2 * number : 2 * number + 2]
        if out > 1:
            return start * (size - 1) + at * ((stop - start) * (size - 1) / (out - 1))
        return torch.full((out,), 0.5 * (start + stop) * (size - 1))
    if kind == "pytorch_half_pixel" and out == 1:
        return torch.zeros(1)
    plain = (at + 0.5) / scale - 0.5
    if kind == "half_pixel_symmetric":
        return plain + size / 2 * (1 - out / (scale * size))
    return plain


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda v: torch.ceil(v - 0.5),
    "round_prefer_ceil": lambda v: torch.floor(v + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def _cubic(attrs: Attrs, at: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    low, a = torch.floor(at), attrs["cubic_a"]
    share = at - low

    def near(d: Tensor) -> Tensor:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Tensor) -> Tensor:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    weights = [far(1 + share), near(share), near(1 - share), far(2 - share)]
    places = [low + offset for offset in (-1, 0, 1, 2)]
    if attrs["exclude_outside"]:
        weights = [
            torch.where((place >= 0) & (place <= size - 1), weight, 0.0)
            for place, weight in zip(places, weights, strict=True)
        ]
        total = sum(weights)
        weights = [weight / total for weight in weights]
    return list(zip(places, weights, strict=True))


def resized(attrs: Attrs, x: Tensor, axes: Sequence[int]) -> Tensor:
    """`x` resized along `axes`, one after the other, to the extents of ``shape``."""
    for number, axis in enumerate(axes):
        size, out = x.shape[axis], attrs["shape"][axis]
        at = _coordinates(attrs, number, size, out)
        if attrs["mode"] == "nearest":
            places = [(ROUNDED[attrs["rounding"]](at), torch.ones(()))]
        elif attrs["mode"] == "linear":
            inside = at.clamp(0, size - 1)
            low = torch.floor(inside)
            places = [(low, 1 - (inside - low)), (low + 1, inside - low)]
        else:
            places = _cubic(attrs, at, size)
        total: Tensor = 0
        for place, weight in places:
            part = x.index_select(axis, place.clamp(0, size - 1).to(torch.int64))
            if attrs["mode"] == "nearest":
                total = part
            else:
                total = total + part * _shaped(weight, axis, x.ndim)
        if attrs["coordinates"] == CROP:
            inside = _shaped((at >= 0) & (at <= size - 1), axis, x.ndim)
            total = torch.where(inside, total, attrs["extrapolation"])
        x = total.to(x.dtype)
    return x


def _resize_axes(attrs: Attrs, x: Tensor, scales: Tensor = None) -> Tensor:
    if scales is not None:
        attrs = {**attrs, "scales": scales[list(attrs["told"])].tolist()}
    if attrs["antialias"]:
        raise UnsupportedModel("Resize with antialias is not done; resize before the model")
    return resized(attrs, x, attrs["axes"])


def _resize(attrs: Attrs, x: Tensor) -> Tensor:
    return resized(attrs, x, range(1, x.ndim - 1))


def _conv(attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor = None) -> Tensor:
    """``Conv`` of a weight that is no constant, whose ``auto_pad`` the import has spelled out."""
    rank = x.ndim - 2
    pads = attrs.get("pads") or (0,) * (2 * rank)
    wide = [p for i in reversed(range(rank)) for p in (pads[i], pads[i + rank])]
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    return function(
        F.pad(x, wide),
        w,
        bias,
        stride=attrs.get("strides") or 1,
        dilation=attrs.get("dilations") or 1,
        groups=attrs.get("group", 1),
    )


def _sample(attrs: Attrs, x: Tensor, places: Tensor) -> Tensor:
    """Places in pixels as shares of the image, -1 to 1 from edge to edge."""
    sizes = torch.tensor([x.shape[3], x.shape[2]], dtype=x.dtype)
    return F.grid_sample(x, (2 * places + 1) / sizes - 1, align_corners=False)


IMAGE_OPS: dict[str, Callable[..., Tensor]] = {
    "Conv": _conv,
    "apq.Fold": _fold,
    "apq.Pad": _pad,
    "apq.PoolFirst": _pool_first,
    "apq.Resize": _resize,
    "apq.ResizeAxes": _resize_axes,
    "apq.Sample": _sample,
}
"""As `apq_tvm.quantizers.torch.ops.OPS`."""

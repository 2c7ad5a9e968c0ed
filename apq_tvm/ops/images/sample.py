"""Images read between their pixels, channels last (ONNX GridSample, opset 20)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.tensorize.exprs import Expr, f32


def corners(
    grid: Any, image: Any, border: bool = False, align: bool = False, pixels: bool = False
) -> list[Any]:
    """Of each point the pixels around it along both axes, and what they count.

    Parameters
    ----------
    grid : te.Tensor
        float32 [N, H, W, 2]: x and y, of which -1 and 1 are the ends of the image; in pixels from
        the middle of the first where they are `pixels`.
    image : te.Tensor
        [N, height, width, C], for its sizes.
    border : bool
        Whether points outside are those of the border, or count nothing.
    align : bool
        Whether ends are the middles of the outermost pixels.
    pixels : bool

    Returns
    -------
    list of te.Tensor
        int32 and float32 [N, H, W, 4]: low and high of y, then of x.
    """
    extents, sizes = list(grid.shape[:-1]), list(image.shape[1:3])

    def place(point: Sequence[Any], axis: int) -> Expr:
        size = sizes[axis].astype("float32")
        value = grid(*point, 1 - axis)
        if pixels:
            return value
        value = value + f32(1.0)
        value = (
            value * (size - f32(1.0)) * f32(0.5) if align else (value * size - f32(1.0)) * f32(0.5)
        )
        if border:
            value = tirx.max(tirx.min(value, size - f32(1.0)), f32(0.0))
        return value

    def each(value: Any) -> Any:
        """One of four values, by a number."""

        def chosen(*index: Any) -> Any:
            *point, number = index
            four = [value(point, axis, side) for axis in range(2) for side in range(2)]
            pairs = [tirx.Select(number % 2 < 1, *four[i : i + 2]) for i in (0, 2)]
            return tirx.Select(number < 2, *pairs)

        return te.compute([*extents, 4], chosen)

    def index(point: Sequence[Any], axis: int, side: int) -> Expr:
        at = tirx.floor(place(point, axis)) + f32(side)
        last = sizes[axis].astype("float32") - f32(1.0)
        # Compared before it is converted: what no integer holds has no value.
        inside = tirx.Select(at < last, at, last)
        return tirx.Select(inside > f32(0.0), inside, f32(0.0)).astype("int32")

    def weight(point: Sequence[Any], axis: int, side: int) -> Expr:
        value = place(point, axis)
        low = tirx.floor(value)
        part, at = value - low, low + f32(side)
        counts = tirx.And(at >= f32(0.0), at <= sizes[axis].astype("float32") - f32(1.0))
        return tirx.Select(counts, part if side else f32(1.0) - part, f32(0.0))

    return [each(index), each(weight)]


def sampled(x: Any, index: Any, weight: Any) -> Any:
    """The image [N, H, W, C] at the points that `corners` found."""

    pixels = x.shape[1] * x.shape[2]

    def value(n: Any, h: Any, w: Any, c: Any) -> Any:
        total: Any = f32(0.0)
        for row in range(2):
            for column in range(2):
                at = (n, h, w)
                pixel = x(n, index(*at, row), index(*at, 2 + column), c)
                pixel = tirx.if_then_else(pixels > 0, pixel, f32(0.0))  # an image may have none
                total = total + weight(*at, row) * weight(*at, 2 + column) * pixel
        return total

    return te.compute([*index.shape[:-1], x.shape[-1]], value, "sampled")

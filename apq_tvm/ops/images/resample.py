"""Images of other sizes, channels last: Resize, and sums of overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from tvm import te, tirx

from apq_tvm.ops.images.windows import Geometry
from apq_tvm.tensorize.exprs import Expr, f32, i64

COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class Resampling:
    """How ONNX Resize finds what an output position is made of.

    Parameters
    ----------
    mode : {"nearest", "linear"}
    coordinates : str
        One of `COORDINATES`.
    rounding : str
        One of `ROUNDINGS`, for nearest.
    scales : tuple of float
        Output size over input size, of every spatial axis.
    """

    mode: str
    coordinates: str
    rounding: str
    scales: tuple[float, ...]

    @property
    def repeats(self) -> bool:
        """Whether every position is only repeated, a whole number of times."""
        whole = all(s == int(s) and s >= 1 for s in self.scales)
        pair = (self.coordinates, self.rounding)
        # (o + 0.5) / s - 0.5 is never half between two positions that are not o // s.
        known = (
            pair == ("asymmetric", "floor")
            or pair == ("half_pixel", "round_prefer_floor")
            or pair == ("half_pixel", "round_prefer_ceil")
        )
        return self.mode == "nearest" and whole and known

    def source(self, axis: int, position: Expr, size: Expr, out: Expr) -> Expr:
        """float32: the position in the input."""
        at, scale = position.astype("float32"), f32(self.scales[axis])
        if self.coordinates == "align_corners":
            last = tirx.max(out - 1, i64(1)).astype("float32")
            return at * (size - 1).astype("float32") / last
        if self.coordinates == "asymmetric":
            return at / scale
        value = (at + f32(0.5)) / scale - f32(0.5)
        if self.coordinates == "pytorch_half_pixel":
            return tirx.Select(out > i64(1), value, f32(0.0))
        return value

    def nearest(self, value: Expr) -> Expr:
        """int64: the position that counts."""
        whole = {
            "round_prefer_floor": lambda: tirx.ceil(value - f32(0.5)),
            "round_prefer_ceil": lambda: tirx.floor(value + f32(0.5)),
            "floor": lambda: tirx.floor(value),
            "ceil": lambda: tirx.ceil(value),
        }[self.rounding]()
        return whole.astype("int64")


def resize(x: Any, out: Sequence[Expr], how: Resampling) -> Any:
    """ONNX Resize of [N, *sizes, C] to `out`, as a te tensor."""
    sizes = list(x.shape[1:-1])

    def clipped(i: int, at: Expr) -> Expr:
        return tirx.max(tirx.min(at, sizes[i] - 1), i64(0))

    def repeated(*index: Any) -> Any:
        places = [index[1 + i] // i64(int(s)) for i, s in enumerate(how.scales)]
        return x(index[0], *places, index[-1])

    def near(*index: Any) -> Any:
        places = []
        for i, size in enumerate(sizes):
            value = how.source(i, index[1 + i], size, out[1 + i])
            places.append(clipped(i, how.nearest(value)))
        return x(index[0], *places, index[-1])

    def mixed(*index: Any) -> Any:
        def along(i: int, places: tuple[Expr, ...]) -> Any:
            if i == len(sizes):
                return x(index[0], *places, index[-1])
            value = how.source(i, index[1 + i], sizes[i], out[1 + i])
            low = tirx.floor(value)
            part, first = value - low, low.astype("int64")
            a = along(i + 1, (*places, clipped(i, first)))
            b = along(i + 1, (*places, clipped(i, first + 1)))
            return a * (f32(1.0) - part) + b * part

        return along(0, ())

    rule = repeated if how.repeats else near if how.mode == "nearest" else mixed
    return te.compute(list(out), rule, "resize")


def fold(z: Any, bias: Any, out: Sequence[Expr], geometry: Geometry) -> Any:
    """Windows [N, *positions, taps * C] added up where they overlap: [N, *sizes, C].

    `geometry` is that of the windows in the result, as for `apq_tvm.ops.images.windows`; with the
    linear layer before it this is ONNX ConvTranspose.

    Parameters
    ----------
    z : te.Tensor
    bias : te.Tensor or None
        float32 [C].
    out : sequence of Expr
    geometry : Geometry
    """
    g, channels = geometry, out[-1]
    rows = [_Taps(*of) for of in zip(g.kernel, g.strides, g.dilations, strict=True)]

    def value(index: Sequence[Any], numbers: Sequence[Any]) -> Any:
        tap: Any = i64(0)
        inside = tirx.const(True, "bool")
        places = []
        for i, (row, number) in enumerate(zip(rows, numbers, strict=True)):
            reach = index[1 + i] + i64(g.begins[i])
            t, reaches = row.tap(reach, number)
            from_tap = reach - t * i64(row.dilation)
            at = from_tap // i64(row.stride)
            inside = tirx.And(inside, tirx.And(from_tap >= i64(0), at < z.shape[1 + i]))
            inside = tirx.And(inside, reaches)
            places.append(at)
            tap = tap * i64(row.kernel) + t
        read = z(index[0], *places, tap * channels + index[-1])
        return tirx.if_then_else(inside, read, f32(0.0))

    def summed(*index: Any) -> Any:
        return te.sum(value(index, axes), axis=axes) if axes else value(index, [i64(0)] * len(rows))

    axes = []
    if any(row.most > 1 for row in rows):
        axes = [te.reduce_axis((0, i64(row.most)), f"t{i}") for i, row in enumerate(rows)]
    total = te.compute(list(out), summed, "fold")
    if bias is None:
        return total
    return te.compute(total.shape, lambda *i: total(*i) + bias(i[-1]), "shifted")


@dataclass(frozen=True)
class _Taps:
    """Of a row of taps those that reach one position: `most` of them, `step` apart."""

    kernel: int
    stride: int
    dilation: int

    @property
    def step(self) -> int:
        """Of windows that lie `stride` apart one tap in so many reaches a position."""
        return self.stride // gcd(self.stride, self.dilation)

    @property
    def most(self) -> int:
        """Taps that reach a position."""
        return -(-self.kernel // self.step)

    def tap(self, reach: Expr, number: Any) -> tuple[Any, Expr]:
        """Tap `number` of those that get to `reach`, and whether it does."""
        common = gcd(self.stride, self.dilation)
        inverse = pow(self.dilation // common, -1, self.step)
        first = reach // i64(common) % i64(self.step) * i64(inverse) % i64(self.step)
        tap = first + number * i64(self.step)
        reaches = reach % i64(common) == i64(0)
        if self.kernel % self.step:
            reaches = tirx.And(reaches, tap < i64(self.kernel))
        return tap, reaches

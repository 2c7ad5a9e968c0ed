"""Images of other sizes, channels last: Resize, and sums of overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    def value(index: Sequence[Any], taps: Sequence[Any], inside: Any) -> Any:
        tap: Any = i64(0)
        places = []
        for i, t in enumerate(taps):
            stride, size = i64(g.strides[i]), z.shape[1 + i]
            reach = index[1 + i] + i64(g.begins[i]) - t * i64(g.dilations[i])
            at = reach // stride
            inside = tirx.And(inside, tirx.And(reach >= i64(0), at < size))
            inside = tirx.And(inside, reach % stride == i64(0))
            places.append(at)
            tap = tap * i64(g.kernel[i]) + t
        read = z(index[0], *places, tap * channels + index[-1])
        return tirx.if_then_else(inside, read, f32(0.0))

    def shifted(total: Any) -> Any:
        if bias is None:
            return total
        return te.compute(total.shape, lambda *i: total(*i) + bias(i[-1]), "shifted")

    apart = all(k <= s and d == 1 for k, s, d in zip(g.kernel, g.strides, g.dilations, strict=True))
    if apart:  # at most one window reaches a position

        def only(*index: Any) -> Any:
            taps, inside = [], tirx.const(True, "bool")
            for i, k in enumerate(g.kernel):
                t = (index[1 + i] + i64(g.begins[i])) % i64(g.strides[i])
                inside = tirx.And(inside, t < i64(k)) if k < g.strides[i] else inside
                taps.append(t)
            return value(index, taps, inside)

        return shifted(te.compute(list(out), only, "fold"))
    axes = [te.reduce_axis((0, i64(k)), f"t{i}") for i, k in enumerate(g.kernel)]
    inside = tirx.const(True, "bool")
    total = te.compute(list(out), lambda *i: te.sum(value(i, axes, inside), axis=axes), "fold")
    return shifted(total)

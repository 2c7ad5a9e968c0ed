"""Resize over images of any size (ONNX Resize, opset 19), one axis after the other.

Each output element is a sum of a few input elements; which, and by which weights, depends on its
position along that axis alone. Coordinates are float32, as in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

from tvm import te, tirx

F32 = "float32"


def resize(x: Any, shape: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """`x` sampled at the positions of `shape`.

    Parameters
    ----------
    x : te.Tensor
    shape : sequence
        Extents of the result.
    attrs : mapping
        Of ``apq.ResizeAxes`` (`apq_tvm.onnx_import`).

    Returns
    -------
    te.Tensor
        In the type of `x`. Every index is clipped to `x`.
    """
    result = x
    for number, axis in enumerate(attrs["axes"]):
        extents = [*result.shape]
        extents[axis] = shape[axis]
        axis_attrs = {
            **attrs,
            "scale": attrs["scales"][number],
            "roi": attrs["roi"][2 * number : 2 * number + 2],
        }
        result = _resize_axis(result, axis, extents, axis_attrs)
    return result


def _resize_axis(x: Any, axis: int, shape: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    given, wanted = x.shape[axis], shape[axis]
    times = _repeats(attrs)
    if times:
        return te.compute(
            shape,
            lambda *at: x(*at[:axis], tirx.min(at[axis] // times, given - 1), *at[axis + 1 :]),
            "repeat",
        )
    where = te.compute((wanted,), lambda i: _coordinate(i, given, wanted, attrs), "at")
    if attrs["mode"] == "nearest":
        index = te.compute(
            (wanted,), lambda i: _clip(_rounded(where(i), attrs["nearest"]), given), "index"
        )

        def nearest(*at: Any) -> Any:
            value = x(*at[:axis], index(at[axis]), *at[axis + 1 :])
            return _or_outside(value, where(at[axis]), given, attrs)

        return te.compute(shape, nearest, "nearest")
    taps = _taps(given, attrs)

    def element(*at: Any) -> Any:
        position = where(at[axis])
        total = None
        for index, weight in taps(position):
            value = x(*at[:axis], index, *at[axis + 1 :]).astype(F32) * weight
            total = value if total is None else total + value
        return _or_outside(_as_type(total, x.dtype), position, given, attrs)

    return te.compute(shape, element, attrs["mode"])


def _as_type(value: Any, dtype: str) -> Any:
    return value if dtype == F32 else value.astype(dtype)


def _repeats(attrs: Mapping[str, Any]) -> int:
    """n where nearest sampling repeats each element n times, else 0."""
    times = attrs["scale"]
    if attrs["mode"] != "nearest" or times < 1 or times != int(times):
        return 0
    if attrs["coordinates"] not in ("asymmetric", "half_pixel", "half_pixel_symmetric"):
        return 0
    shift = 0.0 if attrs["coordinates"] == "asymmetric" else 0.5
    rounded = {
        "round_prefer_floor": lambda c: ceil(c - 0.5),
        "round_prefer_ceil": lambda c: floor(c + 0.5),
        "floor": floor,
        "ceil": ceil,
    }[attrs["nearest"]]
    # The same for every input element, so that the first and the second tell about all.
    found = [rounded((i + shift) / times - shift) for i in range(2 * int(times))]
    plain = [i // int(times) for i in range(2 * int(times))]
    return int(times) if [max(i, 0) for i in found] == plain else 0


def _coordinate(i: Any, given: Any, wanted: Any, attrs: Mapping[str, Any]) -> Any:
    """Position in the input that output element `i` is taken from (ONNX Resize)."""
    kind, at = attrs["coordinates"], i.astype(F32)
    size, count = given.astype(F32), wanted.astype(F32)
    half = tirx.const(0.5, F32)
    scale = tirx.const(attrs["scale"], F32) if attrs["scale"] else count / size
    if kind == "asymmetric":
        return at / scale
    if kind == "tf_half_pixel_for_nn":
        return (at + half) / scale
    if kind in ("half_pixel", "half_pixel_symmetric"):
        plain = (at + half) / scale - half
        if kind == "half_pixel":
            return plain
        return plain + size / tirx.const(2.0, F32) * (tirx.const(1.0, F32) - count / (scale * size))
    zero = tirx.const(0.0, F32)
    if kind == "pytorch_half_pixel":
        return tirx.Select(wanted > 1, (at + half) / scale - half, zero)
    last, end = size - tirx.const(1.0, F32), tirx.max(count - tirx.const(1.0, F32), 1.0)
    if kind == "align_corners":
        return tirx.Select(wanted > 1, at * last / end, zero)
    start, stop = (tirx.const(edge, F32) for edge in attrs["roi"])
    inner = start * last + at * (stop - start) * last / end
    return tirx.Select(wanted > 1, inner, half * (start + stop) * last)


def _rounded(position: Any, how: str) -> Any:
    half = tirx.const(0.5, F32)
    if how == "round_prefer_floor":
        return tirx.ceil(position - half)
    if how == "round_prefer_ceil":
        return tirx.floor(position + half)
    return tirx.ceil(position) if how == "ceil" else tirx.floor(position)


def _clip(position: Any, extent: Any) -> Any:
    """A float as an index inside an axis; what is no number becomes 0."""
    last = (extent - 1).astype(F32)
    inside = tirx.max(tirx.min(position, last), tirx.const(0.0, F32)).astype("int64")
    return tirx.max(tirx.min(inside, extent - 1), 0)


def _or_outside(value: Any, position: Any, extent: Any, attrs: Mapping[str, Any]) -> Any:
    """The extrapolation value outside the image, where the mode has one."""
    if attrs["coordinates"] != "tf_crop_and_resize":
        return value
    last = (extent - 1).astype(F32)
    outside = tirx.any(position < tirx.const(0.0, F32), position > last)
    other = tirx.const(attrs["extrapolation"], str(value.ty))
    return tirx.if_then_else(outside, other, value)


def _taps(extent: Any, attrs: Mapping[str, Any]) -> Any:
    """Function of a position: the input elements it is made of, with their weights."""
    one = tirx.const(1.0, F32)
    if attrs["mode"] == "linear":

        def linear(position: Any) -> list[tuple[Any, Any]]:
            last = (extent - 1).astype(F32)
            inside = tirx.max(tirx.min(position, last), tirx.const(0.0, F32))
            low = tirx.floor(inside)
            share = inside - low
            return [(_clip(low, extent), one - share), (_clip(low + one, extent), share)]

        return linear

    def cubic(position: Any) -> list[tuple[Any, Any]]:
        low = tirx.floor(position)
        share = position - low
        places = [low + tirx.const(float(offset), F32) for offset in (-1, 0, 1, 2)]
        weights = _cubic_weights(share, attrs["cubic_a"])
        if attrs["exclude_outside"]:
            last = (extent - 1).astype(F32)
            zero = tirx.const(0.0, F32)
            weights = [
                tirx.Select(tirx.all(place >= zero, place <= last), weight, zero)
                for place, weight in zip(places, weights, strict=True)
            ]
            total = weights[0] + weights[1] + weights[2] + weights[3]
            weights = [weight / total for weight in weights]
        return [(_clip(p, extent), w) for p, w in zip(places, weights, strict=True)]

    return cubic


def _cubic_weights(share: Any, a: float) -> list[Any]:
    """Keys' kernel at distances 1 + s, s, 1 - s and 2 - s."""
    one = tirx.const(1.0, F32)

    def number(value: float) -> Any:
        return tirx.const(value, F32)

    def near(d: Any) -> Any:
        return (number(a + 2) * d - number(a + 3)) * d * d + one

    def far(d: Any) -> Any:
        return ((number(a) * d - number(5 * a)) * d + number(8 * a)) * d - number(4 * a)

    return [far(one + share), near(share), near(one - share), far(number(2.0) - share)]

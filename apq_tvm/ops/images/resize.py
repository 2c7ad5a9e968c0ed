"""Resize over images of any size (ONNX Resize, opset 19), one axis after the other.

Each output element is a sum of a few input elements; which, and by which weights, depends on its
position along that axis alone: that is a table, computed once for a run. Coordinates are float32,
as in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

from tvm import te, tirx

F32 = "float32"
CROP = "tf_crop_and_resize"


def is_repeat(attrs: Mapping[str, Any], number: int) -> bool:
    """Whether the resize of one axis only repeats its elements, and needs no `table`."""
    return bool(_repeats(attrs, number))


def repeated(x: Any, shape: Sequence[Any], attrs: Mapping[str, Any], number: int) -> Any:
    """`x` with every element of an axis repeated as often as its scale says.

    Parameters
    ----------
    x : te.Tensor
    shape : sequence
        Extents of the result.
    attrs : mapping
        Of ``apq.ResizeAxes`` (`apq_tvm.onnx_import`).
    number : int
        Which of its ``axes``.
    """
    axis, times = attrs["axes"][number], _repeats(attrs, number)

    def element(*at: Any) -> Any:
        index = tirx.min(at[axis] // times, x.shape[axis] - 1)
        return x(*at[:axis], index, *at[axis + 1 :])

    return te.compute(shape, element, "repeat")


def table(
    given: Any, wanted: Any, attrs: Mapping[str, Any], number: int, scale: Any = None
) -> tuple[Any, Any]:
    """Which elements of an axis each result is made of, and by which weights.

    Parameters
    ----------
    given, wanted : PrimExpr
        Extents of the axis before and after.
    attrs : mapping
    number : int
    scale : PrimExpr float32, optional
        Where only a run knows it.

    Returns
    -------
    te.Tensor int64 [taps, wanted]
        Inside the axis, whatever the coordinates.
    te.Tensor float32 [taps, wanted]
        Outside an image that is cropped all are 0, and one more row is 1.
    """
    last = (given - 1).astype(F32)

    def taps(i: Any) -> list[tuple[Any, Any]]:
        position = _coordinate(i, (given, wanted, scale), attrs, number)
        one, zero = tirx.const(1.0, F32), tirx.const(0.0, F32)
        if attrs["mode"] == "nearest":
            found = [(_rounded(position, attrs["rounding"]), one)]
        elif attrs["mode"] == "linear":
            found = _linear(position, last)
        else:
            found = _cubic(position, last, attrs)
        if attrs["coordinates"] != CROP:
            return found
        outside = tirx.any(position < zero, position > last)
        found = [(at, tirx.Select(outside, zero, weight)) for at, weight in found]
        return [*found, (zero, tirx.Select(outside, one, zero))]

    count = len(taps(tirx.const(0, "int64")))

    def row(k: Any, entries: Sequence[Any]) -> Any:
        value = entries[-1]
        for i in reversed(range(len(entries) - 1)):
            value = tirx.Select(k == i, entries[i], value)
        return value

    shape = (tirx.const(count, "int64"), wanted)
    index = te.compute(shape, lambda k, i: _clip(row(k, [at for at, _ in taps(i)]), given), "index")
    weight = te.compute(shape, lambda k, i: row(k, [weight for _, weight in taps(i)]), "weight")
    return index, weight


def gathered(x: Any, index: Any, weight: Any, axis: int, attrs: Mapping[str, Any]) -> Any:
    """Sums of the elements that a `table` names along one axis.

    Parameters
    ----------
    x : te.Tensor
    index, weight : te.Tensor [taps, wanted]
    axis : int
    attrs : mapping

    Returns
    -------
    te.Tensor
        In the type of `x`.
    """
    shape = [*x.shape]
    shape[axis] = index.shape[1]
    taps, crops = int(index.shape[0]), attrs["coordinates"] == CROP
    last = x.shape[axis] - 1

    def element(*at: Any) -> Any:
        i = at[axis]

        def value(k: int) -> Any:
            where = tirx.max(tirx.min(index(k, i), last), 0)
            return x(*at[:axis], where, *at[axis + 1 :])

        if attrs["mode"] == "nearest":
            if not crops:
                return value(0)
            other = tirx.const(attrs["extrapolation"], x.dtype)
            return tirx.Select(weight(1, i) > tirx.const(0.5, F32), other, value(0))
        total: Any = None
        for k in range(taps - crops):
            term = value(k).astype(F32) * weight(k, i)
            total = term if total is None else total + term
        if crops:
            total = total + weight(taps - 1, i) * tirx.const(attrs["extrapolation"], F32)
        return _as_type(total, x.dtype)

    return te.compute(shape, element, str(attrs["mode"]))


def _as_type(value: Any, dtype: str) -> Any:
    return value if dtype == F32 else value.astype(dtype)


def _repeats(attrs: Mapping[str, Any], number: int) -> int:
    """n where nearest sampling repeats each element n times, else 0."""
    times = attrs["scales"][number]
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
    }[attrs["rounding"]]
    # The same for every input element, so that the first and the second tell about all.
    found = [rounded((i + shift) / times - shift) for i in range(2 * int(times))]
    plain = [i // int(times) for i in range(2 * int(times))]
    return int(times) if [max(i, 0) for i in found] == plain else 0


def _coordinate(i: Any, extents: Sequence[Any], attrs: Mapping[str, Any], number: int) -> Any:
    """Position in the input that output element `i` is taken from (ONNX Resize)."""
    given, wanted, told = extents
    kind, at = attrs["coordinates"], i.astype(F32)
    size, count = given.astype(F32), wanted.astype(F32)
    half = tirx.const(0.5, F32)
    factor = attrs["scales"][number]
    scale = told
    if scale is None:
        scale = tirx.const(factor, F32) if factor else count / size
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
    one = tirx.const(1.0, F32)
    last, end = size - one, tirx.max(wanted - 1, 1).astype(F32)
    if told is not None:
        end = told * size - one  # ONNX's reference takes the length that is not rounded
    if kind == "align_corners":
        return tirx.Select(wanted > 1, at * (last / end), zero)
    start, stop = (tirx.const(edge, F32) for edge in attrs["roi"][2 * number : 2 * number + 2])
    inner = start * last + at * ((stop - start) * last / end)
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


def _linear(position: Any, last: Any) -> list[tuple[Any, Any]]:
    one = tirx.const(1.0, F32)
    inside = tirx.max(tirx.min(position, last), tirx.const(0.0, F32))
    low = tirx.floor(inside)
    return [(low, one - (inside - low)), (low + one, inside - low)]


def _cubic(position: Any, last: Any, attrs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    low, zero = tirx.floor(position), tirx.const(0.0, F32)
    places = [low + tirx.const(float(offset), F32) for offset in (-1, 0, 1, 2)]
    weights = _cubic_weights(position - low, attrs["cubic_a"])
    if attrs["exclude_outside"]:
        weights = [
            tirx.Select(tirx.all(place >= zero, place <= last), weight, zero)
            for place, weight in zip(places, weights, strict=True)
        ]
        total = weights[0] + weights[1] + weights[2] + weights[3]
        weights = [weight / total for weight in weights]
    return list(zip(places, weights, strict=True))


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

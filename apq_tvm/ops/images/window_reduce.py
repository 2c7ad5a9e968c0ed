"""Depthwise convolution and pooling, channels last: every channel for itself.

The PrimFuncs say what is meant; `apq_tvm.schedules.graph.window_reduce` writes their loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.ops import math
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.ops.images.windows import NAMES, Geometry
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i64

LOWEST = -3.4028234663852886e38


def depthwise(
    shape: Sequence[Dim], out: Sequence[Dim], geometry: Geometry, bias: bool, activation: str,
    inputs: int = 0,
) -> PrimFunc:  # fmt: skip
    """Convolution of every channel, or small group of channels, with a window of its own.

    Parameters
    ----------
    shape, out : sequence of int or str
        Of the image [N, *sizes, C] and the result [N, *positions, C]; strings are dynamic.
    geometry : Geometry
    bias : bool
    activation : str
        A key of `apq_tvm.ops.math.ACTIVATIONS`.
    inputs : int
        Channels of the image in a group; 0 where every channel makes one.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, w [taps, C], [bias [C]], y)``, float32, unscheduled, attr ``apq.op`` = "depthwise"; of
        groups w is [taps * inputs, outputs of all].
    """
    symbols = Symbols()
    x = te.placeholder(symbols.shape(shape), "float32", "x")
    w = te.placeholder(symbols.shape((geometry.taps * max(inputs, 1), out[-1])), "float32", "w")
    args = [x, w, *([te.placeholder(w.shape[1:], "float32", "bias")] if bias else [])]
    outputs = int(out[-1]) * inputs // int(shape[-1])

    def term(index: Sequence[Any], taps: Sequence[Any]) -> Any:
        tap: Any = i64(0)
        sizes = (*geometry.kernel, inputs) if inputs else geometry.kernel
        for t, k in zip(taps, sizes, strict=True):
            tap = tap * i64(k) + t
        if not inputs:
            return _padded(x, geometry, index, taps, f32(0.0)) * w(tap, index[-1])
        place = (*index[:-1], index[-1] // i64(outputs) * i64(inputs) + taps[-1])
        pixel = _padded(x, geometry, place, taps[:-1], f32(0.0))
        return pixel * w(tap, index[-1])

    total = _reduced(symbols.shape(out), geometry, term, te.sum, inputs)

    def result(*index: Any) -> Any:
        value = total(*index) + args[2](index[-1]) if bias else total(*index)
        return math.activation(activation, value)

    y = te.compute(total.shape, result, "y")
    attrs = {"apq.op": "depthwise", "apq.activation": activation, "apq.bias": bias}
    if inputs:
        attrs |= {"apq.inputs": inputs, "apq.work": 2 * geometry.taps * inputs}
    return _marked(te.create_prim_func([*args, y]), geometry, attrs)


def convolution(
    shape: Sequence[Dim], out: Sequence[Dim], geometry: Geometry, first: int, count: int,
    lanes: int, tail: Sequence[str],
) -> PrimFunc:  # fmt: skip
    """Convolution of float images where they lie, without their windows as rows.

    Parameters
    ----------
    shape, out : sequence of int or str
        Of the image [N, *sizes, C] and the result [N, *positions, channels]; strings are dynamic.
    geometry : Geometry
    first, count : int
        Channels of the image that are read.
    lanes : int
        Output channels that lie side by side in the weights (layout ``F32r{lanes}``).
    tail : sequence of str
        What follows, in order: "bias", "residual" and the name of an activation.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, w [blocks, taps * count, lanes], [bias], [residual like y], y)``, float32,
        unscheduled, attr ``apq.op`` = "convolution".
    """
    symbols, channels = Symbols(), int(out[-1])
    x = te.placeholder(symbols.shape(shape), "float32", "x")
    depth = geometry.taps * count
    w = te.placeholder(symbols.shape((-(-channels // lanes), depth, lanes)), "float32", "w")
    extents = symbols.shape(out)
    more = {
        name: te.placeholder(extents if name == "residual" else extents[-1:], "float32", name)
        for name in ("bias", "residual")
        if name in tail
    }
    axes = [te.reduce_axis((0, i64(k)), f"t{i}") for i, k in enumerate(geometry.kernel)]
    channel = te.reduce_axis((0, i64(count)), "c")

    def term(*index: Any) -> Any:
        tap: Any = i64(0)
        for t, k in zip(axes, geometry.kernel, strict=True):
            tap = tap * i64(k) + t
        n = index[-1]
        weight = w(n // i64(lanes), tap * i64(count) + channel, n % i64(lanes))
        at = (*index[:-1], channel + i64(first))
        return te.sum(_padded(x, geometry, at, axes, f32(0.0)) * weight, axis=[*axes, channel])

    total = te.compute(extents, term, "total")

    def result(*index: Any) -> Any:
        value = total(*index)
        for name in tail:
            if name in more:
                value = value + more[name](*(index if name == "residual" else index[-1:]))
            else:
                value = math.activation(name, value)
        return value

    y = te.compute(extents, result, "y")
    attrs = {"apq.op": "convolution", "apq.tail": ",".join(tail), "apq.channels": [first, count]}
    func = _marked(te.create_prim_func([x, w, *more.values(), y]), geometry, attrs)
    return func.with_attr("apq.work", 2 * depth)


def pool(
    shape: Sequence[Dim], out: Sequence[Dim], geometry: Geometry, kind: str, padding: bool
) -> PrimFunc:
    """The largest element of each window, or the mean.

    Parameters
    ----------
    shape, out : sequence of int or str
    geometry : Geometry
        Windows may reach past the padding behind (ONNX's ``ceil_mode``); nothing is there.
    kind : {"max", "average"}
    padding : bool
        Whether a mean counts the zeros of the padding.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, y)``, float32, unscheduled, attr ``apq.op`` = "pool".
    """
    symbols = Symbols()
    x = te.placeholder(symbols.shape(shape), "float32", "x")
    largest = kind == "max"
    outside = f32(LOWEST if largest else 0.0)

    def term(index: Sequence[Any], taps: Sequence[Any]) -> Any:
        return _padded(x, geometry, index, taps, outside)

    total = _reduced(symbols.shape(out), geometry, term, te.max if largest else te.sum)

    def mean(*index: Any) -> Any:
        count: Any = f32(1.0)
        for i, o in enumerate(index[1:-1]):
            low, high = tap_range(geometry, i, o, x.shape[1 + i], padding)
            count = count * (high - low).astype("float32")
        return total(*index) / count

    y = total if largest else te.compute(total.shape, mean, "y")
    attrs = {"apq.op": "pool", "apq.kind": kind, "apq.padding": padding}
    return _marked(te.create_prim_func([x, y]), geometry, attrs)


def tap_range(
    geometry: Geometry, axis: int, position: Expr, size: Expr, padding: bool = False
) -> tuple[Expr, Expr]:
    """First and last plus one of the taps that lie in the image, or in it and its padding."""
    stride, step = i64(geometry.strides[axis]), i64(geometry.dilations[axis])
    start = position * stride - geometry.begin(axis, size)
    if padding:
        size = size + geometry.end(axis, size)
        low: Expr = i64(0)
    else:
        low = tirx.max(i64(0), (step - 1 - start) // step)
    high = tirx.min(i64(geometry.kernel[axis]), (size - start + (step - 1)) // step)
    return low, tirx.max(high, low)


def _padded(x: Any, g: Geometry, index: Sequence[Any], taps: Sequence[Any], outside: Any) -> Any:
    """One element of the padded image."""
    inside: Any = tirx.const(True, "bool")
    where = []
    for i, t in enumerate(taps):
        size = x.shape[1 + i]
        start = index[1 + i] * i64(g.strides[i]) - g.begin(i, size)
        at = start + t * i64(g.dilations[i])
        inside = tirx.And(inside, tirx.And(at >= i64(0), at < size))
        where.append(at)
    return tirx.if_then_else(inside, x(index[0], *where, index[-1]), outside)


def _reduced(shape: Any, geometry: Geometry, term: Any, reduction: Any, inputs: int = 0) -> Any:
    axes = [te.reduce_axis((0, i64(k)), f"t{i}") for i, k in enumerate(geometry.kernel)]
    if inputs:
        axes.append(te.reduce_axis((0, i64(inputs)), "c"))
    return te.compute(shape, lambda *i: reduction(term(i, axes), axis=axes), "total")


def _marked(func: PrimFunc, geometry: Geometry, attrs: dict[str, Any]) -> PrimFunc:
    where = {f"apq.{name}": list(getattr(geometry, name)) for name in NAMES}
    work = {"apq.work": 2 * geometry.taps, "op_pattern": 8, "apq.auto": geometry.auto}
    return func.with_attrs({**where, **work, **attrs})

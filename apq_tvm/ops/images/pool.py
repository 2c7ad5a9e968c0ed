"""Pooling over images of any size, 1-d to 3-d (ONNX MaxPool, AveragePool and LpPool, opset 22)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te, tirx

Attrs = Mapping[str, Any]


def pool(
    x: Any, shape: Sequence[Any], before: Sequence[Any], after: Sequence[Any], attrs: Attrs
) -> Any:
    """The greatest, the mean or the p-norm of each window.

    Parameters
    ----------
    x : te.Tensor [N, C, ...]
    shape : sequence
        Extents of the result [N, C, ...].
    before, after : sequence
        Padding of each spatial axis, numbers or expressions. Windows may reach past it.
    attrs : mapping
        Of ``apq.PoolFirst`` (`apq_tvm.onnx_import`).

    Returns
    -------
    te.Tensor
        In the type of `x`.
    """
    kind, kernel = attrs["kind"], attrs["kernel"]
    strides, dilations = attrs["strides"], attrs["dilations"]
    window = [te.reduce_axis((0, size), f"r{i}") for i, size in enumerate(kernel)]
    least = tirx.min_value(x.dtype) if kind == "max" else tirx.const(0, x.dtype)

    def tap(n: Any, c: Any, *at: Any) -> Any:
        where, inside = [], []
        for i, (position, r) in enumerate(zip(at, window, strict=True)):
            index = position * strides[i] + r * dilations[i] - before[i]
            where.append(index)
            inside += _guards(index, i, x.shape[2 + i], shape[2 + i], before, after, attrs)
        value = x(n, c, *where)
        value = tirx.if_then_else(tirx.all(*inside), value, least) if inside else value
        return _powered(value, attrs["p"]) if kind == "lp" else value

    reduce = te.max if kind == "max" else te.sum
    whole = te.compute(shape, lambda *i: reduce(tap(*i), axis=window), "pool")
    if kind == "max":
        return whole
    if kind == "lp":
        root = tirx.const(1.0 / attrs["p"], x.dtype)
        return te.compute(shape, lambda *i: tirx.power(whole(*i), root), "root")

    def mean(n: Any, c: Any, *at: Any) -> Any:
        count: Any = 1
        for i, position in enumerate(at):
            count = count * _taps(position, i, x.shape[2 + i], before, after, attrs)
        if isinstance(count, int):
            return whole(n, c, *at) * tirx.const(1.0 / count, x.dtype)
        return whole(n, c, *at) / tirx.max(count, 1).astype(x.dtype)

    return te.compute(shape, mean, "mean")


def _powered(value: Any, p: int) -> Any:
    size = tirx.abs(value)
    if p in (1, 2):
        return size if p == 1 else value * value
    return tirx.power(size, tirx.const(float(p), str(value.ty)))


def _guards(
    index: Any,
    axis: int,
    extent: Any,
    count: Any,
    before: Sequence[Any],
    after: Sequence[Any],
    attrs: Attrs,
) -> list[Any]:
    """Conditions for an index to lie inside the image, without those that always hold."""
    guards = [] if _is_zero(before[axis]) else [index >= 0]
    if not _ends_inside(axis, extent, count, before, after, attrs):
        guards.append(index < extent)
    return guards


def _ends_inside(
    axis: int, extent: Any, count: Any, before: Sequence[Any], after: Sequence[Any], attrs: Attrs
) -> bool:
    """Whether no window reaches past the end of the image."""
    numbers = [n for n in (extent, count, before[axis]) if isinstance(n, int | tirx.IntImm)]
    if len(numbers) == 3:
        size, windows, first = (int(n) for n in numbers)
        reach = (attrs["kernel"][axis] - 1) * attrs["dilations"][axis] + 1
        return bool((windows - 1) * attrs["strides"][axis] - first + reach <= size)
    return _is_zero(after[axis]) and not attrs["ceil"]


def _is_zero(number: Any) -> bool:
    return isinstance(number, int | tirx.IntImm) and int(number) == 0


def _taps(
    position: Any, axis: int, extent: Any, before: Sequence[Any], after: Sequence[Any], attrs: Attrs
) -> Any:
    """How many elements of a window count: those of the image, or of the padded image."""
    kernel, apart = attrs["kernel"][axis], attrs["dilations"][axis]
    include, first, last = attrs["padding"], before[axis], after[axis]
    plain = _is_zero(first) and _is_zero(last)
    if (include or plain) and not attrs["ceil"]:
        return kernel
    start = position * attrs["strides"][axis] - first
    end = extent + last if include else extent
    highest = tirx.min(start + kernel * apart, end)
    if include:
        return tirx.floordiv(highest - start - 1, apart) + 1
    # Elements of a window before the image: as many as steps lead from its start to 0.
    missed = tirx.max(tirx.floordiv(apart - 1 - start, apart), 0)
    return tirx.floordiv(highest - start - 1, apart) + 1 - missed

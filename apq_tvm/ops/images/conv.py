"""Convolution over images of any size, 1-d to 3-d, grouped (ONNX Conv, opset 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx


def conv(
    x: Any,
    weight: Any,
    shape: Sequence[Any],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    group: int,
) -> Any:
    """Sums of products over windows.

    Parameters
    ----------
    x : te.Tensor [N, C, ...]
    weight : te.Tensor [O, C / group, ...]
    shape : sequence
        Extents of the result [N, O, ...].
    strides, dilations : sequence of int
    pads : sequence of int
        Zeros before each spatial axis, then behind each.
    group : int

    Returns
    -------
    te.Tensor
        In the type of `x`.
    """
    rank = len(strides)
    source = pad_spatial(x, pads, tirx.const(0, x.dtype)) if any(pads) else x
    channels = te.reduce_axis((0, weight.shape[1]), "rc")
    window = [te.reduce_axis((0, weight.shape[2 + i]), f"r{i}") for i in range(rank)]
    per_group = int(weight.shape[0]) // group

    def element(n: Any, o: Any, *at: Any) -> Any:
        channel = channels if group == 1 else o // per_group * weight.shape[1] + channels
        where = [
            i * step + r * apart
            for i, step, r, apart in zip(at, strides, window, dilations, strict=True)
        ]
        product = source(n, channel, *where) * weight(o, channels, *window)
        return te.sum(product, axis=[channels, *window])

    return te.compute(shape, element, "conv")


def pad_spatial(x: Any, pads: Sequence[int], value: Any) -> Any:
    """`x` with `value` around its axes from the third on."""
    rank = len(x.shape) - 2
    grown = [x.shape[2 + i] + (pads[i] + pads[i + rank]) for i in range(rank)]

    def element(n: Any, c: Any, *at: Any) -> Any:
        inside = []
        for i, position in enumerate(at):
            if pads[i]:
                inside.append(position >= pads[i])
            if pads[i + rank]:
                inside.append(position < x.shape[2 + i] + pads[i])
        where = [position - pads[i] for i, position in enumerate(at)]
        return tirx.if_then_else(tirx.all(*inside), x(n, c, *where), value)

    return te.compute((*x.shape[:2], *grown), element, "padded")

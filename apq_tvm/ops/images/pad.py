"""Padding along any axis, by any amount, which may be negative (ONNX Pad, opset 25)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx


def pad(x: Any, shape: Sequence[Any], before: Sequence[Any], mode: str, value: Any) -> Any:
    """`x` with elements put before and behind it.

    Parameters
    ----------
    x : te.Tensor
    shape : sequence
        Extents of the result.
    before : sequence
        Elements put before each axis: numbers or expressions, negative to cut off.
    mode : {"constant", "reflect", "edge", "wrap"}
    value : PrimExpr
        In the type of `x`; read by "constant" alone.

    Returns
    -------
    te.Tensor
        No index leaves `x`, whatever is asked for.
    """

    def moved(position: Any, axis: int) -> Any:
        amount = before[axis]
        return position if isinstance(amount, int) and amount == 0 else position - amount

    def unchanged(axis: int) -> bool:
        amount = before[axis]
        same = shape[axis] is x.shape[axis] or str(shape[axis]) == str(x.shape[axis])
        return isinstance(amount, int) and amount == 0 and same

    def element(*at: Any) -> Any:
        where, inside = [], []
        for axis, position in enumerate(at):
            index, extent = moved(position, axis), x.shape[axis]
            if unchanged(axis):
                where.append(position)
            elif mode == "constant":
                where.append(index)
                inside += [index >= 0, index < extent]
            else:
                where.append(_inside(index, extent, mode))
        if not inside:
            return x(*where)
        return tirx.if_then_else(tirx.all(*inside), x(*where), value)

    return te.compute(shape, element, "pad")


def _inside(index: Any, extent: Any, mode: str) -> Any:
    """The element of an axis that stands at `index`, which may be outside."""
    last = extent - 1
    if mode == "wrap":
        return tirx.floormod(index, extent)
    if mode == "reflect":
        # There and back takes 2 * last steps; an axis of one element is all there is.
        period = tirx.max(2 * last, 1)
        turned = tirx.floormod(index, period)
        index = tirx.min(turned, 2 * last - turned)
    return tirx.max(tirx.min(index, last), 0)

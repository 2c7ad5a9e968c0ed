"""Codes of one vector of a unit on Arm: put together of their fields by 8-bit shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from apq_tvm.tensorize.unit import Unit

Expr = Any  # tvm is untyped


def unpacked(unit: Unit, load: Callable[[int], Expr], vector: int, doubled: bool = False) -> Expr:
    """uint8 [16]: codes of one vector, or twice the codes.

    Parameters
    ----------
    unit : Unit
        Of 4 rows.
    load : callable
        16 bytes of the unit's codes by their number.
    vector : int
        0..7.
    doubled : bool
    """
    result: Expr = None
    for width, shift in unit.fields:
        byte = load(shift + vector % width)
        low = vector // width * width
        if unit.inverted and low + width == 8:
            byte = tirx.bitwise_xor(byte, repeated(0x80))
        to = shift + 1 if doubled else shift
        if low > to:
            byte = tirx.shift_right(byte, repeated(low - to))
        elif low < to:
            byte = tirx.shift_left(byte, repeated(to - low))
        byte = tirx.bitwise_and(byte, repeated(((1 << width) - 1) << to))
        result = byte if result is None else tirx.bitwise_or(result, byte)
    return result


def repeated(value: int) -> Expr:
    """uint8 [16] of one value."""
    return tirx.Broadcast(tirx.const(value, "uint8"), 16)

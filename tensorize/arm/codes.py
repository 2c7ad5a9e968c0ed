"""Codes of one vector of a unit on Arm: put together of their fields by 8-bit shifts."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from apq_tvm.tensorize.arm.lookup import inserted_left
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.whole_codes import pieces


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
    if unit.whole:
        return _unpacked_whole(unit, load, vector)
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


def _unpacked_whole(unit: Unit, load: Callable[[int], Expr], vector: int) -> Expr:
    """Pieces are inserted above those below, with whatever lies above them until the last mask."""
    result: Expr = None
    for byte, place, width, shift in pieces(unit.bits, vector):
        code = load(byte)
        if unit.inverted and place + width == 8:
            code = tirx.bitwise_xor(code, repeated(0x80))
        if place:
            code = tirx.shift_right(code, repeated(place))
        result = code if result is None else inserted_left(result, code, shift)
        clean = place + width == 8 and shift == 0
    return result if clean else tirx.bitwise_and(result, repeated((1 << unit.bits) - 1))


def repeated(value: int) -> Expr:
    """uint8 [16] of one value."""
    return tirx.Broadcast(tirx.const(value, "uint8"), 16)

"""One unit of interleaved packed codes, as every integer dot intrinsic reads it: R rows x 32 k.

`apq_tvm.codegen.layouts.interleaved` draws the bytes. Here is their meaning in TensorIR, shared by
the operators and by the plain-loop side of the intrinsics of all instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.meaning import whole_codes

UNIT_K = 32
"""k of one unit."""

VECTORS = 8
"""Vectors of a unit: R rows x 4 k each."""


HALF = 32
"""Bytes of 4 rows x 8 k."""


@dataclass(frozen=True)
class Unit:
    """Shape of a unit.

    Parameters
    ----------
    bits : int
        Of one code, 1..8.
    rows : int
        R, rows interleaved; a vector has 4R bytes.
    fields : tuple of (int, int)
        (width, shift) in bits of the parts a code is stored in; the part's bytes start at
        ``4 * R * shift``.
    groups : int
        Sums wanted along the unit's k: 1, or 2 where groups have 16 codes.
    inverted : bool
        True if the top bit of every byte is stored inverted.
    whole : bool
        True if codes lie as `apq_tvm.tensorize.meaning.whole_codes` says; there are no fields then.
    run : int
        Consecutive k of a row, 4 or 8.
    half : bool
        True if it is 4 rows of a unit of 8, in runs of 8: every 32 bytes are followed by 32 of the
        other rows.
    """

    bits: int
    rows: int
    fields: tuple[tuple[int, int], ...]
    groups: int = 1
    inverted: bool = False
    whole: bool = False
    run: int = 4
    half: bool = False

    def __str__(self) -> str:
        marks = {"_t": self.whole, "_s": self.inverted, "_x2": self.groups > 1, "_half": self.half}
        kind = "".join(mark for mark, holds in marks.items() if holds)
        return f"W{self.bits}r{self.rows}k{self.run}{kind}"

    def at(self, byte: Any) -> Any:
        """Where a byte of the unit lies."""
        return byte // HALF * (2 * HALF) + byte % HALF if self.half else byte

    def place(self, row: Any, four: Any, k: Any) -> tuple[Any, Any]:
        """(vector, byte lane) of a code.

        Parameters
        ----------
        row, four, k : PrimExpr
            0..R-1, and where along k: the code's four, 0..7, and its place in that, 0..3.
        """
        if self.run == 4:
            return four, row * 4 + k
        half = self.rows // 2
        return four // 2 * 2 + row // half, row % half * 8 + four % 2 * 4 + k

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector."""
        return 4 * self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the unit, with those between its own."""
        own = self.vector_bytes * self.bits
        return 2 * own - HALF if self.half else own

    @property
    def vectors(self) -> int:
        """Vectors of one group of the unit."""
        return VECTORS // self.groups


def decode(unit: Unit, load: Callable[[Any], Any], vector: Any, lane: Any) -> Any:
    """Code at one byte lane of one vector of a unit, as an int32 expression.

    `Unit.place` says which code that is.

    Parameters
    ----------
    unit : Unit
    load : callable
        Byte of the unit by its index, a uint8 expression.
    vector, lane : PrimExpr
        0..7 and 0..4R-1.
    """
    from tvm import tirx

    if unit.whole:
        return _decode_whole(unit, load, vector, lane)
    code: Any = None
    for width, shift in unit.fields:
        byte = unit.vector_bytes * shift + vector % width * unit.vector_bytes + lane
        part = load(unit.at(byte))
        if unit.inverted:
            part = tirx.bitwise_xor(part, tirx.const(0x80, "uint8"))
        if width < 8:
            down = (vector // width * width).astype("uint8")
            mask = tirx.const((1 << width) - 1, "uint8")
            part = tirx.bitwise_and(tirx.shift_right(part, down), mask)
        if shift:
            part = tirx.shift_left(part, tirx.const(shift, "uint8"))
        code = part if code is None else tirx.bitwise_or(code, part)
    return code.astype("int32")


def _decode_whole(unit: Unit, load: Callable[[Any], Any], vector: Any, lane: Any) -> Any:
    from tvm import tirx

    bits, size = unit.bits, unit.vector_bytes

    def piece(byte: Any, place: Any, width: int) -> Any:
        part = load(byte * size + lane)
        if unit.inverted:
            part = tirx.bitwise_xor(part, tirx.const(0x80, "uint8"))
        mask = tirx.const((1 << width) - 1, "int32")
        return tirx.bitwise_and(tirx.shift_right(part.astype("int32"), place), mask)

    lower = (vector // bits).astype("int32") if bits < VECTORS // 2 else tirx.const(0, "int32")
    place = tirx.max(tirx.const(8 - bits, "int32") - lower * bits, tirx.const(0, "int32"))
    code = piece(vector % bits, place, bits)
    for split in whole_codes.split_vectors(bits):
        value: Any = None
        for byte, at, width, shift in whole_codes.pieces(bits, split):
            part = piece(byte, tirx.const(at, "int32"), width)
            part = tirx.shift_left(part, tirx.const(shift, "int32"))
            value = part if value is None else tirx.bitwise_or(value, part)
        # A branch, since LLVM's loop vectorizer narrows a select by masks to int8 wrongly (-O2).
        code = tirx.if_then_else(vector == split, value, code)
    return code


def centred_code(unit: Unit, code: Any, zero: Any | None) -> Any:
    """What a code stands for before its scale, as a float32 expression.

    Parameters
    ----------
    unit : Unit
    code : PrimExpr
        int32.
    zero : PrimExpr or None
        The group's zero point; None for symmetric codes, where it is 2^(bits-1) and 1-bit codes
        are -1 and +1.
    """
    from tvm import tirx

    if zero is not None:
        return (code - zero.astype("int32")).astype("float32")
    if unit.bits == 1:
        return (code * tirx.const(2, "int32") - tirx.const(1, "int32")).astype("float32")
    return (code - tirx.const(1 << (unit.bits - 1), "int32")).astype("float32")

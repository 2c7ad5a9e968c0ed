"""Units of formats that decode to int8: their operands and what their bytes mean."""

from __future__ import annotations

from collections.abc import Callable

from apq_tvm.tensorize.exprs import Expr, i32
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, digit, triple
from apq_tvm.tensorize.meaning.codebook_quads import (
    BOOKS,
    GROUP,
    QUAD,
    book_of,
    code_of,
    quad_bytes,
)
from apq_tvm.tensorize.meaning.decoded import DecodedUnit
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.mixed import TILE_K, narrow_code, wide_byte, wide_code
from apq_tvm.tensorize.meaning.planes import ROWS as PLANE_ROWS
from apq_tvm.tensorize.meaning.planes import plane_code, table_of
from apq_tvm.tensorize.meaning.scaffold import Load, Operand
from apq_tvm.tensorize.meaning.spans.kinds import FIELDS, nibble

NIBBLES = Unit(4, 4, ((4, 0),))
"""4-bit codes of 4 rows."""


def _bytes(name: str, *shape: int, align: int = 16) -> Operand:
    return Operand(name, shape, "uint8", align, strided=len(shape) > 1)


def _codes_of(unit: Unit) -> Callable[..., Expr]:
    """The code of a row and column of a unit; what else is loaded is of no account."""
    return lambda row, k, codes, *_: decode(unit, codes, *unit.place(row, k // 4, k % 4))


def _less(offset: int) -> Callable[..., Expr]:
    """Entries of the last operand, a table of bytes that are `offset` too large."""
    return lambda row, e, *loads: loads[-1](e).astype("int32") - i32(offset)


def uniform_unit(unit: Unit, zeros: bool) -> DecodedUnit:
    """Codes less their zero points, or their middle; of 1 bit -1 and +1."""
    code_of = _codes_of(unit)

    def code(row: Expr, k: Expr, codes: Load, *points: Load) -> Expr:
        value = code_of(row, k, codes)
        for zero in points:
            group = (k // (UNIT_K // unit.groups),) if unit.groups > 1 else ()
            return value - zero(*group, row).astype("int32")
        return value + value - i32(1) if unit.bits == 1 else value - i32(1 << (unit.bits - 1))

    shape = (4,) if unit.groups == 1 else (unit.groups, 4)
    points = (Operand("zeros", shape, "uint8", 4),) if zeros else ()
    operands = (_bytes("codes", unit.nbytes, align=unit.vector_bytes), *points)
    return DecodedUnit("uniform", (unit, zeros), operands, code)


def table_unit(offset: int) -> DecodedUnit:
    """4-bit codes and one table of bytes that are `offset` too large."""
    operands = (_bytes("codes", NIBBLES.nbytes), _bytes("table", 16))
    code = _codes_of(NIBBLES)
    return DecodedUnit("table", (offset,), operands, code, _less(offset), entries=16)


def super_unit(bits: int) -> DecodedUnit:
    """Codes of super-blocks times their sub-scales: at most 105, a byte. Minima are left out."""
    unit = Unit(bits, 4, FIELDS[bits])
    code_of = _codes_of(unit)

    def code(row: Expr, k: Expr, codes: Load, subs: Load) -> Expr:
        return code_of(row, k, codes) * nibble(subs(row), k).astype("int32")

    operands = (_bytes("codes", unit.nbytes), _bytes("subs", 4, align=4))
    return DecodedUnit("super", (unit,), operands, code)


def books_unit(bits: int, offset: int) -> DecodedUnit:
    """64 k of codes with four codebooks in groups of 16, without sub-scales.

    Parameters
    ----------
    bits : int
        2 and 3: quads (`apq_tvm.tensorize.meaning.codebook_quads`); 4: units.
    offset : int
        What bytes of the table are too large by.
    """
    entries = BOOKS << bits
    shape = (quad_bytes(bits),) if bits < 4 else (QUAD // UNIT_K, NIBBLES.nbytes)

    def code(row: Expr, k: Expr, codes: Load, index: Load, _: Load) -> Expr:
        from tvm import tirx

        if bits < 4:
            value = code_of(bits, codes, row, k)
        else:
            unit, vector = k // UNIT_K, k % UNIT_K // 4
            value = decode(NIBBLES, lambda at: codes(unit, at), vector, row * 4 + k % 4)
        book = book_of(bits, index(row), k // GROUP)
        return value + tirx.shift_left(book, i32(bits))

    operands = (_bytes("codes", *shape), _bytes("index", 4, align=4), _bytes("table", entries))
    return DecodedUnit(
        "books", (bits, offset), operands, code, _less(offset), entries=entries, k=QUAD
    )


def balance_unit(centre: int) -> DecodedUnit:
    """Codes of 12 rows, three in 7 bits (`apq_tvm.codegen.layouts.balance`): thirds are vectors."""

    def code(row: Expr, k: Expr, codes: Load) -> Expr:
        three = triple(codes, 16, k // 4, row % 4 * 4 + k % 4)
        return digit(three, row // 4) - i32(centre)

    return DecodedUnit("balance", (centre,), (_bytes("codes", STORED * 16),), code, vectors=PARTS)


def planes_unit(bits: int, tables: int) -> DecodedUnit:
    """Bitplanes of 8 rows (`apq_tvm.tensorize.meaning.planes`).

    Parameters
    ----------
    bits : int
        Planes read.
    tables : int
        Tables that the eight rows use: 1, 2, 4 or 8.
    """
    entries = 1 << bits

    def code(row: Expr, k: Expr, planes: Load, _: Load) -> Expr:
        return plane_code(lambda p: planes(p, 0, k), row, bits)

    def entry(row: Expr, e: Expr, _: Load, table: Load) -> Expr:
        return table(table_of(row, tables), e).astype("int32")

    operands = (
        _bytes("planes", bits, 1, UNIT_K, align=32),
        Operand("table", (tables, entries), "int8", min(entries, 64), strided=True),
    )
    vectors = PLANE_ROWS // 4
    return DecodedUnit(
        "planes", (bits, tables), operands, code, entry, entries=entries, vectors=vectors
    )


def signs_unit(bits: int, plane: int) -> DecodedUnit:
    """One plane of `bits` of binary codes, -1 and +1: 4 of 16 rows with a byte a row for 8 k."""

    def code(row: Expr, k: Expr, codes: Load) -> Expr:
        from tvm import tirx

        byte = codes((k // 8 * bits + plane) * 16 + row).astype("int32")
        bit = tirx.bitwise_and(tirx.shift_right(byte, (k % 8).astype("int32")), i32(1))
        return bit * i32(2) - i32(1)

    # From the first of the rows' bytes to their last.
    stretch = (4 * bits - 1) * 16 + 4
    return DecodedUnit("signs", (bits, plane), (_bytes("codes", stretch, align=4),), code)


def offset_unit(wide: bool) -> DecodedUnit:
    """4 rows of a tile of ``mixed24``, of 8 rows, with codes of 4 bits (`wide`) or 2.

    See `apq_tvm.tensorize.meaning.mixed`.
    """

    def code(row: Expr, k: Expr, codes: Load, zeros: Load) -> Expr:
        vector, byte = k // 4, row * 4 + k % 4
        if wide:
            value = wide_code(codes(wide_byte(8, vector) + byte), vector)
        else:
            value = narrow_code(codes(byte), vector)
        return value - zeros(row).astype("int32")

    # From the first of the rows' bytes to their last.
    operands = (_bytes("codes", 48 if wide else 16), _bytes("zeros", 4, align=4))
    return DecodedUnit("offset", (wide,), operands, code, k=TILE_K)

"""Units of formats that decode to int8: their operands and what their bytes mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i32
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, digit, triple
from apq_tvm.tensorize.meaning.codebook_quads import (
    BOOKS,
    GROUP,
    QUAD,
    book_of,
    code_of,
    quad_bytes,
)
from apq_tvm.tensorize.meaning.decoded import DecodedUnit, Load
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.mixed import TILE_K, narrow_code, wide_byte, wide_code
from apq_tvm.tensorize.meaning.planes import ROWS as PLANE_ROWS
from apq_tvm.tensorize.meaning.planes import plane_code, table_of
from apq_tvm.tensorize.meaning.super_span import FIELDS, nibble

Expr = Any  # tvm is untyped
Loads = Mapping[str, Load]

NIBBLES = Unit(4, 4, ((4, 0),))
"""4-bit codes of 4 rows."""


@dataclass(frozen=True)
class TableUnit(DecodedUnit):
    """4-bit codes and one table of bytes that are `offset` too large."""

    offset: int

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``codes`` and ``table``."""
        return {"codes": ((NIBBLES.nbytes,), "uint8", 16), "table": ((16,), "uint8", 16)}

    @property
    def entries(self) -> int:
        """16."""
        return 16

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The 4-bit code."""
        return decode(NIBBLES, load["codes"], k // 4, row * 4 + k % 4)

    def entry(self, load: Loads, row: Expr, e: Expr) -> Expr:
        """An entry of the table, less the offset."""
        return load["table"](e).astype("int32") - i32(self.offset)

    def __str__(self) -> str:
        return f"lut4o{self.offset}"


@dataclass(frozen=True)
class SuperUnit(DecodedUnit):
    """Codes of super-blocks times their sub-scales: at most 105, a byte. Minima are left out."""

    bits: int

    @property
    def codes(self) -> Unit:
        """How codes lie."""
        return Unit(self.bits, 4, FIELDS[self.bits])

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``codes`` and ``subs``."""
        return {"codes": ((self.codes.nbytes,), "uint8", 16), "subs": ((4,), "uint8", 4)}

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The code times the sub-scale."""
        code = decode(self.codes, load["codes"], k // 4, row * 4 + k % 4)
        return code * nibble(load["subs"](row), k).astype("int32")

    def __str__(self) -> str:
        return f"super{self.bits}"


@dataclass(frozen=True)
class BooksUnit(DecodedUnit):
    """64 k of codes with four codebooks in groups of 16, without sub-scales.

    Parameters
    ----------
    bits : int
        2 and 3: quads (`apq_tvm.tensorize.meaning.codebook_quads`); 4: units.
    offset : int
        What bytes of the table are too large by.
    """

    bits: int
    offset: int

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``codes``, ``index`` and ``table``."""
        units = QUAD // UNIT_K
        codes = (quad_bytes(self.bits),) if self.bits < 4 else (units, NIBBLES.nbytes)
        return {
            "codes": (codes, "uint8", 16),
            "index": ((4,), "uint8", 4),
            "table": ((self.entries,), "uint8", 16),
        }

    @property
    def k(self) -> int:
        """64."""
        return QUAD

    @property
    def entries(self) -> int:
        """Centroids of all books."""
        return BOOKS << self.bits

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The code, above it the book."""
        from tvm import tirx

        if self.bits < 4:
            code = code_of(self.bits, load["codes"], row, k)
        else:
            unit, vector = k // UNIT_K, k % UNIT_K // 4
            code = decode(NIBBLES, lambda at: load["codes"](unit, at), vector, row * 4 + k % 4)
        book = book_of(self.bits, load["index"](row), k // GROUP)
        return code + tirx.shift_left(book, i32(self.bits))

    def entry(self, load: Loads, row: Expr, e: Expr) -> Expr:
        """An entry of the table, less the offset."""
        return load["table"](e).astype("int32") - i32(self.offset)

    def __str__(self) -> str:
        return f"books{self.bits}o{self.offset}"


@dataclass(frozen=True)
class BalanceUnit(DecodedUnit):
    """Codes of 12 rows, three in 7 bits (`apq_tvm.codegen.layouts.balance`)."""

    centre: int

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``codes``."""
        return {"codes": ((STORED * 16,), "uint8", 16)}

    @property
    def vectors(self) -> int:
        """A third of the rows each."""
        return PARTS

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The digit, less what stands for 0."""
        code = triple(load["codes"], 16, k // 4, row % 4 * 4 + k % 4)
        return digit(code, row // 4) - i32(self.centre)

    def __str__(self) -> str:
        return "t5"


@dataclass(frozen=True)
class PlanesUnit(DecodedUnit):
    """Bitplanes of 8 rows (`apq_tvm.tensorize.meaning.planes`).

    Parameters
    ----------
    bits : int
        Planes read.
    tables : int
        Tables that the eight rows use: 1, 2, 4 or 8.
    """

    bits: int
    tables: int

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``planes`` and ``table``."""
        entries = 1 << self.bits
        return {
            "planes": ((self.bits, 1, UNIT_K), "uint8", 32),
            "table": ((self.tables, entries), "int8", min(entries, 64)),
        }

    @property
    def vectors(self) -> int:
        """Two."""
        return PLANE_ROWS // 4

    @property
    def entries(self) -> int:
        """Centroids of a table."""
        return 1 << self.bits

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The code of these planes."""
        return plane_code(lambda p: load["planes"](p, 0, k), row, self.bits)

    def entry(self, load: Loads, row: Expr, e: Expr) -> Expr:
        """A centroid of the row's table."""
        return load["table"](table_of(row, self.tables), e).astype("int32")

    def __str__(self) -> str:
        return f"b{self.bits}t{self.tables}"


@dataclass(frozen=True)
class SignsUnit(DecodedUnit):
    """One plane of binary codes, -1 and +1: 4 of the 16 rows of a unit with a byte a row.

    Parameters
    ----------
    bits : int
        Planes of the unit.
    plane : int
    """

    bits: int
    plane: int

    @property
    def stretch(self) -> int:
        """Bytes from the first of the rows' to their last."""
        return (4 * self.bits - 1) * 16 + 4

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``codes``."""
        return {"codes": ((self.stretch,), "uint8", 4)}

    def byte(self, chunk: Any) -> Any:
        """Where the rows' bytes of 8 k are."""
        return (chunk * self.bits + self.plane) * 16

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The sign."""
        from tvm import tirx

        byte = load["codes"](self.byte(k // 8) + row).astype("int32")
        bit = tirx.bitwise_and(tirx.shift_right(byte, (k % 8).astype("int32")), i32(1))
        return bit * i32(2) - i32(1)

    def __str__(self) -> str:
        return f"signs{self.plane}of{self.bits}"


@dataclass(frozen=True)
class OffsetUnit(DecodedUnit):
    """4 rows of one tile of ``mixed24`` (`apq_tvm.tensorize.meaning.mixed`), of 8 rows.

    Parameters
    ----------
    wide : bool
        Whether codes have 4 bits, else 2.
    """

    wide: bool

    @property
    def stretch(self) -> int:
        """Bytes from the first of the rows' to their last."""
        return 48 if self.wide else 16

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """``codes`` and ``zeros``."""
        return {"codes": ((self.stretch,), "uint8", 16), "zeros": ((4,), "uint8", 4)}

    @property
    def k(self) -> int:
        """A group."""
        return TILE_K

    def code(self, load: Loads, row: Expr, k: Expr) -> Expr:
        """The code less the zero point."""
        vector, byte = k // 4, row * 4 + k % 4
        if self.wide:
            code = wide_code(load["codes"](wide_byte(8, vector) + byte), vector)
        else:
            code = narrow_code(load["codes"](byte), vector)
        return code - load["zeros"](row).astype("int32")

    def __str__(self) -> str:
        return f"mixed{4 if self.wide else 2}"

"""Spans of interleaved units of codes (`apq_tvm.codegen.layouts.codebook`) and any codebooks.

Codes of 2 to 4 bits lie in units of 32 k, sub-scales two groups to a byte of a row, books as many
as fit: four groups with four codebooks, else two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.lookup_span import ROWS, Arrays, SpanDot

Expr = Any  # tvm is untyped

FIELDS = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),)}
"""Bits of a code -> (width, shift) of the parts it is stored in."""


@dataclass(frozen=True)
class BookUnitsDot(SpanDot):
    """A span of 16 groups of codes of 2, 3 or 4 bits, or the groups at the end of a row."""

    @property
    def books(self) -> int:
        """Codebooks."""
        return self.entries >> self.bits

    @property
    def book_bits(self) -> int:
        """Bits that the number of a book takes: 2, or 4 for three as well."""
        return 2 if self.books == 4 else 4

    @property
    def codes_unit(self) -> Unit:
        """A unit of codes."""
        return Unit(self.bits, ROWS, FIELDS[self.bits])

    @property
    def units(self) -> int:
        """Units of it."""
        return self.k // UNIT_K

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``codes`` by unit, ``subs`` and ``index`` by as many groups as share a byte."""
        return {
            "codes": ((self.units, self.codes_unit.nbytes), "uint8"),
            "subs": ((-(-self.groups // 2), ROWS), "uint8"),
            "index": ((-(-self.groups * self.book_bits // 8), ROWS), "uint8"),
        }

    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32: which entry of the table a weight is."""
        from tvm import tirx

        unit, inside = k // UNIT_K, k % UNIT_K
        code = decode(
            self.codes_unit,
            lambda byte: arrays["codes"][unit, byte],
            inside // 4,
            r * 4 + inside % 4,
        )
        book = _part(arrays["index"], k // self.group, r, self.book_bits).astype("int32")
        return code + tirx.shift_left(book, tirx.const(self.bits, "int32"))

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """uint8 sub-scale of a weight's group."""
        return _part(arrays["subs"], k // self.group, r, 4)


def _part(array: Any, group: Expr, r: Expr, width: int) -> Expr:
    """uint8: a value of few bits of a group."""
    from tvm import tirx

    per_byte = 8 // width
    down = (group % per_byte * width).astype("uint8")
    byte = array[group // per_byte, r]
    return tirx.bitwise_and(tirx.shift_right(byte, down), tirx.const((1 << width) - 1, "uint8"))

"""Kinds of spans whose codes lie in interleaved units of 32 k.

- `UnitsDot`: a group of 4-bit codes of one table (`apq_tvm.codegen.layouts.interleaved`).
- `BookUnitsDot`: codes of 2 to 4 bits and any codebooks (`apq_tvm.codegen.layouts.codebook`);
  sub-scales lie two groups to a byte of a row, books as many as fit: four groups with four
  codebooks, else two.
- `SuperDot`: super-blocks, ``w = scale * sub * code - min_scale * minimum``; the two groups of a
  unit have their sub-scales (and minima) in the low and the high nibble of a byte per row.
"""

from __future__ import annotations

from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, Arrays, SpanDot

FIELDS = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),)}
"""Bits of a code -> (width, shift) of the parts it is stored in."""


@dataclass(frozen=True)
class UnitsDot(SpanDot):
    """A span whose codes are in units, or the units at the end of a row."""

    @property
    def codes_unit(self) -> Unit:
        """A unit of codes."""
        return Unit(self.bits, ROWS, FIELDS[self.bits])

    @property
    def units(self) -> int:
        """Units of it."""
        return self.k // UNIT_K

    @property
    def lead_units(self) -> tuple[int, ...]:
        """The axis of units, left out where there is one."""
        return (self.units,) if self.units > 1 else ()

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``codes`` by unit."""
        return {"codes": ((*self.lead_units, self.codes_unit.nbytes), "uint8")}

    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32 code."""
        inside = k % UNIT_K
        return decode(
            self.codes_unit,
            lambda byte: arrays["codes"](k // UNIT_K, byte),
            inside // 4,
            r * 4 + inside % 4,
        )


@dataclass(frozen=True)
class SuperDot(UnitsDot):
    """A super-block of codes of 2 or 3 bits, or the units at the end of a row."""

    @property
    def codes_unit(self) -> Unit:
        """A unit of codes."""
        return Unit(self.bits, ROWS, FIELDS[self.bits], 2)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``codes``, ``subs`` and ``mins`` by unit, ``min_scales`` of the super-block."""
        small = ((*self.lead_units, ROWS), "uint8")
        return {**super().arrays, "subs": small, "mins": small, "min_scales": ((ROWS,), "float16")}

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """uint8 sub-scale of a weight's group."""
        return nibble(arrays["subs"](k // UNIT_K, r), k)

    def minimum(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """float32: what is taken off a weight."""
        least = nibble(arrays["mins"](k // UNIT_K, r), k).astype("float32")
        return least * arrays["min_scales"](r).astype("float32")


def nibble(byte: Expr, k: Expr) -> Expr:
    """uint8: the half of a unit's byte that belongs to column k."""
    return _bits(byte, k % UNIT_K // 16 * 4, 4)


@dataclass(frozen=True)
class BookUnitsDot(UnitsDot):
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

        book = self._part(arrays, "index", r, k, self.book_bits).astype("int32")
        return super().entry(arrays, r, k) + tirx.shift_left(book, tirx.const(self.bits, "int32"))

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """uint8 sub-scale of a weight's group."""
        return self._part(arrays, "subs", r, k, 4)

    def _part(self, arrays: Arrays, name: str, r: Expr, k: Expr, width: int) -> Expr:
        """uint8: a value of few bits of a group."""
        group, per_byte = k // self.group, 8 // width
        return _bits(arrays[name](group // per_byte, r), group % per_byte * width, width)


def _bits(byte: Expr, down: Expr, width: int) -> Expr:
    """uint8: `width` bits of a byte."""
    from tvm import tirx

    moved = tirx.shift_right(byte, down.astype("uint8"))
    return tirx.bitwise_and(moved, tirx.const((1 << width) - 1, "uint8"))

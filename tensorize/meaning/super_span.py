"""Spans of super-blocks: interleaved units of codes with a sub-scale and a minimum per 16 codes.

``w = scale * sub * code - min_scale * minimum``; a unit of 32 k has two groups, whose sub-scales
(and minima) are the low and the high nibble of a byte per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.lookup_span import ROWS, Arrays, SpanDot

Expr = Any  # tvm is untyped

FIELDS = {2: ((2, 0),), 3: ((2, 0), (1, 2))}
"""Bits of a code -> (width, shift) of the parts it is stored in."""


@dataclass(frozen=True)
class SuperDot(SpanDot):
    """A super-block of codes of 2 or 3 bits, or the units at the end of a row."""

    @property
    def codes_unit(self) -> Unit:
        """A unit of codes."""
        return Unit(self.bits, ROWS, FIELDS[self.bits], 2)

    @property
    def units(self) -> int:
        """Units of it."""
        return self.k // UNIT_K

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``codes``, ``subs`` and ``mins`` by unit, ``min_scales`` of the super-block."""
        units = (self.units,) if self.units > 1 else ()
        return {
            "codes": ((*units, self.codes_unit.nbytes), "uint8"),
            "subs": ((*units, ROWS), "uint8"),
            "mins": ((*units, ROWS), "uint8"),
            "min_scales": ((ROWS,), "float16"),
        }

    def _at(self, k: Expr, byte: Expr) -> tuple[Expr, ...]:
        return (k // UNIT_K, byte) if self.units > 1 else (byte,)

    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32 code."""
        inside = k % UNIT_K
        vector, lane = inside // 4, r * 4 + inside % 4
        return decode(
            self.codes_unit, lambda byte: arrays["codes"][self._at(k, byte)], vector, lane
        )

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """uint8 sub-scale of a weight's group."""
        return nibble(arrays["subs"][self._at(k, r)], k)

    def minimum(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """float32: what is taken off a weight."""
        least = nibble(arrays["mins"][self._at(k, r)], k).astype("float32")
        return least * arrays["min_scales"][r].astype("float32")


def nibble(byte: Expr, k: Expr) -> Expr:
    """uint8: the half of a unit's byte that belongs to column k."""
    from tvm import tirx

    shift = (k % UNIT_K // 16 * 4).astype("uint8")
    return tirx.bitwise_and(tirx.shift_right(byte, shift), tirx.const(15, "uint8"))

"""Spans of interleaved units of codes (`apq_tvm.codegen.layouts.interleaved`) and one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.lookup_span import ROWS, Arrays, SpanDot

Expr = Any  # tvm is untyped

_NIBBLES = Unit(4, ROWS, ((4, 0),))


@dataclass(frozen=True)
class UnitsDot(SpanDot):
    """A group of 4-bit codes, which is a span; activations and weights share their groups."""

    @property
    def units(self) -> int:
        """Units of it."""
        return self.k // UNIT_K

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``codes`` by unit."""
        units = (self.units,) if self.units > 1 else ()
        return {"codes": ((*units, _NIBBLES.nbytes), "uint8")}

    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32: which entry of the table a weight is."""
        lead = (k // UNIT_K,) if self.units > 1 else ()
        inside = k % UNIT_K
        vector, byte = inside // 4, r * 4 + inside % 4
        return decode(_NIBBLES, lambda at: arrays["codes"][(*lead, at)], vector, byte)

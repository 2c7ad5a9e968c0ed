"""Quads: 64 codes of 4 rows with 4 codebooks in groups of 16, as instructions want to merge them.

A quad holds four groups g of 16 codes, and a group four vectors i of 4 rows x 4 k. Its *registers*
of 16 bytes (byte ``4 r + c``: row r, k = 4 i + c) are cut so that a masked merge with the rows'
codebooks gives indices of a table with few other instructions::

    2 bits: books of a row, one byte:   bits 7-6   5-4   3-2   1-0
                                             g=3   g=2   g=1   g=0
            register i:                      g=2   g=3   g=0   g=1     vector i

Merging bits 7-6 and 3-2 of the codes with 5-4 and 1-0 of the books gives two nibbles that each hold
a code and its group's book; so do the other bits.

    3 bits: books:                      bits 7-6    5      4-3   2       1-0
                                             g=3   g=2     g=1  g=2      g=0
            register i:                 bits 7-5 g=3, i     4-2 g=0, i   1-0 g=2, i, low bits
            register 4 + i // 2:        bits 7-5 g=1, odd i 4-2 g=1, even i
                                        bit i % 2: g=2, i, high bit

An entry has its book above the code or below it, in either of two tables. So a merge with the books
as they lie (bits 4-0, or 7-3 moved by 3) makes an index of a code at bits 4-2, and an insertion by
a shift one of a code at bits 7-5, below the book that was there. Only those of group 2 are put
together of two registers first.

Sub-scales: byte ``8 (q % 2) + 4 (g // 2) + r`` of register q // 2 of a span of 4 quads has those of
g = 0, 2 in the low nibble, of g = 1, 3 in the high one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.spans.lookup import Arrays, SpanDot

BOOKS = 4
"""Codebooks."""

GROUP = 16
"""Codes of a group."""

QUAD = 64
"""Codes of a row in a quad."""

SPAN_QUADS = 4
"""Quads that share a scale."""

BITS = (2, 3)
"""Bits of a code there are quads for."""

Part = tuple[int, int, int, int]
"""(register, shift in the byte, width, shift in the code)."""


def parts(bits: int, group: int, vector: int) -> tuple[Part, ...]:
    """Where in a quad the codes of one group and vector are."""
    if bits == 2:
        return ((vector, (2, 0, 6, 4)[group], 2, 0),)
    if group == 2:
        return (vector, 0, 2, 0), (4 + vector // 2, vector % 2, 1, 2)
    if group == 1:
        return ((4 + vector // 2, 2 + vector % 2 * 3, 3, 0),)
    return ((vector, 2 + group, 3, 0),)


def book_parts(bits: int, group: int) -> tuple[tuple[int, int, int], ...]:
    """Where in a row's byte the book of a group is: (shift in the byte, width, in the book)."""
    if bits == 3 and group == 2:
        return (2, 1, 0), (5, 1, 1)
    return (((group - group // 3 * (bits - 2)) * bits, 2, 0),)


def quad_bytes(bits: int) -> int:
    """Bytes of a quad's codes."""
    return 4 * QUAD * bits // 8


def _field(byte: Expr, shift: Expr, width: int) -> Expr:
    from tvm import tirx

    moved = tirx.shift_right(byte.astype("int32"), shift.astype("int32"))
    return tirx.bitwise_and(moved, tirx.const((1 << width) - 1, "int32"))


def code_of(bits: int, load: Callable[[Expr], Expr], r: Expr, k: Expr) -> Expr:
    """int32 code of row r, column k of a quad.

    Parameters
    ----------
    bits : int
    load : callable
        Byte of the quad by its index.
    r, k : PrimExpr
        0..3, 0..63.
    """
    from tvm import tirx

    group, vector, lane = k // GROUP, k % GROUP // 4, r * 4 + k % 4

    def field(register: Expr, shift: Expr, width: int) -> Expr:
        return _field(load(register * 16 + lane), shift, width)

    if bits == 2:
        return field(vector, (1 - group % 2 + group // 2 * 2) * 2, 2)
    other, odd = vector // 2 + 4, vector % 2
    high = tirx.shift_left(field(other, odd, 1), tirx.const(2, "int32"))
    split = tirx.bitwise_or(field(vector, tirx.const(0, "int32"), 2), high)
    whole = tirx.Select(group == 1, field(other, odd * 3 + 2, 3), field(vector, group + 2, 3))
    return tirx.Select(group == 2, split, whole)


def book_of(bits: int, byte: Expr, group: Expr) -> Expr:
    """int32 book of group 0..3 of a quad, from the row's byte; with 4 bits as with 2."""
    from tvm import tirx

    if bits != 3:
        return _field(byte, group * 2, 2)
    low, high = (_field(byte, tirx.const(shift, "int32"), 1) for shift in (2, 5))
    split = tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(1, "int32")))
    return tirx.Select(group == 2, split, _field(byte, (group - group // 3) * 3, 2))


def sub_byte(quad: Expr, group: Expr, r: Expr) -> Expr:
    """Which byte of a span's 32 has the sub-scale of a group 0..3 of a quad."""
    return quad * 8 + group // 2 * 4 + r


def sub_of(byte: Expr, group: Expr) -> Expr:
    """uint8 sub-scale."""
    from tvm import tirx

    shift = (group % 2 * 4).astype("uint8")
    return tirx.bitwise_and(tirx.shift_right(byte, shift), tirx.const(15, "uint8"))


@dataclass(frozen=True)
class BookDot(SpanDot):
    """A span of codes of 2 or 3 bits, or the few quads at the end of a row."""

    @property
    def quads(self) -> int:
        """Quads of it."""
        return self.k // QUAD

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """``codes`` by quad, ``index`` and ``subs`` of a whole span."""
        quads = (self.quads,) if self.quads > 1 else ()
        return {
            "codes": ((*quads, quad_bytes(self.bits)), "uint8"),
            "subs": ((8 * SPAN_QUADS,), "uint8"),
            "index": ((4 * SPAN_QUADS,), "uint8"),
        }

    def entry(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """int32: which entry of the table a weight is."""
        from tvm import tirx

        quad, inside = k // QUAD, k % QUAD
        code = code_of(self.bits, lambda at: arrays["codes"](quad, at), r, inside)
        book = book_of(self.bits, arrays["index"](quad * 4 + r), inside // GROUP)
        return code + tirx.shift_left(book, tirx.const(self.bits, "int32"))

    def sub(self, arrays: Arrays, r: Expr, k: Expr) -> Expr:
        """uint8 sub-scale of a weight's group."""
        group = k % QUAD // GROUP
        return sub_of(arrays["subs"](sub_byte(k // QUAD, group, r)), group)

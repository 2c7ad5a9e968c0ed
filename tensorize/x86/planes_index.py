"""From planes to table indices in vector registers: merges by mask instead of a bit per operation.

The registers q0, q1, ... hold the planes from the *least* significant one on; bit t of every byte
belongs to row t. Two merges make two registers of 2-bit codes of two planes, four more make four
registers of nibbles: a bit transposition of eight 4x4 squares in 16 operations where the masked
merge is one instruction (vpternlogd), which replaces the network of Any-Precision LLM, figure 8.
Bits that do not belong to a code need not be cleared: the table repeats its entries over them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, x86
from apq_tvm.tensorize.x86.vectors import masked, merged, shifted


@dataclass(frozen=True)
class Index:
    """Indices of one row.

    Parameters
    ----------
    vector : PrimExpr
        uint8 [V].
    places : tuple of int
        Which bit of a byte of `vector` holds bit 0, 1, ... of the code.
    """

    vector: Expr
    places: tuple[int, ...]

    def table(self, entries: int) -> list[int]:
        """For every index of a table of `entries`, the code it stands for."""
        return [
            sum((e >> place & 1) << i for i, place in enumerate(self.places))
            for e in range(entries)
        ]


def pairs(q0: Expr, q1: Expr) -> tuple[Expr, Expr]:
    """2-bit codes: field f of the first register is row 2f, of the second row 2f + 1."""
    return merged(0x55, q0, shifted(q1, 1)), merged(0x55, shifted(q0, -1), q1)


def nibbles(planes: list[Expr]) -> list[Expr]:
    """Codes of 3 or 4 bits: low nibble of register j is row j, high nibble row j + 4.

    The fourth bit of 3-bit codes is arbitrary.
    """
    low = pairs(planes[0], planes[1])
    if len(planes) == 3:
        d = planes[2]
        high = [shifted(d, s) for s in (2, 1, 0, -1)]
    else:
        even, odd = pairs(planes[2], planes[3])
        high = [shifted(even, 2), shifted(odd, 2), even, odd]
    return [
        merged(0x33, low[0], high[0]),
        merged(0x33, low[1], high[1]),
        merged(0x33, shifted(low[0], -2), high[2]),
        merged(0x33, shifted(low[1], -2), high[3]),
    ]


def swapped(mask: int, shift: int, a: Expr, c: Expr) -> tuple[Expr, Expr]:
    """Exchange the bits of `a` above `mask` for those of `c` in it, `shift` places apart.

    What two merges do, in 6 operations instead of 8 where a merge is three: AVX2 has no vpternlogd.
    """
    t = masked(tirx.bitwise_xor(shifted(a, -shift), c), mask)
    return tirx.bitwise_xor(a, shifted(t, shift)), tirx.bitwise_xor(c, t)


def _nibble(registers: list[Expr], row: int) -> Expr:
    """The row's nibble in the low bits, whatever above."""
    return shifted(registers[row % 4], -4 if row >= 4 else 0)


def wide_indices(planes: list[Expr]) -> list[Index]:
    """Indices of the eight rows for lookups that ignore bits above a code's, at least six.

    Parameters
    ----------
    planes : list of PrimExpr
        1 to 8 registers, least significant plane first.
    """
    bits = len(planes)
    natural = tuple(range(bits))
    if bits == 1:
        q, up = planes[0], shifted(planes[0], -2)
        return [Index(up if r > 5 else q, (r - 2 if r > 5 else r,)) for r in range(8)]
    if bits == 2:
        both = pairs(planes[0], planes[1])
        up = [shifted(v, -2) for v in both]
        return [
            Index(up[r % 2], (4, 5)) if r > 5 else Index(both[r % 2], (r // 2 * 2, r // 2 * 2 + 1))
            for r in range(8)
        ]
    low = nibbles(planes[:4])
    if bits <= 4:
        return [Index(_nibble(low, r), natural) for r in range(8)]
    if bits == 5:  # bits 4 and 5 get the fifth bits of rows 2f and 2f + 1
        fifth = [shifted(planes[4], 4 - 2 * f) for f in range(4)]
        return [
            Index(merged(0x0F, _nibble(low, r), fifth[r // 2]), (0, 1, 2, 3, 4 + r % 2))
            for r in range(8)
        ]
    if bits == 6:
        top = pairs(planes[4], planes[5])
        return [
            Index(merged(0x0F, _nibble(low, r), shifted(top[r % 2], 4 - r // 2 * 2)), natural)
            for r in range(8)
        ]
    high = nibbles(planes[4:])
    return [
        Index(merged(0x0F, _nibble(low, r), shifted(high[r % 4], 4 if r < 4 else 0)), natural)
        for r in range(8)
    ]


def nibble_indices(planes: list[Expr]) -> list[Index]:
    """Indices of the eight rows in the low four bits of every byte, the others 0.

    Parameters
    ----------
    planes : list of PrimExpr
        1 to 4 registers, least significant plane first.
    """
    bits = len(planes)
    both = swapped(0x55, 1, planes[0], planes[1]) if bits > 1 else (planes[0],)
    if bits <= 2:
        halves = [(masked(v, 15), masked(shifted(v, -4), 15)) for v in both]
        indices = []
        for r in range(8):
            place = r // len(both) * bits
            places = tuple(place % 4 + i for i in range(bits))
            indices.append(Index(halves[r % len(both)][place // 4], places))
        return indices
    high = swapped(0x55, 1, planes[2], planes[3]) if bits == 4 else (planes[2], planes[2])
    even, odd = (swapped(0x33, 2, low, up) for low, up in zip(both, high, strict=True))
    registers = [even[0], odd[0], even[1], odd[1]]
    # A third plane that was not paired has the bits of odd rows one place higher.
    last = [2 + r % 2 for r in range(8)] if bits == 3 else [2] * 8
    return [Index(masked(_nibble(registers, r), 15), (0, 1, last[r], 3)[:bits]) for r in range(8)]


def long_lookup(quarters: list[Expr], index: Expr) -> Expr:
    """int8 [64]: entries of a table of two or four registers, by an index of 7 or 8 bits."""
    halves = [
        x86("int8x64", "avx512.vpermi2var.qi.512", low, index, high)
        for low, high in zip(quarters[::2], quarters[1::2], strict=True)
    ]
    if len(halves) == 1:
        return halves[0]
    zero = tirx.Broadcast(tirx.const(0, "int8"), 64)
    return tirx.Select(tirx.LT(tirx.reinterpret("int8x64", index), zero), halves[1], halves[0])

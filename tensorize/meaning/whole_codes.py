"""Where the bits of 3-, 5-, 6- and 7-bit codes lie when most codes lie whole in one byte.

Of the eight vectors of a unit (`apq_tvm.tensorize.meaning.interleaved`) as many as there are bytes
lie whole in the top bits of a byte, for 3 bits two in every byte; the other vectors are split over
what is left
of the bytes, their lowest bits first::

    3 bits   byte 0: v0 v3 a a     byte 1: v1 v4 b b     byte 2: v2 v5 b a     a = v6, b = v7
    5 bits   bytes 0..4: v0..v4    left of bytes 0..2: the low three bits of v5, v6, v7;
                                   of byte 3: v7 v5 v5;  of byte 4: v7 v6 v6
    6 bits   bytes 0..5: v0..v5    left of bytes 0..2: v6;  of bytes 3..5: v7
    7 bits   bytes 0..6: v0..v6    left of each: one bit of v7

A code in the top bits needs a mask at most, no shift: times an activation it is a sum at its own
place, and sums of places are brought together once a chunk. A vector that is split takes one shift
that inserts (``sli``) for each byte. Per eight vectors of 3, 5, 6 and 7 bits that is 11, 14, 12 and
14 instructions beside the products; fields of 4, 2 and 1 bits take more than twice as many.
"""

from __future__ import annotations

Piece = tuple[int, int, int, int]
"""(vector of bytes, place of the lowest bit in a byte, bits, place in the code)."""

WIDTHS = (3, 5, 6, 7)
"""Bits of codes that are stored so; those of 1, 2, 4 and 8 fill bytes."""

_SPLIT: dict[int, dict[int, tuple[Piece, ...]]] = {
    3: {6: ((0, 0, 2, 0), (2, 0, 1, 2)), 7: ((1, 0, 2, 0), (2, 1, 1, 2))},
    5: {
        5: ((0, 0, 3, 0), (3, 0, 2, 3)),
        6: ((1, 0, 3, 0), (4, 0, 2, 3)),
        7: ((2, 0, 3, 0), (3, 2, 1, 3), (4, 2, 1, 4)),
    },
    6: {
        6: ((0, 0, 2, 0), (1, 0, 2, 2), (2, 0, 2, 4)),
        7: ((3, 0, 2, 0), (4, 0, 2, 2), (5, 0, 2, 4)),
    },
    7: {7: tuple((byte, 0, 1, byte) for byte in range(7))},
}


def split_vectors(bits: int) -> range:
    """Vectors of a unit that do not lie whole in one byte."""
    return range(min(_SPLIT[bits]), 8)


def whole_place(bits: int, vector: int) -> int:
    """Place of the lowest bit of a code that lies whole in byte ``vector % bits``."""
    return 8 - bits * (1 + vector // bits)


def pieces(bits: int, vector: int) -> tuple[Piece, ...]:
    """Where the bits of one vector's codes lie, lowest first."""
    split = _SPLIT[bits].get(vector)
    return split if split else ((vector % bits, whole_place(bits, vector), bits, 0),)


def places(bits: int) -> tuple[int, ...]:
    """Places at which codes are multiplied, lowest first: 0 for split ones, once put together."""
    return (0, *sorted({whole_place(bits, v) for v in range(split_vectors(bits).start)}))

"""Vector expressions on Arm for the quads of `apq_tvm.tensorize.meaning.codebook_quads`."""

from __future__ import annotations

from apq_tvm.tensorize.arm.lookup import kept, masked, merged, shifted
from apq_tvm.tensorize.exprs import Expr

BOOK_ABOVE, BOOK_BELOW = 7, 0x1C
"""Bits of a code in an index of the first table and of the second one."""

BITS = 31
"""Of an index."""

ORDERS = (list(range(32)), [i % 4 * 8 + i // 4 for i in range(32)])
"""Entries of the two tables as stored: by book and code, by code and book."""


def books_of(packed: Expr) -> list[Expr]:
    """Vectors to be merged with codes, made of the rows' bytes: books at bits 4-3, zeros above.

    The books at bits 4-3 are those of groups 1, 3 and 2. The first vector has those of group 0 at
    bits 1-0, the second one those of group 1.
    """
    apart = merged(0x10, shifted(packed, -1), shifted(packed, 1))
    return [masked(packed, BITS), shifted(packed, -3), masked(kept(apart), BITS - BOOK_ABOVE)]


def split_index(low: Expr, high: Expr, books: Expr) -> Expr:
    """Indices of group 2: codes of two bits and, at bit 2, of one; the third of `books_of`."""
    return merged(BOOK_ABOVE, kept(merged(3, low, high)), books)

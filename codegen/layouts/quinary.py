"""Three digits of five levels in seven bits, by logic alone: as decimals are packed densely.

Digits 0 to 3 are two bits; 4 is *large* and has none. IEEE 754-2008 packs three decimal digits in
ten bits by that idea (M. Cowlishaw, "Densely packed decimal encoding", 2002); of five levels seven
bits ``p6 .. p0`` do, and planes of codes become planes of digits by 23 operations on three words.

======  =====  ====  ====  ====
p6      p1p0   d0    d1    d2
======  =====  ====  ====  ====
0              p5p4  p3p2  p1p0
1       00     p5p4  p3p2  4
1       01     p5p4  4     p3p2
1       10     4     p3p2  p5p4
1       11     p5p4, the digit that p3p2 names; the others are 4, all three if it is 3
======  =====  ====  ====  ====
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.balance import LEVELS, TRIPLE, TRIPLE_BITS

_LARGE = LEVELS - 1


def digits(code: int) -> tuple[int, int, int]:
    """The three digits of a code of seven bits, of any."""
    high, middle, low = code >> 4 & 3, code >> 2 & 3, code & 3
    if not code >> 6:
        return high, middle, low
    if low == 0:
        return high, middle, _LARGE
    if low == 1:
        return high, _LARGE, middle
    if low == 2:
        return _LARGE, middle, high
    first, second, third = (high if middle == place else _LARGE for place in range(TRIPLE))
    return first, second, third


@cache
def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Digits of all codes, [128, 3]; and a code of all digits, [5, 5, 5]."""
    of_codes = np.array([digits(code) for code in range(1 << TRIPLE_BITS)], np.uint8)
    codes = np.zeros((LEVELS,) * TRIPLE, np.uint8)
    for code in reversed(range(1 << TRIPLE_BITS)):  # the least of several
        codes[digits(code)] = code
    assert all(digits(int(codes[d])) == d for d in product(range(LEVELS), repeat=TRIPLE))
    return of_codes, codes


def packed(first: NDArray[Any], second: NDArray[Any], third: NDArray[Any]) -> NDArray[np.uint8]:
    """Codes of digits, element by element."""
    codes: NDArray[np.uint8] = _tables()[1][first, second, third]
    return codes


def unpacked(codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
    """The three digits of codes, element by element."""
    return tuple(_tables()[0][codes, place] for place in range(TRIPLE))


def digit(bits: list[Any], place: Any) -> Any:
    """TensorIR int32 expression of one digit.

    Parameters
    ----------
    bits : list of Expr
        int32 0 or 1: ``p0 .. p6``.
    place : Expr
        Which digit, 0 to 2.
    """
    from tvm import tirx

    def two(low: int) -> Any:
        return bits[low] + bits[low + 1] * 2

    def chosen(*of_digits: Any) -> Any:
        return tirx.Select(place == 0, of_digits[0], tirx.Select(place == 1, *of_digits[1:]))

    large = tirx.const(_LARGE, "int32")
    high, middle, low = two(4), two(2), two(0)
    one = [chosen(high, middle, large), chosen(high, large, middle), chosen(large, middle, high)]
    some = tirx.Select(middle == place, high, large)
    for selector, value in reversed(list(enumerate(one))):
        some = tirx.Select(low == selector, value, some)
    return tirx.Select(bits[6] == 0, chosen(high, middle, low), some)

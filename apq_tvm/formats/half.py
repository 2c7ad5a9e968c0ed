"""``W2h``: two bits on a half-integer grid, the levels -1.5, -0.5, 0.5 and 1.5 of a group's scale.

::

    w = scale * (code - 1.5)          code 0 .. 3

    bits per weight = 2 + 16 / group

The four integers of ``W2`` reach one step further on one side than on the other; these are even
around 0, as weights are, and have no 0. Of normally distributed weights they lose 0.117 of the
variance in groups of 64 and 0.120 in groups of 128, those of ``W2`` 0.124 and 0.133, at the same
bits (``tests/unit/formats/test_half.py``).
Stored and computed as any table of whole values (`apq_tvm.formats.levels`): -3, -1, 1 and 3 of half
a scale, so that sums are exact in integers.
"""

from __future__ import annotations

import re

from apq_tvm.formats.family import level_family
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.spelling import either, parse_acts
from apq_tvm.types import Scheme

NAME = "half"
"""`Scheme.family`."""

GROUPS = (32, 64, 128, 256)
"""Weights that share a scale."""

LEVELS = Levels((-3, -1, 1, 3), 0.5)

_PATTERN = re.compile(r"W(\d+)H(A\d+)?(?:G(\d+))?\Z")


def parse(word: str) -> Scheme | None:
    """Read ``W2HA8G64``; None if it is not of this family.

    Raises
    ------
    ValueError
        With the reason.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits, group = int(match[1]), int(match[3] or 0)
    if bits != 2:
        raise ValueError(f"half-integer weights of {bits} bits; 2 are possible")
    if group not in GROUPS:
        have = f"in groups of {group}" if group else "without groups"
        raise ValueError(f"half-integer weights {have}; groups of {either(GROUPS)} are possible")
    return Scheme(2, False, parse_acts(match[2] or ""), False, group, NAME, "W2h")


FAMILY = level_family(
    name=NAME,
    grammar="W2h[A..]g{32..256}: levels -1.5, -0.5, 0.5 and 1.5, one scale per group",
    examples=("W2hA8g64", "W2hA8g32", "W2hA8g128", "W2hA32g64"),
    parse=parse,
    levels=lambda scheme: LEVELS,
)
"""Two bits on a half-integer grid."""

"""Non-uniform 4-bit weights ``nl4``: one fixed table of 16 int8 values, a float16 scale per group.

::

    w = scale * TABLE[code] * 2^-6           groups of 32 (nl4g64, nl4g128: wider)

4.5 bits per weight for groups of 32; the paper's section 6.3 runs IQ4_NL, which is such a format.
The table is our own, by Lloyd's alternation on normally distributed weights: a test derives it
(``tests/unit/test_formats_groups.py``). Scales may be negative; the table is not symmetric, so that
its sign says which side of a group reaches further.
"""

from __future__ import annotations

import re

from apq_tvm.formats.family import level_family
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.types import Scheme

NAME = "nl"
"""`Scheme.family`."""

GROUPS = (32, 64, 128)
"""Weights that share a scale; the first is not spelled."""

TABLE: tuple[int, ...] = (
    -63, -49, -39, -31, -24, -17, -11, -5, 2, 8, 14, 21, 28, 36, 46, 60,
)  # fmt: skip
"""What the codes mean, in ascending order and in units of `UNIT`."""

MAX_VALUE = 63
"""Largest magnitude in the table: shifted to 0 .. 126, two products with int8 fit int16."""

UNIT = 2.0**-6
"""What the table's values are multiples of, relative to a group's scale."""

LEVELS = Levels(TABLE, UNIT)

_PATTERN = re.compile(r"NL(\d+)(?:G(\d+))?(A\d+)?\Z")


def parse(word: str) -> Scheme | None:
    """Read ``NL4`` or ``NL4G64A32``; None if it is not of this family.

    Raises
    ------
    ValueError
        With the reason.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits, group = int(match[1]), int(match[2] or GROUPS[0])
    if bits != 4:
        raise ValueError(f"non-uniform weights of {bits} bits; 4 are possible")
    if group not in GROUPS:
        raise ValueError(f"groups of {group} non-uniform weights; 32, 64 and 128 are possible")
    spelling = "nl4" + (f"g{group}" if group != GROUPS[0] else "")
    return Scheme(4, False, parse_acts(match[3] or ""), False, group, NAME, spelling)


FAMILY = level_family(
    name=NAME,
    grammar="nl4[g{64|128}][A..]: a fixed table of 16 values, one scale per group of 32",
    examples=("nl4", "nl4g64", "nl4g128"),
    parse=parse,
    levels=lambda scheme: LEVELS,
)
"""Non-uniform 4-bit weights."""

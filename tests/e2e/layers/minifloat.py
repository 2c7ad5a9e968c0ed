"""Minifloats ``fp4``: a sign, two bits of exponent and one of mantissa (E2M1), a scale per group.

The values 0, 0.5, 1, 1.5, 2, 3, 4 and 6 are those of the OCP Microscaling Formats (MX)
Specification 1.0, section 5.3.3; codes rise with them, so that -0 and 0 are 7 and 8.
"""

from __future__ import annotations

import re

from apq_tvm.formats.family import level_family
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.types import Scheme

_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
_LEVELS = Levels((*(-value for value in reversed(_HALVES)), *_HALVES), unit=0.5)
_PATTERN = re.compile(r"FP4(?:G(32|64|128))?(A\d+)?\Z")


def parse(word: str) -> Scheme | None:
    """Read ``FP4`` or ``FP4G64A32``; None if it is not of this family."""
    match = _PATTERN.match(word)
    if match is None:
        return None
    spelling = f"fp4g{match[1]}" if match[1] else "fp4"
    acts = parse_acts(match[2] or "")
    return Scheme(4, act_bits=acts, group_size=int(match[1] or 32), family="fp", weights=spelling)


FAMILY = level_family(
    name="fp",
    grammar="fp4[g{32|64|128}][A..]: 4-bit floats (E2M1), one scale per group of 32",
    examples=("fp4", "fp4g64"),
    parse=parse,
    levels=lambda scheme: _LEVELS,
)
"""4-bit floats."""

"""``W2*``: bit balance, five levels -2..2, three weights in 7 bits.

ABQ-LLM (AAAI 2025), section 3.3 "Bit Balance Strategy": weights are distributed evenly around 0,
the four levels of two bits are not; one level more, -2..2, makes them so. A group along K means::

    w = scale * (code - 2)          code in 0..4

Arrays: ``codes`` uint8 [N, K], ``scales`` float16 [N, G] (not negative), no ``zeros``, no tables.
125 = 5^3 triples fit 7 bits, so a weight takes 7/3 = 2.33 bits (the authors' kernels expand it to
three planes); `apq_tvm.codegen.layouts.balance` draws the bytes.
"""

from __future__ import annotations

import re

from apq_tvm.formats.family import level_family
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.spelling import ACT_BITS
from apq_tvm.types import QuantizedTensor, Scheme

LEVELS = 5
"""Levels of a weight."""

CENTRE = 2
"""The code that means 0."""

TRIPLE = 3
"""Weights in one code of `TRIPLE_BITS` bits."""

TRIPLE_BITS = 7

GROUPS = (32, 64, 128, 256, -1)
"""Weights along K that share a scale. Groups of 16 would spend 1 bit in 3.3 on scales."""

_LEVELS = Levels(tuple(range(-CENTRE, LEVELS - CENTRE)))

WEIGHTS = "W2*"
"""Spelling of the weights' part of a scheme."""

_WORD = re.compile(r"W2\*A(\d+)(T?)(?:G(\d+))?\Z")


def balance_scheme(act_bits: int = 8, group_size: int = -1, per_token: bool = False) -> Scheme:
    """The scheme ``W2*A{act_bits}[t][g{group_size}]``."""
    return Scheme(2, False, act_bits, per_token and group_size > 0, group_size, "balance", WEIGHTS)


def parse(word: str) -> Scheme | None:
    """Read an upper-case spelling; None if it is of another family.

    Raises
    ------
    ValueError
        With the reason, if there are no such activations or groups.
    """
    match = _WORD.match(word)
    if match is None:
        if word.startswith(WEIGHTS):
            raise ValueError("W2*A{bits}[t][g{group}] is how W2* is spelled, as in W2*A8g128")
        return None
    act, per_token = int(match[1]), bool(match[2])
    group = -1 if match[3] is None else int(match[3])
    if act not in ACT_BITS:
        raise ValueError(f"activations of {act} bits; 1..8, 16 or 32 are possible")
    if group not in GROUPS:
        raise ValueError(f"groups of {group}; W2* has 32, 64, 128, 256 or a whole row")
    if per_token and act > 8:
        raise ValueError(f"t is for integer activations; A{act} has no activation scales")
    return balance_scheme(act, group, per_token)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes of the codes, 7 bits for every three, and of the scales."""
    triples = -(-tensor.codes.size // TRIPLE)
    return (triples * TRIPLE_BITS + 7) // 8 + tensor.scales.nbytes


FAMILY = level_family(
    name="balance",
    grammar="W2*A{1..8|16|32}[t][g{group}]: five levels -2..2, three weights in 7 bits",
    examples=("W2*A8", "W2*A8g128", "W2*A8g32", "W2*A4tg64", "W2*A16g128"),
    parse=parse,
    levels=lambda scheme: _LEVELS,
    nbytes=nbytes,
    embedding=lambda scheme: Scheme(4, group_size=32),
)
"""Five balanced levels."""

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

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.family import Family
from apq_tvm.formats.scheme import ACT_BITS
from apq_tvm.types import QuantizedTensor, Scheme

F32 = NDArray[np.float32]

LEVELS = 5
"""Levels of a weight."""

CENTRE = 2
"""The code that means 0."""

TRIPLE = 3
"""Weights in one code of `TRIPLE_BITS` bits."""

TRIPLE_BITS = 7

GROUPS = (32, 64, 128, 256, -1)
"""Weights along K that share a scale. Groups of 16 would spend 1 bit in 3.3 on scales."""

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


def groups_of(k: int, group_size: int) -> int:
    """Scales of one row."""
    return 1 if group_size == -1 else -(-k // group_size)


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays do not fit its scheme.

    Raises
    ------
    BadScheme
        With the tensor's name and what is wrong.
    """
    scheme, codes = tensor.scheme, tensor.codes
    if scheme.family != "balance" or scheme.group_size not in GROUPS:
        raise BadScheme(f"{name}: scheme {scheme} is no {WEIGHTS} with groups of one of {GROUPS}")
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.size == 0:
        raise BadScheme(
            f"{name}: codes are {codes.dtype} {list(codes.shape)}; uint8 [N, K] with N, K >= 1 "
            "is needed"
        )
    n, k = codes.shape
    shape = (n, groups_of(k, scheme.group_size))
    if tensor.scales.shape != shape or tensor.scales.dtype != np.float16:
        raise BadScheme(
            f"{name}: scales are {tensor.scales.dtype} {list(tensor.scales.shape)}; "
            f"float16 {list(shape)} is needed"
        )
    if tensor.zeros is not None or tensor.tables:
        raise BadScheme(f"{name}: {WEIGHTS} has neither zero points nor tables")
    if int(codes.max()) >= LEVELS:
        raise BadScheme(f"{name}: code {int(codes.max())} exceeds {LEVELS - 1}")


def dequantize(tensor: QuantizedTensor) -> F32:
    """Decode to float32 [N, K]; exact.

    Raises
    ------
    BadScheme
        If the tensor is not of this format.
    """
    check(tensor, "tensor")
    k, group = tensor.codes.shape[1], tensor.scheme.group_size
    values = tensor.codes.astype(np.float32) - np.float32(CENTRE)
    width = k if group == -1 else group
    values *= np.repeat(tensor.scales.astype(np.float32), width, axis=1)[:, :k]
    return values


def error_bound(absmax: F32) -> F32:
    """Largest |w - decoded| of a group that was rounded from its maximum.

    Parameters
    ----------
    absmax : float32, any shape
        Largest magnitude of each group.

    Returns
    -------
    float32
        Half a step, and twice the rounding of the float16 scale.
    """
    step = absmax / np.float32(CENTRE)
    return np.asarray(step / 2 + 4 * np.maximum(step * 2.0**-11, 2.0**-24), np.float32)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes of the codes, 7 bits for every three, and of the scales."""
    triples = -(-tensor.codes.size // TRIPLE)
    return (triples * TRIPLE_BITS + 7) // 8 + tensor.scales.nbytes


FAMILY = Family(
    name="balance",
    grammar="W2*A{1..8|16|32}[t][g{group}]: five levels -2..2, three weights in 7 bits",
    examples=("W2*A8", "W2*A8g128", "W2*A8g32", "W2*A4tg64", "W2*A16g128"),
    parse=parse,
    check=check,
    dequantize=lambda tensor, bits: dequantize(tensor),
    nbytes=nbytes,
    embedding=lambda scheme: Scheme(4, group_size=32),
)
"""Five balanced levels."""

"""Non-uniform 4-bit weights ``nl4``: one fixed table of 16 int8 values, a float16 scale per group.

::

    w = scale * TABLE[code] * 2^-6           groups of 32 (nl4g64, nl4g128: wider)

4.5 bits per weight for groups of 32; the paper's section 6.3 runs IQ4_NL, which is such a format.
The table is our own: `apq_tvm.quantizers.families.nonlinear.derive_table` computes it, a test
compares. Scales may be negative; the table is not symmetric, so that its sign says which side of a
group reaches further.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.family import Family
from apq_tvm.formats.scheme import parse_acts
from apq_tvm.formats.superblock import (
    check_array,
    check_codes,
    check_tables,
    embedding_scheme,
    groups,
    spread,
)
from apq_tvm.types import QuantizedTensor, Scheme

F32 = NDArray[np.float32]

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


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays do not fit its scheme.

    Raises
    ------
    BadScheme
    """
    if tensor.scheme.family != NAME:
        raise BadScheme(f"{name}: scheme {tensor.scheme} is not {NAME}4")
    n, k = check_codes(tensor, name)
    check_tables(tensor, name)
    shape = (n, groups(k, tensor.scheme.group_size))
    check_array(f"{name}: scales", tensor.scales, "float16", shape)


def dequantize(tensor: QuantizedTensor, bits: int = 0) -> F32:
    """Decode to float32 [N, K], exact."""
    check(tensor, "tensor")
    values = np.array(TABLE, np.float32)[tensor.codes] * np.float32(UNIT)
    scales = spread(tensor.scales.astype(np.float32), values.shape[1], tensor.scheme.group_size)
    return np.asarray(values * scales, np.float32)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes of codes and scales; the table is part of the format."""
    return (tensor.codes.size * tensor.scheme.bits + 7) // 8 + tensor.scales.nbytes


FAMILY = Family(
    name=NAME,
    grammar="nl4[g{64|128}][A..]: a fixed table of 16 values, one scale per group of 32",
    examples=("nl4", "nl4g64", "nl4g128"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    nbytes=nbytes,
    embedding=embedding_scheme,
)
"""Non-uniform 4-bit weights."""

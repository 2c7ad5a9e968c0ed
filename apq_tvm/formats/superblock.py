"""Uniform super-blocks ``W2s`` and ``W3s``: 16 groups of 16 weights share two float16 scales.

A group has a 4-bit sub-scale and a 4-bit minimum, a super-block of 16 groups (256 weights along K)
a float16 scale d and a float16 minimum scale m::

    w = d * sub * code - m * min            code 0 .. 2^bits - 1, sub and min 0 .. 15

which is bits + (4 + 4) / 16 + (16 + 16) / 256 bits per weight: 2.625 and 3.625 (llama.cpp's Q2_K
is this block, "k-quants", ggerganov/llama.cpp pull request 1684; the paper's section 6.4 compares
with it). Rows need not fill their last super-block or group: K = 100 has one super-block of seven
groups, the last of four weights.

Arrays: ``scales`` float16 [N, S], ``tables["min_scales"]`` float16 [N, S], ``tables["subs"]`` and
``tables["mins"]`` uint8 [N, G], where G = ceil(K / 16) and S = ceil(G / 16).
"""

from __future__ import annotations

import re

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import check_array, check_codes, check_tables, group_count, spread
from apq_tvm.formats.family import Family
from apq_tvm.formats.places import Place, group_places
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.types import F32, Array, QuantizedTensor, Scheme

NAME = "super"
"""`Scheme.family`."""

GROUP = 16
"""Weights that share a sub-scale."""

SUPER = 16
"""Groups of one super-block."""

SUB_BITS = 4
"""Bits of a sub-scale and of a minimum."""

SUB_MAX = 15
"""Largest sub-scale and minimum."""

BITS = (2, 3)
"""Bits of a code."""

_PATTERN = re.compile(r"W(\d+)S(A\d+)?\Z")


def supers(k: int, size: int = GROUP) -> int:
    """Super-blocks of a row of `k` weights; the last one may be short."""
    return -(-group_count(k, size) // SUPER)


def group_scales(scales: Array, subs: Array, per_super: int = SUPER) -> F32:
    """Scale of every group, float32 [N, G]: that of its super-block times its sub-scale, exact."""
    wide = np.repeat(scales.astype(np.float32), per_super, axis=1)[:, : subs.shape[1]]
    return np.asarray(wide * subs.astype(np.float32), np.float32)


def parse(word: str) -> Scheme | None:
    """Read ``W2S`` or ``W3SA32``; None if it is not of this family.

    Raises
    ------
    ValueError
        With the reason.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits = int(match[1])
    if bits not in BITS:
        raise ValueError(f"super-blocks of {bits} bits; 2 and 3 are possible")
    acts = parse_acts(match[2] or "")
    return Scheme(bits, False, acts, False, GROUP, NAME, f"W{bits}s")


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays are not super-blocks of its scheme.

    Raises
    ------
    BadScheme
    """
    if tensor.scheme.family != NAME:
        raise BadScheme(f"{name}: scheme {tensor.scheme} has no uniform super-blocks")
    n, k = check_codes(tensor, name)
    check_tables(tensor, name, "min_scales", "subs", "mins")
    check_array(f"{name}: scales", tensor.scales, "float16", (n, supers(k)))
    check_array(f"{name}: min_scales", tensor.tables["min_scales"], "float16", (n, supers(k)))
    per_group = (n, group_count(k, GROUP))
    for key in ("subs", "mins"):
        check_array(f"{name}: {key}", tensor.tables[key], "uint8", per_group, SUB_MAX)


def dequantize(tensor: QuantizedTensor) -> F32:
    """Decode to float32 [N, K]: both products are exact, their difference is rounded once."""
    check(tensor, "tensor")
    k = tensor.codes.shape[1]
    tables = tensor.tables
    step = spread(group_scales(tensor.scales, tables["subs"]), k, GROUP)
    least = spread(group_scales(tables["min_scales"], tables["mins"]), k, GROUP)
    return np.asarray(step * tensor.codes.astype(np.float32) - least, np.float32)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes at true bits: codes, two 4-bit values a group, two float16 a super-block."""
    code_bits = tensor.codes.size * tensor.scheme.bits
    group_bits = tensor.tables["subs"].size * 2 * SUB_BITS
    return (code_bits + group_bits + 7) // 8 + 2 * tensor.scales.nbytes


def _places(tensor: QuantizedTensor) -> list[Place]:
    size = GROUP * SUPER
    return [*group_places(tensor, "scales", size), *group_places(tensor, "min_scales", size)]


FAMILY = Family(
    name=NAME,
    grammar="W{2|3}s[A..]: uniform super-blocks of 16 x 16 with 4-bit sub-scales and minima",
    examples=("W2sA8", "W3sA8"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    nbytes=nbytes,
    places=_places,
)
"""Uniform super-blocks."""

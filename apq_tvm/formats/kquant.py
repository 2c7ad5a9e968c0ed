"""Super-blocks of 256 weights ``W3k`` to ``W6k``: float16 scales, integer sub-scales of groups.

They are llama.cpp's k-quants bit for bit (ggml-common.h, ``block_q3_K`` to ``block_q6_K``;
ggml-quants.c, ``dequantize_row_q*_K``; llama.cpp pull request 1684). Q2_K is `superblock`'s W2s::

    W3k   w = scale * sub * (code - 4)             groups of 16, sub -32 .. 31       (Q3_K)
    W4k   w = scale * sub * code - least * min     groups of 32, sub, min 0 .. 63    (Q4_K)
    W5k   the same with codes of 5 bits                                              (Q5_K)
    W6k   w = scale * sub * (code - 32)            groups of 16, sub -128 .. 127     (Q6_K)

``scale * sub`` is a float16 times at most 8 bits, 19 bits in all: exact in float32, but no float16,
which is why these are no integers with a scale per group. A product with a code of W4k and W5k has
22 bits and stays exact; W6k's has 25 and is rounded once, as llama.cpp rounds it.

Sub-scales and minima lie in a byte each, so that kernels read them without unpacking::

    bits per weight = bits + 8 / 16 + 16 / 256                  3.5625 (Q3_K: 3.4375), 6.5625 (Q6_K)
                      bits + (8 + 8) / 32 + (16 + 16) / 256     4.625 (Q4_K: 4.5), 5.625 (Q5_K: 5.5)

Arrays: ``scales`` float16 [N, S] and ``tables["subs"]`` [N, G], int8 without minima and uint8 with;
then also ``tables["min_scales"]`` float16 [N, S] and ``tables["mins"]`` uint8 [N, G]. G = ceil(K /
group), S = ceil(K / 256): rows need not fill their last super-block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import check_array, check_codes, check_tables, group_count, spread
from apq_tvm.formats.family import Family
from apq_tvm.formats.places import Place, group_places
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.formats.superblock import group_scales
from apq_tvm.types import F32, QuantizedTensor, Scheme

NAME = "k"
"""`Scheme.family`."""

SUPER = 256
"""Weights of a super-block."""


@dataclass(frozen=True)
class Kind:
    """What differs between the widths.

    Parameters
    ----------
    group : int
        Weights that share a sub-scale.
    most : int
        Largest sub-scale; with minima the least is 0, else ``-most - 1``.
    minima : bool
        Whether groups have a minimum, 0 .. `most`.
    """

    group: int
    most: int
    minima: bool

    @property
    def sub_type(self) -> str:
        """Type of sub-scales."""
        return "uint8" if self.minima else "int8"

    @property
    def per_super(self) -> int:
        """Groups of a super-block."""
        return SUPER // self.group


KINDS = {
    3: Kind(16, 31, False),
    4: Kind(32, 63, True),
    5: Kind(32, 63, True),
    6: Kind(16, 127, False),
}
"""By bits of a code."""

_PATTERN = re.compile(r"W(\d+)K(A\d+)?\Z")


def middle(scheme: Scheme) -> int:
    """The code that means 0; with minima codes are counted from 0."""
    return 0 if KINDS[scheme.bits].minima else 1 << (scheme.bits - 1)


def parse(word: str) -> Scheme | None:
    """Read ``W4K`` or ``W6KA32``; None if it is not of this family.

    Raises
    ------
    ValueError
        With the reason.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits = int(match[1])
    if bits == 2:
        raise ValueError("k-quants of 2 bits are spelled W2s")
    if bits not in KINDS:
        raise ValueError(f"k-quants of {bits} bits; 3..6 are possible")
    acts = parse_acts(match[2] or "")
    return Scheme(bits, False, acts, False, KINDS[bits].group, NAME, f"W{bits}k")


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays are not super-blocks of its scheme.

    Raises
    ------
    BadScheme
    """
    if tensor.scheme.family != NAME:
        raise BadScheme(f"{name}: scheme {tensor.scheme} is no k-quant")
    n, k = check_codes(tensor, name)
    kind, tables = KINDS[tensor.scheme.bits], tensor.tables
    check_tables(tensor, name, "subs", *(("min_scales", "mins") if kind.minima else ()))
    supers, groups = (n, group_count(k, SUPER)), (n, group_count(k, kind.group))
    check_array(f"{name}: scales", tensor.scales, "float16", supers)
    check_array(f"{name}: subs", tables["subs"], kind.sub_type, groups, kind.most)
    if kind.minima:
        check_array(f"{name}: min_scales", tables["min_scales"], "float16", supers)
        check_array(f"{name}: mins", tables["mins"], "uint8", groups, kind.most)
    elif int(tables["subs"].min()) < -kind.most - 1:
        least = -kind.most - 1
        raise BadScheme(f"{name}: subs holds {int(tables['subs'].min())}; at least {least} fits")


def dequantize(tensor: QuantizedTensor) -> F32:
    """Decode to float32 [N, K], rounded once, as llama.cpp does."""
    check(tensor, "tensor")
    k, tables, kind = tensor.codes.shape[1], tensor.tables, KINDS[tensor.scheme.bits]
    values = tensor.codes.astype(np.float32) - np.float32(middle(tensor.scheme))
    values *= spread(group_scales(tensor.scales, tables["subs"], kind.per_super), k, kind.group)
    if kind.minima:
        least = group_scales(tables["min_scales"], tables["mins"], kind.per_super)
        values -= spread(least, k, kind.group)
    return values


def _places(tensor: QuantizedTensor) -> list[Place]:
    places = group_places(tensor, "scales", SUPER)
    if KINDS[tensor.scheme.bits].minima:
        places += group_places(tensor, "min_scales", SUPER)
    return places


FAMILY = Family(
    name=NAME,
    grammar=(
        "W{3..6}k[A..]: super-blocks of 256 as llama.cpp's k-quants: groups of 16 with signed "
        "sub-scales (3, 6), of 32 with sub-scales and minima (4, 5)"
    ),
    examples=("W3kA8", "W4kA8", "W5kA8", "W6kA8"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    places=_places,
)
"""llama.cpp's k-quants."""

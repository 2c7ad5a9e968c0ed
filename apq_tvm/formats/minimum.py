"""Integers with a float minimum per group ``W4mA8g32``: a scale and a minimum, both float16.

::

    w = scale * code - min                  code 0 .. 2^bits - 1

    bits per weight = bits + (16 + 16) / group

that is 5 for ``W4mA8g32`` and 6 for ``W5mA8g32``. A zero point (``W4z``) is the special case whose
minimum is a whole number of steps. These are llama.cpp's Q4_1 and Q5_1 bit for bit (ggml-common.h,
``block_q4_1``, ``block_q5_1``: d and m float16, ``w = d q + m`` in groups of 32), with ``min =
-m``, which negates a float16 exactly: 4 + 32 / 32 and 5 + 32 / 32 bits in either.

Arrays: ``scales`` and ``tables["mins"]`` float16 [N, G], G = ceil(K / group).
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import check_array, check_codes, check_tables, group_count, spread
from apq_tvm.formats.family import Family
from apq_tvm.formats.places import group_places
from apq_tvm.formats.spelling import GROUP_SIZES, check_group, parse_acts
from apq_tvm.types import F32, QuantizedTensor, Scheme

NAME = "min"
"""`Scheme.family`."""

BITS = (2, 3, 4, 5, 6)
"""Bits of a code."""

_PATTERN = re.compile(r"W(\d+)M(A\d+)?(?:G(\d+))?\Z")


def parse(word: str) -> Scheme | None:
    """Read ``W4MA8G32``; None if it is not of this family.

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
        raise ValueError(f"minima of {bits}-bit weights; {BITS[0]}..{BITS[-1]} are possible")
    if match[3] is None:
        raise ValueError(f"minima without groups; g{GROUP_SIZES[0]} to g256 are possible")
    group = int(match[3])
    check_group(group)
    return replace(scheme(bits, group), act_bits=parse_acts(match[2] or ""))


def scheme(bits: int, group: int) -> Scheme:
    """That of weights with minima, with int8 activations."""
    return Scheme(bits, group_size=group, family=NAME, weights=f"W{bits}m")


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays are not codes with minima of its scheme.

    Raises
    ------
    BadScheme
    """
    if tensor.scheme.family != NAME:
        raise BadScheme(f"{name}: scheme {tensor.scheme} has no minima per group")
    n, k = check_codes(tensor, name)
    check_tables(tensor, name, "mins")
    shape = (n, group_count(k, tensor.scheme.group_size))
    check_array(f"{name}: scales", tensor.scales, "float16", shape)
    check_array(f"{name}: mins", tensor.tables["mins"], "float16", shape)


def dequantize(tensor: QuantizedTensor) -> F32:
    """Decode to float32 [N, K]: the product is exact, the difference is rounded once."""
    check(tensor, "tensor")
    k, size = tensor.codes.shape[1], tensor.scheme.group_size
    values = tensor.codes.astype(np.float32)
    values *= spread(tensor.scales.astype(np.float32), k, size)
    values -= spread(tensor.tables["mins"].astype(np.float32), k, size)
    return values


FAMILY = Family(
    name=NAME,
    grammar="W{2..6}m[A..]g{16..256}: integers with a float16 minimum per group beside its scale",
    examples=("W4mA8g32", "W5mA8g32", "W3mA8g16", "W2mA8g64", "W6mA8g128"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    places=lambda tensor: [*group_places(tensor), *group_places(tensor, "mins")],
)
"""Integers with minima."""

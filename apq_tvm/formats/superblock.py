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
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.family import Family
from apq_tvm.formats.scheme import parse_acts
from apq_tvm.types import Array, QuantizedTensor, Scheme

F32 = NDArray[np.float32]

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


def groups(k: int, size: int = GROUP) -> int:
    """Groups of a row of `k` weights; the last one may be short."""
    return -(-k // size)


def supers(k: int, size: int = GROUP) -> int:
    """Super-blocks of a row of `k` weights; the last one may be short."""
    return -(-groups(k, size) // SUPER)


def spread(values: Array, k: int, size: int = GROUP) -> Array:
    """Repeat per-group values [N, G] for every weight: [N, k]."""
    return np.repeat(values, size, axis=1)[:, :k]


def group_scales(scales: Array, subs: Array) -> F32:
    """Scale of every group, float32 [N, G]: that of its super-block times its sub-scale, exact."""
    wide = np.repeat(scales.astype(np.float32), SUPER, axis=1)[:, : subs.shape[1]]
    return np.asarray(wide * subs.astype(np.float32), np.float32)


def embedding_scheme(scheme: Scheme) -> Scheme:
    """Lookup tables of a super-block or codebook model: integers of at least 4 bits, group 32."""
    return Scheme(max(4, scheme.bits), act_bits=scheme.act_bits, group_size=32)


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


def check_codes(tensor: QuantizedTensor, name: str) -> tuple[int, int]:
    """Refuse codes that are no uint8 matrix or exceed the scheme's bits; gives (N, K).

    Raises
    ------
    BadScheme
    """
    codes, top = tensor.codes, (1 << tensor.scheme.bits) - 1
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.size == 0:
        raise BadScheme(
            f"{name}: codes are {codes.dtype} {list(codes.shape)}; uint8 [N, K] with N, K >= 1 "
            "is needed"
        )
    if int(codes.max()) > top:
        raise BadScheme(f"{name}: code {int(codes.max())} exceeds {top} of {tensor.scheme}")
    if tensor.zeros is not None:
        raise BadScheme(f"{name}: scheme {tensor.scheme} has no zero points")
    n, k = codes.shape
    return n, k


def check_array(
    name: str, array: Array | None, dtype: str, shape: tuple[int, ...], top: int | None = None
) -> None:
    """Refuse an array of another shape or type, with values above `top`, or not finite.

    Raises
    ------
    BadScheme
        With the array's name and what it must be.
    """
    if array is None or array.dtype != np.dtype(dtype) or array.shape != shape:
        have = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise BadScheme(f"{name} is {have}; {dtype} {list(shape)} is needed")
    if top is not None and int(array.max()) > top:
        raise BadScheme(f"{name} holds {int(array.max())}; at most {top} is possible")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadScheme(f"{name} holds a value that is not finite")


def check_tables(tensor: QuantizedTensor, name: str, *keys: str) -> None:
    """Refuse tables of other names than `keys`.

    Raises
    ------
    BadScheme
    """
    if set(tensor.tables) != set(keys):
        raise BadScheme(
            f"{name}: scheme {tensor.scheme} has tables {sorted(keys)}, not {sorted(tensor.tables)}"
        )


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
    for key in ("subs", "mins"):
        check_array(f"{name}: {key}", tensor.tables[key], "uint8", (n, groups(k)), SUB_MAX)


def dequantize(tensor: QuantizedTensor, bits: int = 0) -> F32:
    """Decode to float32 [N, K]: both products are exact, their difference is rounded once."""
    check(tensor, "tensor")
    k = tensor.codes.shape[1]
    tables = tensor.tables
    step = spread(group_scales(tensor.scales, tables["subs"]), k)
    least = spread(group_scales(tables["min_scales"], tables["mins"]), k)
    return np.asarray(step * tensor.codes.astype(np.float32) - least, np.float32)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes at true bits: codes, two 4-bit values a group, two float16 a super-block."""
    code_bits = tensor.codes.size * tensor.scheme.bits
    group_bits = tensor.tables["subs"].size * 2 * SUB_BITS
    return (code_bits + group_bits + 7) // 8 + 2 * tensor.scales.nbytes


FAMILY = Family(
    name=NAME,
    grammar="W{2|3}s[A..]: uniform super-blocks of 16 x 16 with 4-bit sub-scales and minima",
    examples=("W2sA8", "W3sA8"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    nbytes=nbytes,
    embedding=embedding_scheme,
)
"""Uniform super-blocks."""

"""Binary-coding quantization (BCQ): sums of a few signed scales, one offset per group.

A block is one group of g weights along K. It means (LUT-GEMM, section 3.1, equation 2)::

    w[n, k] = Σ_i alpha[n, k // g, i] b_i[n, k] + z[n, k // g]     i = 0 .. q-1, b_i = -1 or +1

Bit i of code [n, k] is 1 where b_i is +1. ``scales`` is alpha, float16 [N, G, q]; the tables have
``offsets``, z, float16 [N, G]. Quantizers here give alpha in canonical order: not negative, the
largest at the highest bit, as in the conversion from uniform integers (`from_uniform`), where
alpha_i = 2^(i-1) s. Schemes are spelled ``bcq{q}[g{group}][A32]``: ``bcq3g128``, ``bcq2`` (one
group per row), ``bcq2g64A32``.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import check_codes, group_count, spread
from apq_tvm.formats.family import Family
from apq_tvm.formats.integer import BITS, MAX_SCALE, check_scale, format_of
from apq_tvm.formats.places import Place, group_places
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.types import F32, QuantizedTensor, Scheme

OFFSETS = "offsets"
"""Name of z among a tensor's tables."""

GROUPS = (32, 64, 128, 256)
"""Weights along K that may share scales, besides a whole row."""

EMBEDDING_BITS = 4
"""Fewest bits of embedding tables, whose rows are rounded on a uniform grid."""

_PATTERN = re.compile(r"BCQ(\d+)(?:G(\d+))?(A\d+)?\Z")


def parse(word: str) -> Scheme | None:
    """Read an upper-case scheme; None if it is not of this family.

    Raises
    ------
    ValueError
        With the reason, if there are no such bits, groups or activations.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits, group, acts = int(match[1]), int(match[2] or -1), parse_acts(match[3] or "")
    if bits not in BITS:
        raise ValueError(f"weights of {bits} bits; {BITS[0]}..{BITS[-1]} are possible")
    if group not in (-1, *GROUPS):
        sizes = ", ".join(map(str, GROUPS))
        raise ValueError(f"groups of {group}; {sizes} or a whole row are possible")
    if acts not in (8, 32):
        raise ValueError(f"activations of {acts} bits; bcq has A8 (int8 tables) and A32")
    return scheme_of(bits, group, acts)


def scheme_of(bits: int, group_size: int = -1, act_bits: int = 8) -> Scheme:
    """The scheme of `bits` planes with scales per `group_size` weights, -1 for a whole row."""
    name = f"bcq{bits}" + (f"g{group_size}" if group_size > 0 else "")
    return Scheme(bits, act_bits=act_bits, group_size=group_size, family="bcq", weights=name)


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays do not fit its scheme.

    Raises
    ------
    BadScheme
        With the tensor's name, what is wrong and what is needed.
    """
    scheme = tensor.scheme
    if scheme.family != "bcq":
        raise BadScheme(f"{name}: scheme {scheme} is not binary-coded")
    n, k = check_codes(tensor, name)
    groups = group_count(k, scheme.group_size)
    if set(tensor.tables) != {OFFSETS} or tensor.zeros is not None:
        raise BadScheme(f"{name}: {scheme} has one table, {OFFSETS!r}, and no zero points")
    wanted = {"scales": (n, groups, scheme.bits), OFFSETS: (n, groups)}
    for part, array in (("scales", tensor.scales), (OFFSETS, tensor.tables[OFFSETS])):
        if array.shape != wanted[part] or array.dtype != np.float16:
            raise BadScheme(
                f"{name}: {part} are {array.dtype} {list(array.shape)}; float16 "
                f"{list(wanted[part])} is needed"
            )
        if not np.isfinite(array).all():
            raise BadScheme(f"{name}: {part} hold NaN or infinity")


def dequantize(tensor: QuantizedTensor) -> F32:
    """Decode to float32 [N, K]: planes from the lowest up, then the offset, in float32.

    Raises
    ------
    BadScheme
        If the arrays do not fit the scheme.
    """
    check(tensor, "tensor")
    k = tensor.codes.shape[1]
    size = tensor.scheme.group_size
    values = np.zeros(tensor.codes.shape, np.float32)
    for plane in range(tensor.scheme.bits):
        scale = spread(tensor.scales[..., plane].astype(np.float32), k, size)
        values += np.where(tensor.codes >> plane & 1, scale, -scale)
    values += spread(tensor.tables[OFFSETS].astype(np.float32), k, size)
    return values


def from_uniform(tensor: QuantizedTensor, act_bits: int = 8) -> QuantizedTensor:
    """Convert uniform integers: alpha_i = 2^(i-1) s, z = Σ ½ s 2^i + ẑ (LUT-GEMM, equation 5).

    The conversion is exact in real arithmetic. In float16 alpha is exact where s / 2 is a normal
    number, and so is z without zero points, where it is -s / 2 (0 for 1-bit codes); with zero
    points z is rounded once, by at most 2^-11 of its size. Negative scales flip the bits, so that
    alpha is positive.

    Parameters
    ----------
    tensor : QuantizedTensor
        Of the family ``int``, groups of 32 or more.
    act_bits : int
        8 or 32, of the result's scheme.

    Returns
    -------
    QuantizedTensor
        Codes of the same bits and groups.

    Raises
    ------
    BadScheme
        If the tensor is of another family, its groups are too small or a scale overflows float16.
    """
    scheme = tensor.scheme
    fmt = format_of(scheme)
    fmt.check(tensor, "tensor")
    if scheme.group_size not in (-1, *GROUPS):
        raise BadScheme(f"scheme {scheme}: bcq has groups of 32 and more; use -1, 32, 64, 128, 256")
    scale, top = tensor.scales.astype(np.float64), fmt.max_code
    if fmt.signs_only:
        alphas, offsets = np.abs(scale)[..., None], np.zeros_like(scale)
    else:
        alphas = np.abs(scale)[..., None] * 2.0 ** np.arange(-1, scheme.bits - 1)
        zero = float(fmt.zero) if tensor.zeros is None else tensor.zeros.astype(np.float64)
        offsets = scale * (top / 2 - zero)
    if max(alphas.max(), np.abs(offsets).max()) > MAX_SCALE:
        check_scale(np.full(1, np.inf, np.float32), "tensor", fmt)
    k = tensor.codes.shape[1]
    flip = spread(scale < 0, k, scheme.group_size)
    return QuantizedTensor(
        np.where(flip, top - tensor.codes, tensor.codes).astype(np.uint8),
        alphas.astype(np.float16),
        None,
        scheme_of(scheme.bits, scheme.group_size, act_bits),
        {OFFSETS: offsets.astype(np.float16)},
    )


def _embedding(scheme: Scheme) -> Scheme:
    return Scheme(max(scheme.bits, EMBEDDING_BITS), True, group_size=scheme.group_size)


def _places(tensor: QuantizedTensor) -> list[Place]:
    (per_group,) = group_places(tensor)
    planes = [replace(per_group, plane=plane) for plane in range(tensor.scales.shape[2])]
    return [*planes, *group_places(tensor, OFFSETS)]


FAMILY = Family(
    name="bcq",
    grammar=(
        "bcq{1..8}[g{32|64|128|256}][A32]: w = sum of q signed scales + an offset per group "
        "(LUT-GEMM); A8 looks up int8 tables of activation sums, A32 float ones"
    ),
    examples=("bcq2", "bcq2g128", "bcq3g128", "bcq4g64", "bcq3g128A32"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    embedding=_embedding,
    places=_places,
)
"""Binary codes."""

"""Fine-grained codebooks ``cb2``, ``cb3``, ``cb4``: every group of 16 weights picks one of a few.

The codebooks are shared by a whole model: 4, 8 or 16 of them, each of 2^bits int8 centroids. A
group has a 4-bit sub-scale and the index of its codebook, a super-block of 16 groups a float16
scale (Gope et al., "Highly Optimized Kernels and Fine-Grained Codebooks for LLM Inference on Arm
CPUs", sections 5.2 and 5.3, where groups have 16 weights and super-blocks 256)::

    w = scale * sub * codebooks[index, code] * 2^-9         sub 0 .. 15

    bits per weight = bits + (4 + log2(codebooks)) / group + 16 / (16 * group)

that is 2.4375, 3.4375 and 4.4375 for four codebooks. ``c8`` and ``c16`` have more codebooks;
``g32`` and ``g64`` wider groups, and super-blocks still of 16 groups: ``cb3g64`` has 3.109 bits,
fewer than uniform 3-bit weights with a float16 scale per 128.

(2^-9 keeps scales near the largest weight, where float16 is precise.) Centroids of 2 and 3 bits
lie in -32 .. 32: shifted to 0 .. 64 they are the unsigned operand of ``vpmaddubsw``, and four
products with int8 activations fit int16 (4 * 64 * 127 = 32512). Sixteen centroids need a finer
grid, -63 .. 63, of which two products fit.

Rows need not fill their last super-block or group. Arrays: ``scales`` float16 [N, S],
``tables["subs"]`` and ``tables["index"]`` uint8 [N, G], ``tables["codebooks"]`` int8 [C, 2^bits],
where G = ceil(K / group) and S = ceil(G / 16). The codebooks belong to the model, so the
`nbytes` of one tensor leaves them out: 16 to 256 bytes.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import check_array, check_codes, check_tables, group_count, spread
from apq_tvm.formats.family import Family
from apq_tvm.formats.places import group_places
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.formats.superblock import SUB_BITS, SUB_MAX, SUPER, group_scales, supers
from apq_tvm.types import F32, QuantizedTensor, Scheme

NAME = "cb"
"""`Scheme.family`."""

BITS = (2, 3, 4)
"""Bits of a code."""

CODEBOOKS = (4, 8, 16)
"""How many codebooks there may be; the first is not spelled."""

GROUPS = (16, 32, 64)
"""Weights that share a sub-scale and a codebook; the first is not spelled."""

MAX_CENTROID = {2: 32, 3: 32, 4: 63}
"""Bits of a code -> largest magnitude of a centroid."""

UNIT = 2.0**-9
"""What products of sub-scale and centroid count in, relative to the super-block's scale."""

_PATTERN = re.compile(r"CB(\d+)(?:C(\d+))?(?:G(\d+))?(A\d+)?\Z")
_SPELLING = re.compile(r"cb\d(?:c(\d+))?")


def codebook_count(scheme: Scheme) -> int:
    """Codebooks that a scheme's groups choose from."""
    match = _SPELLING.match(scheme.weights)
    assert match is not None
    return int(match[1] or CODEBOOKS[0])


def parse(word: str) -> Scheme | None:
    """Read ``CB2`` or ``CB3C8G32A32``; None if it is not of this family.

    Raises
    ------
    ValueError
        With the reason.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits, count, group = int(match[1]), int(match[2] or CODEBOOKS[0]), int(match[3] or GROUPS[0])
    for what, value, possible in (
        ("codes of {} bits", bits, BITS),
        ("{} codebooks", count, CODEBOOKS),
        ("groups of {} with codebooks", group, GROUPS),
    ):
        if value not in possible:
            raise ValueError(f"{what.format(value)}; {', '.join(map(str, possible))} are possible")
    acts = parse_acts(match[4] or "")
    spelling = f"cb{bits}"
    spelling += f"c{count}" if count != CODEBOOKS[0] else ""
    spelling += f"g{group}" if group != GROUPS[0] else ""
    return Scheme(bits, False, acts, False, group, NAME, spelling)


def check_codebooks(name: str, codebooks: NDArray[np.int8], bits: int, count: int) -> None:
    """Refuse codebooks of another shape, or with centroids that kernels could not multiply.

    Raises
    ------
    BadScheme
    """
    check_array(name, codebooks, "int8", (count, 1 << bits))
    largest = int(np.abs(codebooks.astype(np.int32)).max())
    if largest > MAX_CENTROID[bits]:
        raise BadScheme(f"{name}: a centroid of magnitude {largest} exceeds {MAX_CENTROID[bits]}")


def check(tensor: QuantizedTensor, name: str) -> None:
    """Refuse a tensor whose arrays do not fit its scheme.

    Raises
    ------
    BadScheme
    """
    scheme = tensor.scheme
    if scheme.family != NAME:
        raise BadScheme(f"{name}: scheme {scheme} has no codebooks")
    n, k = check_codes(tensor, name)
    size, count = scheme.group_size, codebook_count(scheme)
    check_tables(tensor, name, "subs", "index", "codebooks")
    check_array(f"{name}: scales", tensor.scales, "float16", (n, supers(k, size)))
    per_group = (n, group_count(k, size))
    check_array(f"{name}: subs", tensor.tables["subs"], "uint8", per_group, SUB_MAX)
    check_array(f"{name}: index", tensor.tables["index"], "uint8", per_group, count - 1)
    check_codebooks(f"{name}: codebooks", tensor.tables["codebooks"], scheme.bits, count)


def dequantize(tensor: QuantizedTensor) -> F32:
    """Decode to float32 [N, K]; exact, since 11 + 4 + 6 bits fit a float32."""
    check(tensor, "tensor")
    k, size, tables = tensor.codes.shape[1], tensor.scheme.group_size, tensor.tables
    centroids = tables["codebooks"][spread(tables["index"], k, size), tensor.codes]
    scales = spread(group_scales(tensor.scales, tables["subs"]) * np.float32(UNIT), k, size)
    return np.asarray(scales * centroids.astype(np.float32), np.float32)


def nbytes(tensor: QuantizedTensor) -> int:
    """Bytes at true bits: codes, sub-scales, indices and scales; not the model's codebooks."""
    index_bits = codebook_count(tensor.scheme).bit_length() - 1
    code_bits = tensor.codes.size * tensor.scheme.bits
    group_bits = tensor.tables["subs"].size * (SUB_BITS + index_bits)
    return (code_bits + group_bits + 7) // 8 + tensor.scales.nbytes


FAMILY = Family(
    name=NAME,
    grammar=(
        "cb{2|3|4}[c{8|16}][g{32|64}][A..]: groups of 16 pick one of 4 codebooks (8, 16) that "
        "the model shares; 4-bit sub-scales in super-blocks of 16 groups"
    ),
    examples=("cb2", "cb3", "cb4", "cb2c8", "cb3g64"),
    parse=parse,
    check=check,
    dequantize=dequantize,
    nbytes=nbytes,
    places=lambda tensor: group_places(tensor, "scales", tensor.scheme.group_size * SUPER),
)
"""Codebooks shared by a model."""

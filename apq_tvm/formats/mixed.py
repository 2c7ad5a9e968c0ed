"""``mixed24``: 2-bit and 4-bit groups in one matrix, second-order scales, 16-bit outliers.

"Fast and Efficient 2-bit LLM Inference on GPU: 2/4/16-bit in a Weight Matrix with Asynchronous
Dequantization" (ICCAD 2024), sections 3.3 and 4. A *group* is 16 input channels of all output
channels; a share of the groups, `MixedOptions.ratio`, has 4-bit codes, the others 2-bit ones::

    4 bits: w = scales[n] * (code - zeros[n])
    2 bits: w = super_scale[n // 16, j] * (sub_scale[n, j] + super_zero[n // 16, j])
                * (code - sub_zero[n, j])
    and both: + outlier[n, k], mostly none

with j the number of the group among the 2-bit ones. ``codes`` uint8 [N, K] and ``scales`` float16,
``zeros`` uint8 [N, 1] are of `QuantizedTensor`; its tables are

========================  ===============  ====================================================
``wide``                  uint8 [G]        1 for groups of 4 bits, G = ceil(K / 16)
``sub_scales``            uint8 [N, G2]    4 bits; 3 bits in two of every three groups
``sub_zeros``             uint8 [N, G2]    2 bits
``super_scales``          float16 [B, G2]  of 16 output channels, B = ceil(N / 16)
``super_zeros``           uint8 [B, G2]    4 bits in a byte
``row_start``             int32 [N + 1]    CSR: a row's outliers are row_start[n]..row_start[n + 1]
``columns``, ``outliers``  int32, float16  CSR: input channel, and what is added to the dense value
========================  ===============  ====================================================

- Scale clipping (3.3): of three 2-bit groups the first keeps 4 bits of sub-scale and the others 3,
  so that their zeros (3 * 2) and sub-scales fill 16 bits of every output channel.
- Zero padding (3.3): a second-order zero takes a byte.
- Second-order zeros are added, not subtracted: scales are positive, so the grid of eq. (2) to (5)
  would never have a zero point above 0, and its levels below the smallest scale would be lost.
- Outliers are what the dense part misses ("dense and sparse" decomposition), so that both parts
  may be computed apart. There are always `Sizes.outliers` of them: the kernels' shapes
  follow from scheme and shape alone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.errors import BadScheme
from apq_tvm.formats.arrays import check_array
from apq_tvm.formats.family import Family
from apq_tvm.formats.places import Place, group_places
from apq_tvm.formats.spelling import parse_acts
from apq_tvm.types import F32, Array, QuantizedTensor, Scheme

GROUP = 16
"""Input channels of a group, g1."""

SUPER = 16
"""Output channels that share a second-order scale, g2."""

TRIPLE = 3
"""2-bit groups whose zeros and sub-scales share 16 bits."""

SUB_BITS = (4, 3, 3)
"""Bits of the sub-scales of a triple."""

DEFAULT_RATIO = 25.0
DEFAULT_OUTLIERS = 0.2
MAX_OUTLIERS = 5.0

_WORD = re.compile(r"MIXED24(?:R(\d+(?:\.\d+)?))?(?:O(\d+(?:\.\d+)?))?(A\d+)?\Z")
_SPELT = re.compile(r"mixed24(?:r([\d.]+))?(?:o([\d.]+))?\Z")


@dataclass(frozen=True)
class MixedOptions:
    """What the spelling says.

    Parameters
    ----------
    ratio : float
        Per cent of the groups that have 4 bits, 0..100.
    outliers : float
        Per cent of all weights that are kept in 16 bits, 0..5.
    """

    ratio: float = DEFAULT_RATIO
    outliers: float = DEFAULT_OUTLIERS

    def __str__(self) -> str:
        ratio = "" if self.ratio == DEFAULT_RATIO else f"r{self.ratio:g}"
        outliers = "" if self.outliers == DEFAULT_OUTLIERS else f"o{self.outliers:g}"
        return f"mixed24{ratio}{outliers}"


def options_of(scheme: Scheme) -> MixedOptions:
    """Read the options of a scheme of this family.

    Raises
    ------
    BadScheme
        If it is of another family or was built by hand with a wrong spelling.
    """
    match = _SPELT.match(scheme.weights)
    if scheme.family != "mixed" or match is None:
        raise BadScheme(f"scheme {scheme} is no mixed24[r{{ratio}}][o{{outliers}}]")
    return _options(match[1], match[2])


def _options(ratio: str | None, outliers: str | None) -> MixedOptions:
    return MixedOptions(
        DEFAULT_RATIO if ratio is None else float(ratio),
        DEFAULT_OUTLIERS if outliers is None else float(outliers),
    )


@dataclass(frozen=True)
class Sizes:
    """Counts that follow from a scheme and a shape.

    Parameters
    ----------
    n, k : int
    groups, wide, narrow : int
        All, of 4 bits, of 2 bits.
    outliers : int
        At most every weight of the 2-bit groups.
    """

    n: int
    k: int
    groups: int
    wide: int
    narrow: int
    outliers: int

    @classmethod
    def of(cls, scheme: Scheme, n: int, k: int) -> Sizes:
        """Counts of an [n, k] matrix."""
        options = options_of(scheme)
        groups = -(-k // GROUP)
        wide = math.floor(groups * options.ratio / 100 + 0.5)
        # A short last group counts as if it were of 2 bits: fewer outliers than weights always fit.
        narrow_weights = n * max(0, (groups - wide) * GROUP - (groups * GROUP - k))
        outliers = math.floor(n * k * options.outliers / 100 + 0.5)
        return cls(n, k, groups, wide, groups - wide, min(outliers, narrow_weights))

    @property
    def triples(self) -> int:
        """Triples of 2-bit groups, the last one may be short."""
        return -(-self.narrow // TRIPLE)

    @property
    def super_rows(self) -> int:
        """Stretches of `SUPER` output channels."""
        return -(-self.n // SUPER)


def sub_scale_bits(narrow: int) -> NDArray[np.int64]:
    """Bits of the sub-scale of every 2-bit group: 4, 3, 3, 4, 3, 3, ..."""
    return np.resize(np.array(SUB_BITS), narrow)


def average_bits(scheme: Scheme) -> float:
    """Average bits of a weight by eq. (10), and 30 more for every outlier (section 4.2).

    It charges 4-bit groups nothing for scale and zero point, and knows no row pointers and no order
    of groups; `apq_tvm.formats.bits_per_weight` counts all of them.
    """
    options = options_of(scheme)
    alpha = 1 - options.ratio / 100
    narrow = 2 + (2 + 4) / GROUP + (4 + 16) / (GROUP * SUPER)
    outliers = options.outliers / 100 if alpha else 0  # they are of 2-bit groups
    return alpha * narrow + (1 - alpha) * 4 + outliers * (16 + 16 - 2)


def note(scheme: Scheme) -> str:
    """One line about the bits, for manifests."""
    return f"{average_bits(scheme):.2f} bits by eq. (10) of the paper"


def wide_columns(wide: NDArray[np.uint8], k: int) -> NDArray[np.bool_]:
    """bool [K]: input channels of 4-bit groups."""
    return np.repeat(wide.astype(bool), GROUP)[:k]


def narrow_steps(tensor: QuantizedTensor) -> F32:
    """float32 [N, G2]: first-order scales of the 2-bit groups."""
    t, n = tensor.tables, len(tensor.codes)
    scale = np.repeat(t["super_scales"].astype(np.float32), SUPER, axis=0)[:n]
    zero = np.repeat(t["super_zeros"], SUPER, axis=0)[:n]
    steps: F32 = (t["sub_scales"] + zero).astype(np.float32) * scale
    return steps


def outlier_rows(tensor: QuantizedTensor) -> NDArray[np.int64]:
    """Output channel of every outlier."""
    return np.repeat(np.arange(len(tensor.codes)), np.diff(tensor.tables["row_start"]))


def dense_part(tensor: QuantizedTensor) -> F32:
    """float32 [N, K]: what the codes mean without outliers; exact."""
    n, k = tensor.codes.shape
    wide = wide_columns(tensor.tables["wide"], k)
    steps = np.empty((n, k), np.float32)
    zeros = np.empty((n, k), np.uint8)
    narrow = int((~wide).sum())
    steps[:, ~wide] = np.repeat(narrow_steps(tensor), GROUP, axis=1)[:, :narrow]
    zeros[:, ~wide] = np.repeat(tensor.tables["sub_zeros"], GROUP, axis=1)[:, :narrow]
    assert tensor.zeros is not None
    steps[:, wide] = tensor.scales.astype(np.float32)
    zeros[:, wide] = tensor.zeros
    values: F32 = (tensor.codes.astype(np.float32) - zeros) * steps
    return values


def _dequantize(tensor: QuantizedTensor) -> F32:
    _check(tensor, "tensor")
    values = dense_part(tensor)
    values[outlier_rows(tensor), tensor.tables["columns"]] += tensor.tables["outliers"]
    return values


def _nbytes(tensor: QuantizedTensor) -> int:
    """Packed bytes: codes and triples' 16 bits per row, supers, scales, group order, CSR."""
    n, k = map(int, tensor.codes.shape)
    sizes = Sizes.of(tensor.scheme, n, k)
    wide = int(wide_columns(tensor.tables["wide"], k).sum())
    codes = (n * (2 * (k - wide) + 4 * wide) + 7) // 8
    triples = 2 * n * sizes.triples
    supers = (2 + 1) * sizes.super_rows * sizes.narrow
    rows = (2 + 1) * n if sizes.wide else 0
    order = 2 * sizes.groups
    index = 2 if k <= 1 << 16 else 4
    sparse = (2 + index) * sizes.outliers + 4 * (n + 1) if sizes.outliers else 0
    return codes + triples + supers + rows + order + sparse


def _check(tensor: QuantizedTensor, name: str) -> None:
    """Raise BadScheme where arrays do not fit the scheme."""
    codes, scheme, t = tensor.codes, tensor.scheme, tensor.tables
    if codes.dtype != np.uint8 or codes.ndim != 2 or codes.size == 0:
        raise BadScheme(
            f"{name}: codes are {codes.dtype} {list(codes.shape)}; uint8 [N, K] is needed"
        )
    n, k = codes.shape
    sizes = Sizes.of(scheme, n, k)
    if tensor.zeros is None:
        raise BadScheme(f"{name}: {scheme} needs the zero points of its 4-bit groups")
    rows, narrow = (sizes.super_rows, sizes.narrow), (n, sizes.narrow)
    arrays: dict[str, tuple[Array | None, str, tuple[int, ...]]] = {
        "scales": (tensor.scales, "float16", (n, 1)),
        "zeros": (tensor.zeros, "uint8", (n, 1)),
        "wide": (t.get("wide"), "uint8", (sizes.groups,)),
        "sub_scales": (t.get("sub_scales"), "uint8", narrow),
        "sub_zeros": (t.get("sub_zeros"), "uint8", narrow),
        "super_scales": (t.get("super_scales"), "float16", rows),
        "super_zeros": (t.get("super_zeros"), "uint8", rows),
        "row_start": (t.get("row_start"), "int32", (n + 1,)),
        "columns": (t.get("columns"), "int32", (sizes.outliers,)),
        "outliers": (t.get("outliers"), "float16", (sizes.outliers,)),
    }
    for key, (array, dtype, shape) in arrays.items():
        check_array(f"{name}: {key} of {scheme} [{n}, {k}]", array, dtype, shape)
    _check_ranges(tensor, sizes, name)


def _check_ranges(tensor: QuantizedTensor, sizes: Sizes, name: str) -> None:
    t, codes = tensor.tables, tensor.codes
    if t["wide"].max() > 1 or int(t["wide"].sum()) != sizes.wide:
        raise BadScheme(
            f"{name}: {int(t['wide'].sum())} of {sizes.groups} groups have 4 bits; "
            f"{tensor.scheme} wants {sizes.wide}"
        )
    wide = wide_columns(t["wide"], sizes.k)
    most = (1 << sub_scale_bits(sizes.narrow)) - 1
    assert tensor.zeros is not None
    limits: tuple[tuple[str, Array, Any], ...] = (
        ("a 2-bit code", codes[:, ~wide], 3),
        ("a 4-bit code", codes[:, wide], 15),
        ("a zero point", tensor.zeros, 15),
        ("a 2-bit zero point", t["sub_zeros"], 3),
        ("a second-order zero", t["super_zeros"], 15),
        ("a sub-scale", t["sub_scales"], most),
    )
    for what, array, limit in limits:
        if (array > limit).any():
            raise BadScheme(f"{name}: {what} of {tensor.scheme} exceeds its bits")
    start, columns = t["row_start"], t["columns"]
    if start[0] != 0 or start[-1] != sizes.outliers or (np.diff(start) < 0).any():
        raise BadScheme(f"{name}: row_start must rise from 0 to {sizes.outliers}")
    if sizes.outliers:
        if columns.min() < 0 or columns.max() >= sizes.k or wide[columns].any():
            raise BadScheme(f"{name}: an outlier is not in a 2-bit group")
        flat = outlier_rows(tensor) * sizes.k + columns
        if (np.diff(flat) <= 0).any():
            raise BadScheme(f"{name}: outliers must be in rising order, one per weight")


def _parse(word: str) -> Scheme | None:
    if not word.startswith("MIXED"):
        return None
    match = _WORD.match(word)
    if match is None:
        raise ValueError("mixed24[r{per cent of 4-bit groups}][o{per cent of outliers}] is known")
    options = _options(match[1], match[2])
    if not 0 <= options.ratio <= 100:
        raise ValueError(f"{options.ratio:g} % of 4-bit groups; 0..100 are possible")
    if not 0 <= options.outliers <= MAX_OUTLIERS:
        raise ValueError(f"{options.outliers:g} % of outliers; 0..{MAX_OUTLIERS:g} are possible")
    acts = parse_acts(match[3] or "")
    return Scheme(4, True, acts, family="mixed", weights=str(options))


def _places(tensor: QuantizedTensor) -> list[Place]:
    n, k = tensor.codes.shape
    places = group_places(tensor, "scales", -1)
    if not tensor.tables["super_scales"].size:
        return places
    narrow = np.cumsum(tensor.tables["wide"] == 0) - 1  # of a 2-bit group: its number among them
    columns = np.maximum(narrow, 0)[np.arange(k) // GROUP]
    return [*places, Place("super_scales", np.arange(n) // SUPER, columns)]


FAMILY = Family(
    name="mixed",
    grammar=(
        "mixed24[r{ratio}][o{outliers}]: 2-bit and 4-bit groups of 16, second-order scales; per "
        "cent of 4-bit groups (25), per cent of weights kept in 16 bits (0.2)"
    ),
    examples=("mixed24", "mixed24o0", "mixed24r50", "mixed24r10o0.5"),
    parse=_parse,
    check=_check,
    dequantize=_dequantize,
    nbytes=_nbytes,
    note=note,
    places=_places,
    top_codes=lambda t: np.where(wide_columns(t.tables["wide"], t.codes.shape[1]), 15, 3),
)
"""2, 4 and 16 bits in one matrix."""

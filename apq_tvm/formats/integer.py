"""Integer weight formats: what a block is, its size, its numpy reference and its error bound.

A block is one group of g weights along K: g codes of `bits` bits, a float16 scale and, with zero
points, one byte of zero point. It means::

    w = scale * (code - zero)          zero = 2^(bits-1) without zero points
    w = scale * (2 * code - 1)         bits = 1 without zero points

A scale may be negative: the symmetric code range -2^(bits-1) .. 2^(bits-1)-1 reaches one step
further on its negative side, and the sign says which side of the group needs it (ggml's Q4_0 does
the same). `apq_tvm.quantizers` chooses better codes than the plain rounding of `quantize_ref`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats.arrays import check_array, check_codes, group_count, spread
from apq_tvm.formats.family import Family
from apq_tvm.formats.levels import Levels
from apq_tvm.formats.spelling import ACT_BITS, check_group, either
from apq_tvm.types import F32, QuantizedTensor, Scheme

BITS = tuple(range(1, 9))
"""Weight bits."""

SCALE_BITS = 16
"""Bits of one float16 scale."""

ROW_SUMS = "row_sums"
"""Array that layers with asymmetric activations have beside the packed ones: `row_sums`."""

PAIR_SUM, PAIR_MOST = "pair_sum", 152
"""A detail of 8-bit codes with one scale a row: what no two of columns 2k and 2k + 1 exceed
together, in size."""

PAIR_INPUT = 32767 // PAIR_MOST
"""215: unsigned bytes up to it and two such codes make products whose sum is an int16, so that
x86's ``vpmaddubsw`` is exact. The two limits take a quarter of a bit each from weights and from
activations, where 128 and 255 take half a bit from weights: 1 - cosine of EfficientNet-Lite0 to 2
was 0.98, 0.97 and 0.85 thousandths so, 1.3 of the first with those, 0.7, 1.0 and 0.7 without."""

ZERO_BITS = 8
"""Bits of one zero point."""

MAX_SCALE = 65504.0
"""Largest finite float16."""

MIN_SCALE = 2.0**-24
"""Smallest positive float16. A group that is not all zero never gets a smaller scale."""

_LOOKED_AT = 1 << 16
"""Codes at a time: most tensors have a larger pair among their first."""

_PATTERN = re.compile(r"W(\d+)(Z?)A(\d+)(T?)(?:G(\d+))?\Z")


@dataclass(frozen=True)
class IntegerFormat:
    """Integers of 1..8 bits, symmetric or with zero points.

    Parameters
    ----------
    bits : int
        1..8.
    zero_points : bool
        True if every group has its own zero point, 0 .. 2^bits - 1.
    """

    bits: int
    zero_points: bool

    @property
    def name(self) -> str:
        """``W4`` or ``W4z``: how a scheme string starts."""
        return f"W{self.bits}{'z' if self.zero_points else ''}"

    @property
    def max_code(self) -> int:
        """2^bits - 1."""
        return (1 << self.bits) - 1

    @property
    def zero(self) -> int:
        """Code that means 0 without zero points. 1-bit codes mean -1 and +1 and have none."""
        return 1 << (self.bits - 1)

    @property
    def signs_only(self) -> bool:
        """True for W1, whose codes mean -1 and +1."""
        return self.bits == 1 and not self.zero_points

    @property
    def levels(self) -> Levels:
        """What codes stand for; with zero points, before these are taken from them."""
        if self.signs_only:
            return Levels((-1, 1))
        least = 0 if self.zero_points else -self.zero
        return Levels(tuple(range(least, least + self.max_code + 1)))

    def block_bits(self, group_size: int) -> int:
        """Bits of one block of `group_size` codes, scale and zero point included."""
        zero = ZERO_BITS if self.zero_points else 0
        return group_size * self.bits + SCALE_BITS + zero

    def bits_per_weight(self, k: int, group_size: int) -> float:
        """Bits per weight of a row of `k` codes, scales and zero points included."""
        per_group = self.block_bits(0)
        return self.bits + per_group * group_count(k, group_size) / k

    def check(self, tensor: QuantizedTensor, name: str) -> None:
        """Refuse a tensor whose arrays are not blocks of this format.

        Raises
        ------
        BadScheme
            If scheme, shapes, dtypes or ranges do not fit, with the tensor's name.
        """
        scheme = tensor.scheme
        key = (scheme.family, scheme.bits, scheme.zero_points)
        if key != ("int", self.bits, self.zero_points):
            raise BadScheme(f"{name}: scheme {scheme} is not of format {self.name}")
        n, k = check_codes(tensor, name)
        shape = (n, group_count(k, scheme.group_size))
        check_array(f"{name}: scales", tensor.scales, "float16", shape)
        if tensor.zeros is not None:
            check_array(f"{name}: zeros", tensor.zeros, "uint8", shape, self.max_code)

    def plain_parameters(self, lo: F32, hi: F32) -> tuple[F32, F32]:
        """Step and zero point of plain rounding, from the extremes of groups.

        Parameters
        ----------
        lo, hi : float32, any equal shape
            Least and largest weight of each group.

        Returns
        -------
        step : float32
            Not negative, a float16 value. 0 only if the group is all zero.
        zero : float32
            Integers. Decoded values are ``step * u``, u in -zero .. max_code - zero. Symmetric
            groups whose largest magnitude is positive get ``2^(bits-1) - 1``: the mirror image
            that a negative scale stands for.
        """
        if self.zero_points:
            step = round_scale(_span(lo, hi) / np.float32(self.max_code))
            down = np.minimum(lo, np.float32(0))
            zero = np.rint(np.divide(-down, step, out=np.zeros_like(step), where=step > 0))
            return step, np.clip(zero, 0, self.max_code).astype(np.float32)
        absmax = np.asarray(np.maximum(-lo, hi), np.float32)
        step = round_scale(absmax / np.float32(self.zero))
        return step, np.where(hi > -lo, self.zero - 1, self.zero).astype(np.float32)

    def quantize_ref(self, weight: F32, group_size: int, name: str = "weight") -> QuantizedTensor:
        """Plain rounding: scales from each group's maximum, codes to nearest.

        Parameters
        ----------
        weight : float32 [N, K]
        group_size : int
            Along K, -1 for a whole row.
        name : str
            For errors.

        Raises
        ------
        UnsupportedModel
            If a weight is NaN or infinite.
        BadScheme
            If the group size does not exist or a scale overflows float16.
        """
        scheme = Scheme(self.bits, self.zero_points, group_size=group_size)
        try:
            check_group(group_size)
        except ValueError as reason:
            raise BadScheme(f"{name}: scheme {scheme}: {reason}") from None
        check_weight(weight, name)
        n, k = weight.shape
        size = k if group_size == -1 else group_size
        groups = group_count(k, group_size)
        codes = np.empty((n, k), np.uint8)
        scales = np.empty((n, groups), np.float16)
        zeros = np.empty((n, groups), np.uint8)
        for g in range(groups):
            part = weight[:, g * size : (g + 1) * size]
            if self.signs_only:
                scale, zero = round_scale(mean_magnitude(part, 1)), np.zeros((n, 1), np.float32)
                code = (part > 0).astype(np.float32)
            else:
                lo, hi = part.min(axis=1, keepdims=True), part.max(axis=1, keepdims=True)
                step, zero = self.plain_parameters(lo, hi)
                code, scale = encode(part, step, zero, self)
            check_scale(scale, name, self)
            codes[:, g * size : (g + 1) * size] = code
            scales[:, g], zeros[:, g] = scale[:, 0], zero[:, 0]
        return QuantizedTensor(codes, scales, zeros if self.zero_points else None, scheme)

    def dequantize_ref(self, tensor: QuantizedTensor) -> F32:
        """Decode to float32 [N, K]; exact, since 11 x 8 bits fit a float32.

        Raises
        ------
        BadScheme
            If the tensor is not of this format.
        """
        self.check(tensor, "tensor")
        k = tensor.codes.shape[1]
        size = tensor.scheme.group_size
        values = tensor.codes.astype(np.float32)
        if self.signs_only:
            values = 2 * values - 1
        elif tensor.zeros is None:
            values -= self.zero
        else:
            values -= spread(tensor.zeros.astype(np.float32), k, size)
        values *= spread(tensor.scales.astype(np.float32), k, size)
        return values


FORMATS = tuple(IntegerFormat(bits, zero) for bits in BITS for zero in (False, True))
"""Every integer format."""


def parse_integer(word: str) -> Scheme | None:
    """Read an upper-case scheme of uniform integers; None if it is none.

    Raises
    ------
    ValueError
        With the reason, if there are no such bits, activations or groups.
    """
    match = _PATTERN.match(word)
    if match is None:
        return None
    bits, act = int(match[1]), int(match[3])
    zero_points, per_token = bool(match[2]), bool(match[4])
    group = -1 if match[5] is None else int(match[5])
    if bits not in BITS:
        raise ValueError(f"weights of {bits} bits; {BITS[0]}..{BITS[-1]} are possible")
    if act not in ACT_BITS:
        raise ValueError(f"activations of {act} bits; {either(ACT_BITS)} are possible")
    check_group(group)
    if per_token and act > 8:
        raise ValueError(f"t is for integer activations; A{act} has no activation scales")
    return Scheme(bits, zero_points, act, per_token and group != -1, group)


def format_of(scheme: Scheme) -> IntegerFormat:
    """Integer format of a scheme's weights.

    Raises
    ------
    BadScheme
        If there is none.
    """
    for fmt in FORMATS:
        if ("int", fmt.bits, fmt.zero_points) == (scheme.family, scheme.bits, scheme.zero_points):
            return fmt
    raise BadScheme(f"scheme {scheme}: weights of {scheme.bits} bits; 1..8 are possible")


def pairs_fit(tensor: QuantizedTensor) -> bool:
    """Whether a tensor has the detail `PAIR_SUM`."""
    scheme = tensor.scheme
    if scheme.bits != 8 or scheme.zero_points or scheme.group_size != -1:
        return False
    rows = max(1, _LOOKED_AT // tensor.codes.shape[1])
    for start in range(0, len(tensor.codes), rows):
        sizes = np.abs(tensor.codes[start : start + rows].astype(np.int16) - 128)
        even = sizes[:, 0::2]
        even[:, : sizes.shape[1] // 2] += sizes[:, 1::2]
        if even.max() > PAIR_MOST:
            return False
    return True


def round_scale(scale: F32) -> F32:
    """Round scales that are not negative to float16 values, kept as float32.

    Positive ones never become 0 (`MIN_SCALE` instead); too large ones become infinite, which
    `check_scale` refuses.
    """
    with np.errstate(over="ignore"):
        rounded = scale.astype(np.float16).astype(np.float32)
    return np.where((scale > 0) & (rounded == 0), np.float32(MIN_SCALE), rounded)


def encode(weight: F32, step: F32, zero: F32, fmt: IntegerFormat) -> tuple[F32, F32]:
    """Codes and signed scales of groups, from the parameters that `plain_parameters` describes.

    Parameters
    ----------
    weight : float32
    step, zero : float32
        Broadcast to `weight`.
    fmt : IntegerFormat

    Returns
    -------
    codes : float32
        Integers 0 .. max_code, to nearest.
    scale : float32
        `step` with the sign that makes ``scale * (code - zero)`` the decoded weight.
    """
    usable = np.isfinite(step) & (step > 0)
    code = np.divide(weight, step, out=np.zeros_like(weight), where=usable)
    np.rint(code, out=code)
    np.clip(code, -zero, fmt.max_code - zero, out=code)
    if fmt.zero_points:
        return code + zero, step
    mirrored = zero != fmt.zero
    return np.where(mirrored, fmt.zero - code, code + fmt.zero), np.where(mirrored, -step, step)


def mean_magnitude(weight: F32, axis: int) -> F32:
    """Mean |weight| along an axis that is kept: the best scale of codes -1 and +1."""
    mean = np.abs(weight).mean(axis=axis, keepdims=True, dtype=np.float64)
    return np.asarray(mean, np.float32)


def check_weight(weight: F32, name: str) -> None:
    """Refuse a weight that is no finite float32 matrix.

    Raises
    ------
    UnsupportedModel
        With the tensor's name and the first bad place.
    """
    if weight.dtype != np.float32 or weight.ndim != 2 or weight.size == 0:
        raise UnsupportedModel(
            f"weight {name!r} is {weight.dtype} {list(weight.shape)}; float32 [N, K] with "
            "N, K >= 1 is needed"
        )
    # One sum is finite unless a value is not, or the sum overflows: only then look at each.
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.einsum("nk->", weight)
    if np.isfinite(total):
        return
    bad = ~np.isfinite(weight)
    if bad.any():
        row, col = np.unravel_index(int(bad.argmax()), bad.shape)
        raise UnsupportedModel(
            f"weight {name!r}: {int(bad.sum())} of {weight.size} values are NaN or infinite, the "
            f"first is {weight[row, col]} at [{row}, {col}]; such weights cannot be quantized"
        )


def check_scale(scale: F32, name: str, fmt: IntegerFormat) -> None:
    """Refuse scales that overflow float16.

    Raises
    ------
    BadScheme
        With the tensor's name, the limit and the remedy.
    """
    if not np.isfinite(scale).all():
        raise BadScheme(
            f"{name}: a scale of format {fmt.name} exceeds {MAX_SCALE:.0f}, the largest float16, "
            "because its weights are too large; keep this tensor float (--tensor-type NAME=float)"
        )


def _span(lo: F32, hi: F32) -> F32:
    """Width of the range that a group's codes must cover: it contains 0."""
    zero = np.float32(0)
    with np.errstate(over="ignore"):
        return np.asarray(np.maximum(hi, zero) - np.minimum(lo, zero), np.float32)


FAMILY = Family(
    name="int",
    grammar=(
        "W{bits}[z]A{1..8|16|32}[t][g{group}]: z zero points per group, t one activation scale per "
        "token, no g one scale per row"
    ),
    examples=("W4A8g32", "W4zA8g32", "W8A8", "W8A8g32", "W4A16g128", "W3A8g64", "W4A4g32"),
    parse=parse_integer,
    check=lambda tensor, name: format_of(tensor.scheme).check(tensor, name),
    dequantize=lambda tensor: format_of(tensor.scheme).dequantize_ref(tensor),
    embedding=lambda scheme: scheme,
    levels=lambda scheme: format_of(scheme).levels,
    details=lambda tensor: ((PAIR_SUM, PAIR_MOST),) if pairs_fit(tensor) else (),
)
"""Uniform integers."""


def row_sums(tensor: QuantizedTensor) -> F32:
    """float32 [N]: the sum of what the codes of each row mean, without decoding them."""
    k = tensor.codes.shape[1]
    size = k if tensor.scheme.group_size == -1 else tensor.scheme.group_size
    starts = np.arange(0, k, size)
    sums = np.add.reduceat(tensor.codes, starts, axis=1, dtype=np.int64)
    counts = np.minimum(starts + size, k) - starts
    fmt = format_of(tensor.scheme)
    zeros = fmt.zero if tensor.zeros is None else tensor.zeros.astype(np.int64)
    meant = (sums - zeros * counts) * tensor.scales.astype(np.float64)
    return np.asarray(meant.sum(1), np.float32)

"""Integer formats: what codes mean, how large blocks are, how far plain rounding may be off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import FORMATS, IntegerFormat, bits_per_weight, dequantize, format_of, nbytes
from apq_tvm.formats.integer import MAX_SCALE, MIN_SCALE
from apq_tvm.formats.scheme import GROUP_SIZES
from apq_tvm.types import QuantizedTensor, Scheme

GROUPS = (*GROUP_SIZES, -1)
ALL = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def group_extremes(w: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest weight of the group that each weight is in."""
    lo, hi = np.empty_like(w), np.empty_like(w)
    for start in range(0, w.shape[1], size):
        part = w[:, start : start + size]
        lo[:, start : start + size] = part.min(axis=1, keepdims=True)
        hi[:, start : start + size] = part.max(axis=1, keepdims=True)
    return lo, hi


def error_bound(fmt: IntegerFormat, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """Largest |weight - decoded| of `quantize_ref` in a group with extremes `lo` and `hi`.

    Symmetric: the step is absmax / 2^(bits-1); the side that reaches one code less far can lose one
    whole step. Zero points: half a step for the code, half for the zero point that is rounded too.
    W1 decodes to the mean magnitude. The rounding of the scale itself (2^-11 of a normal float16,
    2^-25 of a subnormal one) is amplified by the largest code.
    """
    absmax = np.maximum(np.abs(lo), np.abs(hi))
    if fmt.signs_only:
        step, reach = absmax, 1
    elif fmt.zero_points:
        with np.errstate(over="ignore"):
            width = np.asarray(np.maximum(hi, 0) - np.minimum(lo, 0), np.float32)
        step, reach = width / np.float32(fmt.max_code), fmt.max_code
    else:
        step, reach = absmax / np.float32(fmt.zero), fmt.zero
    rounding = np.maximum(step * 2.0**-11, 2.0**-25)
    return np.asarray(step + 2 * reach * rounding, np.float32)


def assert_within_bound(fmt: IntegerFormat, w: np.ndarray, group: int) -> QuantizedTensor:
    tensor = fmt.quantize_ref(w, group)
    fmt.check(tensor, "w")
    size = w.shape[1] if group == -1 else group
    bound = error_bound(fmt, *group_extremes(w, size))
    error = np.abs(dequantize(tensor).astype(np.float64) - w)
    assert (error <= bound).all(), f"{fmt.name} off by {(error / bound).max()} of its bound"
    return tensor


def test_formats_are_all_there_once() -> None:
    assert len({fmt.name for fmt in FORMATS}) == len(FORMATS) == 16
    for fmt in FORMATS:
        assert format_of(Scheme(fmt.bits, fmt.zero_points)) is fmt
    with pytest.raises(BadScheme, match="9 bits"):
        format_of(Scheme(9))


@ALL
@pytest.mark.parametrize("group", GROUPS)
def test_error_bound_on_normal_weights(fmt: IntegerFormat, group: int) -> None:
    w = np.random.default_rng(fmt.bits).normal(size=(7, 300)).astype(np.float32)
    assert_within_bound(fmt, w, group)


@given(
    fmt=st.sampled_from(FORMATS),
    group=st.sampled_from(GROUPS),
    w=arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 70)),
        elements=st.floats(-32000, 32000, width=32),
    ),
)
@settings(max_examples=300)
def test_error_bound_on_any_weights(fmt: IntegerFormat, group: int, w: np.ndarray) -> None:
    assert_within_bound(fmt, w, group)


@ALL
def test_codes_mean_what_types_say(fmt: IntegerFormat) -> None:
    rng = np.random.default_rng(0)
    n, k, g = 3, 70, 32
    codes = rng.integers(0, fmt.max_code + 1, (n, k), dtype=np.uint8)
    scales = rng.normal(size=(n, 3)).astype(np.float16)
    zeros = rng.integers(0, fmt.max_code + 1, (n, 3), dtype=np.uint8) if fmt.zero_points else None
    scheme = Scheme(fmt.bits, fmt.zero_points, group_size=g)
    got = dequantize(QuantizedTensor(codes, scales, zeros, scheme))
    assert got.dtype == np.float32
    for row in range(n):
        for col in range(k):
            scale, code = float(scales[row, col // g]), int(codes[row, col])
            if zeros is not None:
                want = scale * (code - int(zeros[row, col // g]))
            elif fmt.bits == 1:
                want = scale * (2 * code - 1)
            else:
                want = scale * (code - 2 ** (fmt.bits - 1))
            assert got[row, col] == want


@ALL
@pytest.mark.parametrize("group", GROUPS)
def test_size_counts_scales_and_zeros(fmt: IntegerFormat, group: int) -> None:
    k = 512
    tensor = fmt.quantize_ref(np.ones((2, k), np.float32), group)
    size = k if group == -1 else group
    extra = 24 if fmt.zero_points else 16
    assert bits_per_weight(tensor) == fmt.bits + extra / size
    assert fmt.block_bits(size) == size * fmt.bits + extra
    assert nbytes(tensor) * 8 == bits_per_weight(tensor) * tensor.codes.size


def test_short_last_group_counts_as_a_group() -> None:
    fmt = format_of(Scheme(4))
    tensor = fmt.quantize_ref(np.ones((2, 33), np.float32), 32)
    assert tensor.scales.shape == (2, 2)
    assert bits_per_weight(tensor) == 4 + 2 * 16 / 33


@ALL
def test_zero_groups_are_exact(fmt: IntegerFormat) -> None:
    w = np.zeros((2, 64), np.float32)
    w[0, :32] = 1
    tensor = fmt.quantize_ref(w, 32)
    assert not dequantize(tensor)[1].any() and not dequantize(tensor)[0, 32:].any()


@pytest.mark.parametrize("fmt", [f for f in FORMATS if not f.signs_only], ids=lambda f: f.name)
@pytest.mark.parametrize("sign", (-1, 1))
def test_largest_magnitude_is_kept(fmt: IntegerFormat, sign: int) -> None:
    """Symmetric codes reach it with either sign of the scale, zero points with their range; W1
    keeps the mean magnitude."""
    w = np.zeros((1, 32), np.float32)
    w[0, 3] = 0.5 * sign
    got = dequantize(fmt.quantize_ref(w, 32))
    np.testing.assert_allclose(got, w, atol=0.5 * 2.0**-11)
    assert not got[0, :3].any()


def test_signs_keep_the_mean_magnitude() -> None:
    w = np.array([[1.0, -2.0, 3.0, -6.0]], np.float32)
    np.testing.assert_array_equal(dequantize(FORMATS[0].quantize_ref(w, -1)), [[3, -3, 3, -3]])


@ALL
def test_tiny_weights_do_not_vanish_by_rounding_of_scales(fmt: IntegerFormat) -> None:
    """Weights of the size of float16 subnormals get the smallest scale, not 0."""
    w = np.full((1, 16), MIN_SCALE, np.float32)
    assert dequantize(assert_within_bound(fmt, w, 16)).any()
    assert_within_bound(fmt, np.full((1, 16), 1e-42, np.float32), 16)


@ALL
def test_scales_that_overflow_are_refused_by_name(fmt: IntegerFormat) -> None:
    reach = 1 if fmt.signs_only else fmt.max_code if fmt.zero_points else fmt.zero
    fits = np.full((1, 16), MAX_SCALE * reach, np.float32)
    assert_within_bound(fmt, fits, 16)
    with pytest.raises(BadScheme, match=r"embed.*exceeds 65504.*float"):
        fmt.quantize_ref(2 * fits, 16, "embed")
    with pytest.raises(BadScheme, match="embed"):
        fmt.quantize_ref(np.array([[-3e38, 3e38]], np.float32), 16, "embed")


@ALL
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_weights_that_are_not_finite_are_refused_by_name(fmt: IntegerFormat, bad: float) -> None:
    w = np.zeros((4, 40), np.float32)
    w[2, 33] = bad
    with pytest.raises(UnsupportedModel, match=r"'embed': 1 of 160 .* at \[2, 33\]"):
        fmt.quantize_ref(w, 32, "embed")


@pytest.mark.parametrize("shape,dtype", (((4,), "f4"), ((0, 4), "f4"), ((2, 2), "f8")))
def test_what_is_no_float32_matrix_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(UnsupportedModel, match="'embed' is float"):
        FORMATS[6].quantize_ref(np.zeros(shape, dtype), 32, "embed")


def test_large_finite_weights_are_not_taken_for_infinite() -> None:
    """Their sum overflows, they do not; only their scale does."""
    with pytest.raises(BadScheme, match="exceeds 65504"):
        FORMATS[6].quantize_ref(np.full((2, 2), 3e38, np.float32), 32)


def test_unknown_group_is_refused_by_name() -> None:
    with pytest.raises(BadScheme, match=r"embed.*groups of 17"):
        FORMATS[6].quantize_ref(np.zeros((1, 34), np.float32), 17, "embed")


def test_check_refuses_what_is_no_block() -> None:
    fmt = format_of(Scheme(4, True))
    good = fmt.quantize_ref(np.ones((3, 40), np.float32), 32)
    assert good.zeros is not None
    bad = {
        "is not of format W4z": replace(good, scheme=Scheme(4, group_size=32)),
        "code 16 exceeds 15": replace(good, codes=np.full((3, 40), 16, np.uint8)),
        "codes are int8": replace(good, codes=good.codes.astype(np.int8)),
        "scales is float32": replace(good, scales=good.scales.astype(np.float32)),
        r"scales is float16 \[3, 1\]": replace(good, scales=good.scales[:, :1]),
        "zero points": replace(good, zeros=None),
        "at most 15": replace(good, zeros=good.zeros + 16),
    }
    fmt.check(good, "embed")
    for message, tensor in bad.items():
        with pytest.raises(BadScheme, match=f"embed: .*{message}"):
            fmt.check(tensor, "embed")

"""Rounding to nearest: plain equals the format's reference, searched is never worse, near best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import FORMATS, IntegerFormat, dequantize, format_of, parse_scheme
from apq_tvm.formats.scheme import GROUP_SIZES
from apq_tvm.quantizers.families import rtn
from apq_tvm.quantizers.families.rtn import quantize_tensor
from apq_tvm.types import QuantizedTensor, Scheme

GROUPS = (*GROUP_SIZES, -1)
ALL = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)

NEVER_WORSE = 1 + 1e-6
"""Slack of "never worse": errors are summed from float32 differences."""

NEAR_BEST = 1.02
"""Searched squared error over that of an exhaustive grid, at most."""


def scheme_of(fmt: IntegerFormat, group: int) -> Scheme:
    return Scheme(fmt.bits, fmt.zero_points, group_size=group)


def group_errors(tensor: QuantizedTensor, w: np.ndarray) -> np.ndarray:
    """Squared error of every group, [N, G]."""
    squares = (dequantize(tensor).astype(np.float64) - w) ** 2
    size = w.shape[1] if tensor.scheme.group_size == -1 else tensor.scheme.group_size
    return np.add.reduceat(squares, range(0, w.shape[1], size), axis=1)


def assert_equal(a: QuantizedTensor, b: QuantizedTensor) -> None:
    np.testing.assert_array_equal(a.codes, b.codes)
    np.testing.assert_array_equal(a.scales, b.scales)
    if a.zeros is not None and b.zeros is not None:
        np.testing.assert_array_equal(a.zeros, b.zeros)
    assert (a.zeros is None) == (b.zeros is None)


def assert_never_worse(w: np.ndarray, scheme: Scheme) -> None:
    plain = quantize_tensor(w, scheme, search=False)
    searched = quantize_tensor(w, scheme)
    fmt = format_of(scheme)
    fmt.check(plain, "plain")
    fmt.check(searched, "searched")
    assert np.isfinite(searched.scales).all()
    worse = group_errors(searched, w) > group_errors(plain, w) * NEVER_WORSE
    assert not worse.any()


@ALL
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("k", (1, 15, 16, 33, 300, 600))
def test_plain_is_the_reference(fmt: IntegerFormat, group: int, k: int) -> None:
    w = np.random.default_rng(k).normal(size=(5, k)).astype(np.float32)
    assert_equal(
        quantize_tensor(w, scheme_of(fmt, group), search=False), fmt.quantize_ref(w, group)
    )


@given(
    fmt=st.sampled_from(FORMATS),
    group=st.sampled_from(GROUPS),
    w=arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 80)),
        elements=st.one_of(
            st.floats(-2, 2, width=32),
            st.sampled_from((0.0, -0.0, 1.0, -1.0, 1e-42, 3e-8, -6e-8, 1e-5, 1e3, -3e4)),
        ),
    ),
)
@settings(max_examples=300)
def test_searched_is_never_worse(fmt: IntegerFormat, group: int, w: np.ndarray) -> None:
    assert_never_worse(w, scheme_of(fmt, group))


def outliers(rng: np.random.Generator) -> np.ndarray:
    w = rng.normal(size=(6, 640))
    w[:, ::97] *= 1000
    return w


ADVERSARIAL: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.normal(size=(6, 640)),
    "heavy tails": lambda rng: rng.standard_t(2, size=(6, 640)),
    "outliers": outliers,
    "all zero": lambda rng: np.zeros((6, 640)),
    "all equal": lambda rng: np.full((6, 640), -0.37),
    "positive": lambda rng: rng.uniform(1, 2, size=(6, 640)),
    "one each": lambda rng: np.eye(6, 640),
    "subnormal scales": lambda rng: rng.normal(size=(6, 640)) * 1e-7,
    "vanishing": lambda rng: rng.normal(size=(6, 640)) * 1e-20,
    "nearly overflowing": lambda rng: rng.uniform(-32000, 32000, size=(6, 640)),
}


@ALL
@pytest.mark.parametrize("group", (16, 128, -1))
@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.filterwarnings("error")
def test_adversarial_weights(fmt: IntegerFormat, group: int, kind: str) -> None:
    w = ADVERSARIAL[kind](np.random.default_rng(1)).astype(np.float32)
    assert_never_worse(w, scheme_of(fmt, group))


@ALL
def test_all_zero_is_exact(fmt: IntegerFormat) -> None:
    tensor = quantize_tensor(np.zeros((3, 40), np.float32), scheme_of(fmt, 32))
    assert not dequantize(tensor).any()


@ALL
@pytest.mark.parametrize("value", (-3.0, 0.25))
def test_all_equal_is_exact_but_for_the_scale(fmt: IntegerFormat, value: float) -> None:
    got = dequantize(quantize_tensor(np.full((3, 40), value, np.float32), scheme_of(fmt, 32)))
    np.testing.assert_allclose(got, value, rtol=2.0**-10)


@ALL
def test_what_codes_can_say_is_kept_exactly(fmt: IntegerFormat) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, fmt.max_code + 1, (4, 64), dtype=np.uint8)
    codes[:, ::16], codes[:, 1::16] = 0, fmt.max_code
    scales = np.exp2(rng.integers(-6, 6, (4, 4))).astype(np.float16)
    zeros = np.full((4, 4), fmt.max_code // 2, np.uint8) if fmt.zero_points else None
    w = dequantize(QuantizedTensor(codes, scales, zeros, scheme_of(fmt, 16)))
    np.testing.assert_array_equal(dequantize(quantize_tensor(w, scheme_of(fmt, 16))), w)


def exhaustive_error(w: np.ndarray, fmt: IntegerFormat) -> float:
    """Least squared error over a dense grid of steps and all zero points, float32 scales."""
    top, best = fmt.max_code, np.full(w.shape[0], np.inf)
    absmax = np.abs(w).max(axis=1, keepdims=True)
    zeros = range(top + 1) if fmt.zero_points else (fmt.zero - 1, fmt.zero)
    for ratio in np.linspace(0.3, 2.5, 300):
        step = ratio * absmax / max(fmt.zero, 1)
        for zero in zeros:
            u = np.clip(np.rint(w / step), -zero, top - zero)
            wu, uu = (w * u).sum(axis=1), np.maximum((u * u).sum(axis=1), 1)
            best = np.minimum(best, (w * w).sum(axis=1) - wu * wu / uu)
    return float(best.sum())


@pytest.mark.parametrize("text", ("W2A8g32", "W2zA8g32", "W3A8g32", "W4A8g32", "W4zA8g32"))
def test_searched_is_near_the_best_there_is(text: str) -> None:
    scheme = parse_scheme(text)
    assert scheme is not None
    w = np.random.default_rng(3).standard_t(5, size=(200, 32)).astype(np.float32)
    best = exhaustive_error(w.astype(np.float64), format_of(scheme))
    plain = group_errors(quantize_tensor(w, scheme, search=False), w).sum()
    searched = group_errors(quantize_tensor(w, scheme), w).sum()
    assert searched < best * NEAR_BEST
    assert searched < plain * 0.95


@pytest.mark.parametrize("constant", ("CHUNK", "LONG_GROUP"))
@pytest.mark.parametrize("text", ("W4A8g32", "W4zA8g32", "W8A8", "W3A8g64", "W1zA8g128"))
def test_chunks_and_orientation_do_not_matter(
    text: str, constant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change the order of sums, so only ties may fall another way."""
    scheme = parse_scheme(text)
    assert scheme is not None
    w = np.random.default_rng(4).normal(size=(37, 150)).astype(np.float32)
    default = group_errors(quantize_tensor(w, scheme), w).sum()
    monkeypatch.setattr(rtn, constant, 1)
    changed = group_errors(quantize_tensor(w, scheme), w).sum()
    assert changed == pytest.approx(default, rel=1e-4)


def test_strided_weights_are_the_same_weights() -> None:
    w = np.random.default_rng(6).normal(size=(64, 40)).astype(np.float32)
    scheme = Scheme(4, group_size=32)
    assert_equal(quantize_tensor(w.T, scheme), quantize_tensor(np.ascontiguousarray(w.T), scheme))


@pytest.mark.parametrize("search", (False, True))
@ALL
def test_refusals_name_the_tensor(fmt: IntegerFormat, search: bool) -> None:
    scheme = scheme_of(fmt, 32)
    w = np.ones((2, 40), np.float32)
    w[1, 39] = np.nan
    with pytest.raises(UnsupportedModel, match=r"'head'.*NaN"):
        quantize_tensor(w, scheme, "head", search)
    with pytest.raises(BadScheme, match=r"head.*exceeds 65504"):
        quantize_tensor(np.full((2, 40), 1e9, np.float32), scheme, "head", search)
    with pytest.raises(BadScheme, match=r"head.*groups of 17"):
        quantize_tensor(np.ones((2, 40), np.float32), scheme_of(fmt, 17), "head", search)

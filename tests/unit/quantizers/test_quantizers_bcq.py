"""Binary codes are chosen well: never worse than their starts, on ordinary and on nasty groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import bcq, check_tensor, dequantize
from apq_tvm.quantizers.families import rtn
from apq_tvm.quantizers.families.bcq import _Groups, _Planes
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import LayerStats, Scheme

ROUNDING = 1 + 1e-6
"""Errors of decoded float32 values differ by so much from the float64 ones that are compared."""


def gaussian(n: int, k: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.02).astype(np.float32)


def error(w: np.ndarray, decoded: np.ndarray, importance: np.ndarray | float = 1.0) -> float:
    return float((importance * (w.astype(np.float64) - decoded) ** 2).sum())


def greedy_error(w: np.ndarray, bits: int, group: int) -> float:
    """Of the greedy codes themselves, plane by plane, without any rounding of scales."""
    total = 0.0
    for first in range(0, w.shape[1], group):
        rest = w[:, first : first + group].astype(np.float64)
        rest = rest - rest.mean(1, keepdims=True)
        for _ in range(bits):
            rest = rest - np.sign(rest) * np.abs(rest).mean(1, keepdims=True)
        total += float((rest**2).sum())
    return total


@pytest.mark.parametrize("group", (32, 128, -1))
@pytest.mark.parametrize("bits", (1, 2, 3, 4, 6))
def test_better_than_every_start(bits: int, group: int) -> None:
    w = gaussian(6, 300, bits)
    scheme = bcq.scheme_of(bits, group)
    tensor = quantize_tensor(w, scheme)
    check_tensor(tensor, "w")
    got = error(w, dequantize(tensor))
    uniform = rtn.quantize_tensor(w, Scheme(bits, True, group_size=group))
    assert got <= error(w, dequantize(bcq.from_uniform(uniform))) * ROUNDING
    assert got <= error(w, dequantize(quantize_tensor(w, scheme, search=False))) * ROUNDING
    gain = 1.0 if bits in (1, 6) else 0.98
    assert got < gain * greedy_error(w, bits, 300 if group == -1 else group)


def test_two_bits_come_near_the_best_four_levels() -> None:
    """Lloyd and Max's four levels lose 0.1175 of a Gaussian's variance; groups fit a bit closer."""
    w = gaussian(64, 1024)
    tensor = quantize_tensor(w, bcq.scheme_of(2, 128))
    assert error(w, dequantize(tensor)) / error(w, np.zeros_like(w)) < 0.1175


def test_importance_moves_the_error() -> None:
    w = gaussian(16, 256)
    square = np.random.default_rng(1).uniform(0, 1, 256).astype(np.float32) ** 8
    zeros = np.zeros(256, np.float32)
    scheme = bcq.scheme_of(2, 128)
    plain = quantize_tensor(w, scheme)
    weighted = quantize_tensor(w, scheme, stats=LayerStats(square, zeros, zeros, 9))
    assert error(w, dequantize(weighted), square) < 0.8 * error(w, dequantize(plain), square)
    fisher = np.broadcast_to(square, w.shape).copy()
    same = LayerStats(zeros + 1, zeros, zeros, 9, fisher=fisher)
    by_fisher = quantize_tensor(w, scheme, stats=same)
    np.testing.assert_array_equal(by_fisher.codes, weighted.codes)


def test_unknown_importance_counts_as_equal() -> None:
    """Inputs that calibration never saw are zero everywhere."""
    w, zeros = gaussian(4, 64), np.zeros(64, np.float32)
    scheme = bcq.scheme_of(2, 32)
    tensor = quantize_tensor(w, scheme, stats=LayerStats(zeros, zeros, zeros, 9))
    np.testing.assert_array_equal(tensor.codes, quantize_tensor(w, scheme).codes)


NASTY = (
    np.zeros(32),
    np.full(32, 0.25),
    np.full(32, -7e-41),
    np.eye(1, 32)[0] * 1e4,
    np.r_[np.ones(16), -np.ones(16)],
    np.r_[np.full(31, 1e-8), 3.0],
    np.linspace(-1, 1, 32) * 1e-7,
)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(range(len(NASTY))), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 40),
)
def test_nasty_groups(kinds: list[int], bits: int, last: int) -> None:
    """Zeros, equal weights, denormals and outliers: finite, and no worse than uniform rounding."""
    row = np.concatenate([NASTY[i] for i in kinds] + [np.linspace(-0.1, 0.2, last)])
    w = np.stack((row, -row[::-1])).astype(np.float32)
    tensor = quantize_tensor(w, bcq.scheme_of(bits, 32))
    check_tensor(tensor, "w")
    uniform = rtn.quantize_tensor(w, Scheme(bits, True, group_size=32))
    start = error(w, dequantize(bcq.from_uniform(uniform)))
    scale = float(np.abs(w).max())
    assert error(w, dequantize(tensor)) <= start * ROUNDING + (scale * 1e-6) ** 2


def test_exact_where_the_format_can_be() -> None:
    levels = np.float32([-0.75, -0.25, 0.25, 1.25])  # not four sums of two scales and an offset
    two = np.float32([-0.375, 0.125, 0.375, 0.875])  # 0.25 ± 0.375 ± 0.25
    rng = np.random.default_rng(0)
    w = rng.choice(two, (8, 64)).astype(np.float32)
    np.testing.assert_array_equal(dequantize(quantize_tensor(w, bcq.scheme_of(2, 64))), w)
    other = rng.choice(levels, (8, 64)).astype(np.float32)
    assert error(other, dequantize(quantize_tensor(other, bcq.scheme_of(2, 64)))) > 0


@pytest.mark.parametrize("bits", (3, 7))
def test_least_squares_by_codes_and_by_weights_agree(bits: int) -> None:
    """Two ways to the same normal equations."""
    rng = np.random.default_rng(bits)
    groups = _Groups.of(gaussian(3, 40), rng.uniform(0.1, 2, (3, 40)), _Planes.of(bits))
    sums, order = groups._order(groups.greedy())
    place = groups._nearest(sums)
    by_level = groups._by_level(sums, order, place)
    for one, other in zip(by_level, groups._by_weight(sums, order, place), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_not_finite_is_refused_by_name(value: float) -> None:
    w = gaussian(2, 64)
    w[1, 5] = value
    with pytest.raises(UnsupportedModel, match=r"'layer'.*\[1, 5\]"):
        quantize_tensor(w, bcq.scheme_of(2, 32), "layer")


def test_too_large_weights_are_refused_with_the_remedy() -> None:
    w = np.float32([[3e5, -3e5] * 16])
    with pytest.raises(BadScheme, match="keep this tensor float"):
        quantize_tensor(w, bcq.scheme_of(2, 32), "layer")

"""Any-precision codes: exact splits, prefixes, importance, and no weight that upsets them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import bits_per_weight, check_tensor, dequantize, parse_scheme
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.quantizers.families.anyprec import WIDTH_WEIGHT
from apq_tvm.types import LayerStats, Scheme


def scheme(text: str) -> Scheme:
    parsed = parse_scheme(text)
    assert parsed is not None
    return parsed


def squared_error(w: np.ndarray, low: int, high: int, bits: int) -> float:
    decoded = dequantize(quantize_tensor(w, scheme(f"anyprec{low}-{high}c1A32")), bits)
    return float(((decoded - w).astype(np.float64) ** 2).sum())


@settings(max_examples=60)
@given(
    w=arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.integers(1, 40)),
        elements=st.one_of(
            st.floats(-2, 2, width=32),
            st.sampled_from([0.0, 1e-40, -1e-30, 6e4, -3.0]),
        ),
    ),
    widths=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted),
)
def test_any_matrix_at_any_widths(w: np.ndarray, widths: list[int]) -> None:
    low, high = widths
    tensor = quantize_tensor(w, scheme(f"anyprec{low}-{high}"))
    check_tensor(tensor, "w")
    largest = np.abs(w).max(axis=1, keepdims=True)
    for bits in tensor.scheme.widths:
        decoded = dequantize(tensor, bits)
        # Means of members lie among them; scales round to float16, centroids to int8.
        assert (np.abs(decoded) <= largest * 1.02 + 1e-6).all()
        # A prefix of the parent's bits: rows of equal codes decode alike.
        upper = tensor.codes >> (high - bits)
        for row, codes in zip(decoded, upper, strict=True):
            assert len(np.unique(row)) <= len(np.unique(codes))


def test_two_clusters_are_the_optimum() -> None:
    """One bit splits every row at the place of least error, found by trying them all."""
    w = np.random.default_rng(0).standard_t(3, (5, 64)).astype(np.float32)
    tensor = quantize_tensor(w, scheme("anyprec1-1sA32"))
    scaled = w / tensor.scales.astype(np.float32)
    assert len(tensor.tables["centroids1"]) == 1
    values = np.sort(scaled.astype(np.float64), axis=None)
    weights = np.repeat(tensor.scales.astype(np.float64) ** 2, 64, axis=1).reshape(-1)
    weights = weights[np.argsort(scaled, axis=None, kind="stable")]

    def error(at: int) -> float:
        parts = (slice(0, at), slice(at, None))
        means = [np.average(values[p], weights=weights[p]) for p in parts]
        errors = (weights[p] * (values[p] - m) ** 2 for p, m in zip(parts, means, strict=True))
        return sum(float(error.sum()) for error in errors)

    least = min(error(at) for at in range(1, values.size))
    found = float(((dequantize(tensor) - w).astype(np.float64) ** 2).sum())
    assert found == pytest.approx(least, rel=2e-2)


def test_codes_suit_all_widths_together() -> None:
    """No weight would cost less, over all widths with their weights, under another code."""
    w = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float32)
    tensor = quantize_tensor(w, scheme("anyprec2-4sA32"))
    assert tensor.tables["centroids2"].shape == (64, 4)
    scaled = (w / tensor.scales.astype(np.float32)).astype(np.float64)
    for row in range(3):
        cost = np.zeros((4096, 16))
        for bits in tensor.scheme.widths:
            table = tensor.tables[f"centroids{bits}"][row].astype(np.float64)
            path = np.repeat(table, 1 << (4 - bits))
            cost += WIDTH_WEIGHT**bits * (scaled[row][:, None] - path) ** 2
        chosen = cost[np.arange(4096), tensor.codes[row]]
        assert (chosen - cost.min(axis=1)).sum() < 2e-3 * chosen.sum()


@pytest.mark.parametrize("bits,most", ((2, 1.005), (3, 1.03), (4, 1.09), (5, 1.09), (6, 1.09)))
def test_upscaling_costs_little(bits: int, most: float) -> None:
    """Against each width alone, whose seed is the optimum or starts from that of 4 bits."""
    w = np.random.default_rng(2).standard_normal((64, 1024)).astype(np.float32)
    assert squared_error(w, 2, 6, bits) < most * squared_error(w, bits, bits, bits)


def test_every_bit_helps() -> None:
    w = np.random.default_rng(3).standard_normal((48, 512)).astype(np.float32)
    tensor = quantize_tensor(w, scheme("anyprec1-8sA8"))
    errors = [float(np.linalg.norm(dequantize(tensor, b) - w)) for b in range(1, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.012 * np.linalg.norm(w)


def test_centroids_beat_uniform_steps() -> None:
    w = np.random.default_rng(4).laplace(size=(64, 1024)).astype(np.float32)
    uniform = dequantize(quantize_tensor(w, scheme("W3A8")))
    ours = dequantize(quantize_tensor(w, scheme("anyprec3-8sA8")), 3)
    assert np.linalg.norm(ours - w) < 0.92 * np.linalg.norm(uniform - w)


def test_important_channels_get_the_smaller_error() -> None:
    rng = np.random.default_rng(5)
    w = rng.standard_normal((32, 256)).astype(np.float32)
    square = np.where(np.arange(256) < 16, 100.0, 1.0).astype(np.float32)
    flat = np.zeros(256, np.float32)
    stats = LayerStats(square, flat, flat, 1)
    weighted = dequantize(quantize_tensor(w, scheme("anyprec3-8sA8"), stats=stats), 3) - w
    plain = dequantize(quantize_tensor(w, scheme("anyprec3-8sA8")), 3) - w
    assert (weighted**2 @ square).sum() < (plain**2 @ square).sum()
    fisher = np.broadcast_to(square, w.shape)
    known = LayerStats(flat, flat, flat, 1, None, fisher)
    same = quantize_tensor(w, scheme("anyprec3-8sA8"), stats=known)
    np.testing.assert_array_equal(dequantize(same, 3) - w, weighted)


@pytest.mark.parametrize("k", (384, 576, 4096))
def test_tables_stay_below_a_tenth(k: int) -> None:
    w = np.random.default_rng(6).standard_normal((64, k)).astype(np.float32)
    tensor = quantize_tensor(w, scheme("anyprec3-8sA8"))
    assert bits_per_weight(tensor) < 8 * 1.1 + 16 / k + 1e-6


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    w = np.ones((2, 3), np.float32)
    w[1, 2] = value
    with pytest.raises(UnsupportedModel, match="'layer'"):
        quantize_tensor(w, scheme("anyprec3-8sA8"), "layer")


def test_weights_beyond_float16_are_refused_by_name() -> None:
    with pytest.raises(BadScheme, match="layer: a scale"):
        quantize_tensor(np.full((1, 2), 1e6, np.float32), scheme("anyprec3-8sA8"), "layer")


def test_bits_without_a_table_are_refused() -> None:
    tensor = quantize_tensor(np.ones((2, 32), np.float32), scheme("anyprec3-8sA8"))
    with pytest.raises(BadScheme, match=r"3\.\.8 are possible"):
        dequantize(tensor, 2)

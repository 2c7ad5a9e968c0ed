"""Weighted scales: never worse than the unweighted ones where it counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.formats.families import check_tensor, dequantize
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.quantizers.families.weighted import quantize_weighted
from apq_tvm.types import LayerStats, Scheme


def error(w: np.ndarray, scheme: Scheme, importance: np.ndarray, search: bool) -> float:
    rounded = dequantize(quantize_tensor(w, scheme, search=search))
    return float((np.square(w - rounded) * importance).sum(dtype=np.float64))


@settings(max_examples=30)
@given(
    st.integers(1, 6),
    st.integers(1, 70),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([16, 32, -1]),
    st.sampled_from(["normal", "zeros", "outlier", "denormal", "equal"]),
)
def test_never_worse_than_either_rounding(
    n: int, k: int, bits: int, zero: bool, group: int, kind: str
) -> None:
    rng = np.random.default_rng(n * k)
    w = rng.standard_normal((n, k)).astype(np.float32)
    if kind == "outlier":
        w[0, 0] = 1e4
    elif kind != "normal":
        w = np.full_like(w, {"zeros": 0.0, "denormal": 1e-40, "equal": 0.7}[kind])
    importance = np.exp(3 * rng.standard_normal(k)).astype(np.float32)
    scheme = Scheme(bits, zero, group_size=group)
    tensor = quantize_weighted(w, scheme, importance)
    check_tensor(tensor, "w")
    ours = float((np.square(w - dequantize(tensor)) * importance).sum(dtype=np.float64))
    for search in (False, True):
        assert ours <= error(w, scheme, importance, search) * 1.001 + 1e-12


@pytest.mark.parametrize("scheme", [Scheme(3, group_size=32), Scheme(2, True, group_size=16)])
def test_important_channels_are_not_clipped(scheme: Scheme) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 128)).astype(np.float32)
    w[:, ::16] *= 4
    importance = np.ones(128, np.float32)
    importance[::16] = 300
    tensor = quantize_weighted(w, scheme, importance)
    ours = float((np.square(w - dequantize(tensor)) * importance).sum())
    assert ours < 0.7 * error(w, scheme, importance, True)
    # quantize_tensor does so wherever E[x²] is known.
    stats = LayerStats(importance, importance, importance, 100)
    np.testing.assert_array_equal(
        dequantize(quantize_tensor(w, scheme, stats=stats)), dequantize(tensor)
    )

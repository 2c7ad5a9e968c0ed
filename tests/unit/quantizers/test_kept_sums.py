"""Rounding that keeps sums of rows and answers to means."""

from __future__ import annotations

import numpy as np
import pytest

from apq_tvm.formats import dequantize
from apq_tvm.formats.integer import row_sums
from apq_tvm.formats.scheme import parse_scheme
from apq_tvm.quantizers.families import rtn
from apq_tvm.quantizers.families.kept_means import keep_means
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import Scheme


def scheme(text: str) -> Scheme:
    found = parse_scheme(text)
    assert found is not None
    return found


@pytest.mark.parametrize("text", ["W8A8", "W4A8", "W4zA8", "W3A16"])
def test_rows_keep_their_sums(text: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((40, 300)).astype(np.float32)
    w[3] = 0
    plain = rtn.quantize_tensor(w, scheme(text))
    kept = quantize_tensor(w, scheme(text), "w")
    scales = np.abs(kept.scales[:, 0].astype(np.float64))
    off = np.abs((dequantize(kept).astype(np.float64) - w).sum(1))
    assert (off <= 0.51 * scales + 1e-6).all()
    assert np.abs((dequantize(plain) - w).sum(1)).max() > 2 * off.max()
    steps = kept.codes.astype(int) - plain.codes
    assert np.abs(steps).max() == 1 and (steps != 0).mean() < 0.1
    errors = [np.square(dequantize(t) - w).sum() for t in (plain, kept)]
    assert errors[1] < 1.05 * errors[0]
    np.testing.assert_allclose(row_sums(kept), dequantize(kept).sum(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", ["W8A8", "W4A8", "W4zA8"])
def test_rows_keep_their_answers_to_means(text: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((40, 300)).astype(np.float32)
    w[3] = 0
    means = np.concatenate([rng.random((2, 300)) ** 4, np.zeros((1, 300))]).astype(np.float32)
    plain = rtn.quantize_tensor(w, scheme(text))
    kept = keep_means(w, plain, means)
    errors = [dequantize(tensor) - w for tensor in (plain, kept)]
    for g in (*means[:2], np.ones(300, np.float32)):
        before, after = (float(np.square(error @ g).sum()) for error in errors)
        assert after < 0.05 * before
    assert np.square(errors[1]).sum() < 1.1 * np.square(errors[0]).sum()
    np.testing.assert_array_equal(dequantize(kept)[3], 0)


def test_grouped_sums_of_rows() -> None:
    w = np.random.default_rng(1).standard_normal((6, 70)).astype(np.float32)
    for text in ("W4A8tg32", "W4zA8tg32"):
        tensor = quantize_tensor(w, scheme(text), "w")
        np.testing.assert_allclose(
            row_sums(tensor), dequantize(tensor).sum(1), rtol=1e-4, atol=1e-4
        )

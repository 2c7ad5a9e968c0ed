"""8-bit codes whose neighbours fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.bench.linear import write_model
from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import dequantize, details, parse_scheme
from apq_tvm.formats.integer import PAIR_MOST, PAIR_SUM, pairs_fit
from apq_tvm.pipeline import plan
from apq_tvm.quantizers.families.pairs import LEAST_K, quantize_pairs, room
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import F32, QuantizedTensor, Scheme


def scheme(text: str) -> Scheme:
    found = parse_scheme(text)
    assert found is not None
    return found


W8A8 = scheme("W8A8")


def largest_pair(tensor: QuantizedTensor) -> int:
    sizes = np.abs(tensor.codes.astype(int) - 128)
    sizes = np.pad(sizes, ((0, 0), (0, sizes.shape[1] % 2)))
    return int((sizes[:, 0::2] + sizes[:, 1::2]).max())


def error(tensor: QuantizedTensor, w: F32) -> float:
    return float(np.square(dequantize(tensor).astype(np.float64) - w).sum())


def heavy(shape: tuple[int, int]) -> F32:
    """Weights whose tails are those of trained ones."""
    return np.random.default_rng(shape[1]).standard_t(5, shape).astype(np.float32)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("k", [1, 2, 31, 64, 577])
def test_no_pair_is_too_large(k: int, search: bool) -> None:
    w = heavy((40, k))
    w[3], w[5], w[7, : k // 2] = 0, 1e-30, 100
    tensor = quantize_pairs(w, W8A8, search=search)
    assert largest_pair(tensor) <= PAIR_MOST and pairs_fit(tensor)
    assert details(tensor) == ((PAIR_SUM, PAIR_MOST),)
    np.testing.assert_array_equal(dequantize(tensor)[3], 0)


def test_it_costs_less_than_a_bit() -> None:
    w = heavy((64, 1152))
    free, plain, searched = (
        error(tensor, w)
        for tensor in (
            quantize_tensor(w, W8A8),
            quantize_pairs(w, W8A8, search=False),
            quantize_pairs(w, W8A8),
        )
    )
    assert searched <= plain
    assert free < searched < 1.25 * free < error(quantize_tensor(w, scheme("W7A8")), w)
    assert not pairs_fit(quantize_tensor(w, W8A8)) and not pairs_fit(
        quantize_tensor(w, scheme("W7A8"), pairs=True)
    )


def test_rows_keep_their_sums_and_their_answers_to_means() -> None:
    w = heavy((40, 301))
    mean = np.random.default_rng(0).random((1, 301)).astype(np.float32) ** 4
    nearest = quantize_pairs(w, W8A8)
    for means, g in ((None, np.ones((301, 1))), (mean, mean.T)):
        kept = quantize_tensor(w, W8A8, means=means, pairs=True)
        off, before = (np.abs((dequantize(t) - w) @ g).max() for t in (kept, nearest))
        assert off < 0.4 * before
        assert largest_pair(kept) <= PAIR_MOST


def test_errors_count_by_importance() -> None:
    w = heavy((16, 64))
    w[:, 0] = 40
    weigh = np.full(64, 1e-4, np.float32)
    weigh[0] = 1
    plain, weighed = quantize_pairs(w, W8A8), quantize_pairs(w, W8A8, importance=weigh)
    off = [np.abs(dequantize(tensor)[:, 0] - 40).mean() for tensor in (plain, weighed)]
    assert off[1] <= off[0]
    assert largest_pair(weighed) <= PAIR_MOST


def test_what_codes_may_become_fits_together() -> None:
    codes = quantize_pairs(heavy((9, 33)), W8A8).codes
    least, most = room(codes)
    assert (least <= codes).all() and (codes <= most).all()
    for ends in (least, most):
        assert (
            largest_pair(QuantizedTensor(ends, np.ones((9, 1), np.float16), None, W8A8))
            <= PAIR_MOST
        )


def test_it_is_for_devices_that_gain_by_it(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_model(path, heavy((32, 192)))
    by_device = {
        target: next(iter(plan(path, target=target, scheme="W8A8").quantized.tensors.values()))
        for target in ("znver3", "skylake-avx512", "znver4", "x86-64", "graviton3")
    }
    assert {t for t, tensor in by_device.items() if pairs_fit(tensor)} == {
        "znver3",
        "skylake-avx512",
    }
    np.testing.assert_array_equal(by_device["znver4"].codes, by_device["x86-64"].codes)
    write_model(path, heavy((32, LEAST_K - 1)))
    narrow = plan(path, target="znver3", scheme="W8A8").quantized.tensors
    assert not any(map(pairs_fit, narrow.values()))


def test_bad_weights_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="NaN"):
        quantize_tensor(np.full((2, 256), np.nan, np.float32), W8A8, "bad", pairs=True)
    with pytest.raises(BadScheme, match="bad"):
        quantize_tensor(np.full((2, 256), 3e38, np.float32), W8A8, "bad", pairs=True)
    grouped = replace(W8A8, group_size=32)
    assert not pairs_fit(quantize_tensor(heavy((4, 256)), grouped, pairs=True))

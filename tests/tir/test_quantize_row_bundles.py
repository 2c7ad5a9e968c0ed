"""Rows rounded a vector of them at a time: to the bit what they are one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from built import built
from scheduled import AVX512, PROFILES

from apq_tvm.formats.integer import PAIR_INPUT
from apq_tvm.ops.activations.quantize import quantize_activations
from apq_tvm.ops.activations.row_bundles import RowBundles, quantize_row_bundles
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.linear.quantize import quantize_func, schedule_quantize
from apq_tvm.tensorize.meaning.unsigned_rows import UnsignedRows
from apq_tvm.types import DeviceProfile


def run(func: Any, profile: DeviceProfile, x: Any) -> tuple[Any, Any, Any]:
    m, k = x.shape
    results = np.full((m, k), 99, np.int8), np.full((m, 2), np.nan, np.float32), np.full((m, 1), 99)
    results = (*results[:2], results[2].astype(np.int32))
    given = results[: len(func.params) - 1]  # unsigned codes have no sums
    built(schedule_quantize(func, profile, Defaults()), profile)(x, *given)
    return results


def both(
    x: Any, profile: DeviceProfile, lanes: int, unsigned: bool = False
) -> list[tuple[Any, Any, Any]]:
    k = x.shape[1]
    bundles = quantize_row_bundles(k, lanes, 2 * lanes, unsigned=unsigned)
    one_by_one = quantize_activations(k, -1, -1, asymmetric=True, unsigned=unsigned)
    return [run(func, profile, x) for func in (bundles, one_by_one)]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(("m", "k"), [(1, 32), (16, 64), (37, 96), (75, 256)])
def test_codes_scales_and_sums_are_those_of_single_rows(
    profile: DeviceProfile, lanes: int, m: int, k: int
) -> None:
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k)).astype(np.float32) * np.exp(rng.uniform(-9, 9, (m, 1)))
    x = (x + rng.uniform(-3, 3, (m, 1))).astype(np.float32)
    x[m // 2] = 0
    x[-1] = np.maximum(x[-1], 0)
    for mine, plain in zip(*both(x, profile, lanes), strict=True):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(profile: DeviceProfile, value: float) -> None:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    x[5, 40] = value
    (codes, factors, sums), plain = both(x, profile, 16)
    others = np.arange(16) != 5
    for mine, wanted in zip((codes, factors, sums), plain, strict=True):
        np.testing.assert_array_equal(mine[others], wanted[others])
    assert not np.isfinite(factors[5]).any()
    assert codes.min() >= -127 and (np.abs(sums) <= 127 * 64).all()


@pytest.mark.parametrize("profile", PROFILES)
def test_unsigned_codes_mean_the_same(profile: DeviceProfile) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((37, 96)) + rng.uniform(-3, 3, (37, 1))).astype(np.float32)
    x[4] = 0
    bundles, plain = both(x, profile, 8, unsigned=True)
    for mine, wanted in zip(bundles[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(mine, wanted)
    codes, factors = plain[0].view(np.uint8), plain[1].astype(np.float64)
    assert codes.min() >= 1 and codes.max() <= PAIR_INPUT
    spread = np.maximum(x.max(1), 0) - np.minimum(x.min(1), 0)
    np.testing.assert_allclose(factors[:, 0], spread / (PAIR_INPUT - 2), rtol=1e-6)
    meant, scales = UnsignedRows().values(x)
    np.testing.assert_allclose(factors[:, :1], scales, rtol=1e-6)
    np.testing.assert_allclose(codes * factors[:, :1] + factors[:, 1:], meant, atol=1e-5)
    assert (np.abs(codes * factors[:, :1] + factors[:, 1:] - x) <= 0.501 * factors[:, :1]).all()


def test_x86_rounds_in_bundles_where_rows_are_whole_vectors() -> None:
    def op(k: int, profile: DeviceProfile, asymmetric: bool) -> str:
        return str(quantize_func(k, -1, -1, profile, Defaults(), 8, asymmetric).attrs["apq.op"])

    assert op(64, AVX512, True) == RowBundles.name
    assert {op(64, AVX512, False), op(65, AVX512, True)} == {"quantize_activations"}
    arm = replace(AVX512, target={**AVX512.target, "mtriple": "aarch64-linux-gnu"})
    assert op(64, arm, True) == "quantize_activations"

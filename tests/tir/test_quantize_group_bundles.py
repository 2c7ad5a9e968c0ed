"""Groups rounded a vector of them at a time: to the bit what they are one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from built import built
from scheduled import AVX512, PROFILES

from apq_tvm.ops.activations.group_bundles import GroupBundles, quantize_group_bundles
from apq_tvm.ops.activations.quantize import quantize_activations
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.linear.quantize import quantize_func, schedule_quantize
from apq_tvm.types import DeviceProfile


def run(func: Any, profile: DeviceProfile, x: Any, group: int) -> tuple[Any, Any, Any]:
    m, k = x.shape
    results = (
        np.full((m, k), 99, np.int8),
        np.full((m, k // group), np.nan, np.float32),
        np.full((m, k // group), 99, np.int32),
    )
    built(schedule_quantize(func, profile, Defaults()), profile)(x, *results)
    return results


def both(x: Any, profile: DeviceProfile, group: int, lanes: int, bits: int = 8) -> list[Any]:
    k = x.shape[1]
    one_by_one = quantize_activations(k, group, group, min(32, group), bits=bits)
    bundles = quantize_group_bundles(k, group, lanes, 3, bits)
    return [run(func, profile, x, group) for func in (bundles, one_by_one)]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(
    ("m", "groups", "group", "bits"),
    [(1, 1, 32, 8), (1, 18, 32, 8), (7, 9, 32, 8), (5, 16, 16, 4), (4, 5, 128, 2)],
)
def test_codes_scales_and_sums_are_those_of_single_groups(
    profile: DeviceProfile, lanes: int, m: int, groups: int, group: int, bits: int
) -> None:
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, groups, group)) * np.exp(rng.uniform(-9, 9, (m, groups, 1)))
    x[m // 2, 0] = 0
    x = x.reshape(m, -1).astype(np.float32)
    x[0, :3] = (1e-40, -1e-40, 2.0**-101)
    for mine, plain in zip(*both(x, profile, group, lanes, bits), strict=True):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_group(profile: DeviceProfile, value: float) -> None:
    x = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)
    x[1, 40] = value
    (codes, factors, sums), plain = both(x, profile, 32, 16)
    others = np.ones((2, 16), bool)
    others[1, 1] = False
    np.testing.assert_array_equal(factors[others], plain[1][others])
    np.testing.assert_array_equal(sums[others], plain[2][others])
    wide = np.repeat(others, 32, axis=1)
    np.testing.assert_array_equal(codes[wide], plain[0][wide])
    assert not np.isfinite(factors[1, 1])
    assert codes.min() >= -127 and (np.abs(sums) <= 127 * 32).all()


def test_products_are_rounded_before_they_are_codes() -> None:
    """As one by one, among so many that some lie between two codes."""
    x = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float32)
    for mine, plain in zip(*both(x, AVX512, 32, 16), strict=True):
        np.testing.assert_array_equal(mine, plain)


def test_x86_rounds_in_bundles_where_groups_are_whole_vectors() -> None:
    def op(k: int, group: int, sums: int, bits: int, profile: DeviceProfile = AVX512) -> str:
        return str(quantize_func(k, group, sums, profile, Defaults(), bits).attrs["apq.op"])

    assert op(64, 32, 32, 8) == op(64, 16, 16, 2) == GroupBundles.name
    plain = {op(80, 32, 32, 8), op(64, -1, 32, 8), op(64, 64, 32, 8), op(64, 32, 32, 1)}
    assert plain == {"quantize_activations"}
    arm = replace(AVX512, target={**AVX512.target, "mtriple": "aarch64-linux-gnu"})
    assert op(64, 32, 32, 8, arm) != GroupBundles.name

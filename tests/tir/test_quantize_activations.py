"""Dynamic quantization of activations: exact codes and sums, padding, zeros, NaN and infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built
from gemm_cases import quantize_reference
from scheduled import PROFILES

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.quantize import quantize_activations
from apq_tvm.schedules.decide import Decide, Defaults, Random
from apq_tvm.schedules.linear.quantize import quantize_func, schedule_quantize
from apq_tvm.types import DeviceProfile

GROUPS = [(32, 32), (-1, -1), (-1, 32), (16, 16), (-1, 16), (64, 64), (128, 128), (256, 256)]


def run(
    x: Any, act: int, weight: int, profile: DeviceProfile, decide: Decide | None = None
) -> tuple[Any, Any, Any]:
    decide = decide or Defaults()
    func = quantize_func(x.shape[1], act, weight, profile, decide)
    func = schedule_quantize(func, profile, decide)
    m, k = x.shape
    step = max(32, weight)
    kp = -(-k // step) * step
    results = (
        np.full((m, kp), 99, np.int8),
        np.full((m, kp // (kp if act == -1 else act)), np.nan, np.float32),
        np.full((m, kp // (kp if weight == -1 else weight)), 99, np.int32),
    )
    built(func, profile)(x, *results)
    return results


def expect(x: Any, act: int, weight: int, got: tuple[Any, Any, Any]) -> None:
    kp = got[0].shape[1]
    want = quantize_reference(x, kp, kp if act == -1 else act, kp if weight == -1 else weight)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=2.0**-22)
    np.testing.assert_array_equal(got[2], want[2])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("act", "weight"), GROUPS)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 255, 256, 257, 384])
def test_matches_the_reference(profile: DeviceProfile, act: int, weight: int, k: int) -> None:
    x = np.random.default_rng(k).standard_normal((3, k)).astype(np.float32)
    expect(x, act, weight, run(x, act, weight, profile))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("m", [1, 2, 42, 43, 200])
def test_rows_beyond_one_task(profile: DeviceProfile, m: int) -> None:
    x = np.random.default_rng(m).standard_normal((m, 384)).astype(np.float32)
    expect(x, 32, 32, run(x, 32, 32, profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_rounds_to_nearest_even_and_fills_the_range(profile: DeviceProfile) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, -127, 0.5, 1.5, 2.5, -0.5, -2.5]  # scale is exactly 1
    codes, scales, sums = run(x, 32, 32, profile)
    assert codes[0, :7].tolist() == [127, -127, 0, 2, 2, 0, -2]
    assert scales.tolist() == [[1.0]]
    assert sums.tolist() == [[2]]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 2.0**-101])
def test_groups_of_zeros_and_of_tiny_values_have_scale_zero(
    profile: DeviceProfile, value: float
) -> None:
    x = np.full((2, 64), value, np.float32)
    x[1, 32:] = 1
    codes, scales, sums = run(x, 32, 32, profile)
    assert scales[0].tolist() == [0, 0] and scales[1, 0] == 0 and scales[1, 1] > 0
    assert not codes[:, :32].any() and (codes[1, 32:] == 127).all()
    assert sums.tolist() == [[0, 0], [0, 127 * 32]]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize(("act", "weight"), [(32, 32), (-1, -1)])
def test_nan_and_infinity_reach_the_scale_of_their_group_alone(
    profile: DeviceProfile, value: float, act: int, weight: int
) -> None:
    x = np.ones((2, 96), np.float32)
    x[0, 40] = value
    codes, scales, sums = run(x, act, weight, profile)
    assert not np.isfinite(scales[0, 1 if act == 32 else 0])
    assert np.isfinite(scales[1]).all() and (codes[1] == 127).all()
    assert codes.min() >= -127
    if act == 32:
        assert np.isfinite(scales[0, [0, 2]]).all()
    assert (np.abs(sums) <= 127 * 96).all()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("scale", [1e-25, 1e30, 3e38])
def test_extreme_magnitudes(profile: DeviceProfile, scale: float) -> None:
    unit = np.random.default_rng(1).uniform(-1, 1, (2, 70)).astype(np.float32)
    x = unit * np.float32(scale)
    expect(x, 32, 32, run(x, 32, 32, profile))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("seed", range(10))
def test_random_decisions(profile: DeviceProfile, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((9, 300)).astype(np.float32)
    for act, weight in GROUPS[:4]:
        expect(x, act, weight, run(x, act, weight, profile, Random(seed)))


def test_groups_that_do_not_nest_are_declined() -> None:
    with pytest.raises(NotApplicable, match="K=96"):
        quantize_activations(96, 32, 64)

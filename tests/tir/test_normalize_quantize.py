"""A normalization that quantizes its result: the result's own codes, whatever the quantization."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import built
from scheduled import AVX2, PROFILES

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.normalize import NEAR, OP, Normalize
from apq_tvm.ops.graph.layernorm import layernorm
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.graph.rules import schedule_function
from apq_tvm.schedules.linear.quantize import quantize_func
from apq_tvm.types import DeviceProfile

EPSILON = 1e-3


def run(func: Any, profile: DeviceProfile, *arguments: Any) -> tuple[Any, ...]:
    """The arguments, of which results are filled."""
    built(schedule_function(func, profile, Defaults())[0], profile)(*arguments)
    return arguments


def results(m: int, k: int, group: int, asymmetric: bool) -> tuple[Any, ...]:
    groups = 1 if group == -1 else k // group
    codes, sums = np.full((m, -(-k // 32) * 32), 99, np.int8), np.full((m, groups), 99, np.int32)
    return codes, np.full((m, groups + asymmetric), np.nan, np.float32), sums


def normalised(x: Any, scale: Any, bias: Any, rms: bool) -> Any:
    x = x.astype(np.float64)
    centred = x if rms else x - x.mean(1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(1, keepdims=True) + EPSILON) * scale
    return y if bias is None else y + bias


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("m", [1, 37, 75])
@pytest.mark.parametrize(
    ("k", "group", "asymmetric", "name"),
    [
        (96, -1, True, "quantize_row_bundles"),
        (512, -1, True, "quantize_row_bundles"),
        (128, 32, False, "quantize_group_bundles"),
        (NEAR + 32, 32, False, "quantize_group_bundles"),
        (80, -1, False, "quantize_activations"),
    ],
)
def test_codes_are_those_of_the_result(
    profile: DeviceProfile, rms: bool, m: int, k: int, group: int, asymmetric: bool, name: str
) -> None:
    rng = np.random.default_rng(k + m)
    x = (rng.standard_normal((m, k)) * np.exp(rng.uniform(-5, 5, (m, 1)))).astype(np.float32)
    x[m // 2] = 0
    scale = rng.standard_normal(k).astype(np.float32)
    given = [scale] if rms else [scale, rng.standard_normal(k).astype(np.float32)]
    alone = layernorm(("R", k), epsilon=EPSILON, bias=not rms, rms=rms)
    sizes = (k, group, group, profile, Defaults(), 8, asymmetric)
    both = quantize_func(*sizes, Normalize(alone, profile.vector_bytes // 4))
    assert both.attrs["apq.op"] == OP + name
    y = np.full((m, k), np.nan, np.float32)
    found = run(both, profile, x, *given, y, *results(m, k, group, asymmetric))[-3:]
    np.testing.assert_allclose(y, normalised(x, *(*given, None)[:2], rms), rtol=2e-5, atol=2e-5)
    wanted = run(quantize_func(*sizes), profile, y, *results(m, k, group, asymmetric))[1:]
    for mine, plain in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, plain)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    x = np.random.default_rng(0).standard_normal((19, 64)).astype(np.float32)
    wrong, one = x.copy(), np.ones(64, np.float32)
    wrong[5, 40] = value
    normalize = Normalize(layernorm(("R", 64), bias=False), 8)
    func = quantize_func(64, -1, -1, AVX2, Defaults(), 8, True, normalize)
    kernel = built(schedule_function(func, AVX2, Defaults())[0], AVX2)
    plain, found = ((np.empty((19, 64), np.float32), *results(19, 64, -1, True)) for _ in range(2))
    kernel(x, one, *plain)
    kernel(wrong, one, *found)
    others = np.arange(19) != 5
    for mine, wanted in zip(found, plain, strict=True):
        np.testing.assert_array_equal(mine[others], wanted[others])
    assert np.isnan(found[0][5]).any() and np.isnan(found[2][5]).all()


@pytest.mark.parametrize(
    ("alone", "why"),
    [
        (layernorm(("R", 4, 16), axis=1), "several axes"),
        (layernorm(("R", 64), statistics=True), "statistics"),
        (layernorm(("R", 100)), "100 columns are no whole vectors of 8"),
    ],
)
def test_others_stay_alone(alone: Any, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        Normalize(alone, 8)

"""LayerNormalization against its definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from scheduled import AVX2, PROFILES, compiled, normal

from apq_tvm.ops.graph.layernorm import layernorm
from apq_tvm.schedules.decide import Random

TOLERANCE = 5e-6  # relative to results of size 1 to 5


def reference(x: Any, axis: int, epsilon: float, rms: bool) -> tuple[Any, Any, Any]:
    axes = tuple(range(axis % x.ndim, x.ndim))
    x = x.astype(np.float64)
    mean = np.zeros(1) if rms else x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + epsilon)
    return (x - mean) * inverse, mean, inverse


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dynamic_rows(profile: Any, rms: bool, bias: bool) -> None:
    rng = np.random.default_rng(0)
    run = compiled(layernorm(("B", "S", 48), bias=bias, rms=rms), profile)
    scale, shift = normal(rng, (48,)), normal(rng, (48,))
    for b, s in ((1, 1), (2, 3), (1, 17), (3, 130)):
        x, y = normal(rng, (b, s, 48), 3) + 10, np.empty((b, s, 48), np.float32)
        run(*([x, scale, shift, y] if bias else [x, scale, y]))
        expected = reference(x, -1, 1e-5, rms)[0] * scale + (shift if bias else 0)
        np.testing.assert_allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE * 4)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 33, 64])
def test_widths_at_vector_edges(width: int) -> None:
    rng = np.random.default_rng(width)
    x, scale, y = normal(rng, (5, width)), normal(rng, (width,)), np.empty((5, width), np.float32)
    compiled(layernorm(("R", width), epsilon=1e-3, bias=False), AVX2)(x, scale, y)
    expected = reference(x, -1, 1e-3, False)[0] * scale
    np.testing.assert_allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE * 4)


def test_dynamic_width() -> None:
    rng = np.random.default_rng(3)
    run = compiled(layernorm(("R", "D")), AVX2)
    for width in (1, 8, 33):
        x, y = normal(rng, (4, width)), np.empty((4, width), np.float32)
        scale, shift = normal(rng, (width,)), normal(rng, (width,))
        run(x, scale, shift, y)
        expected = reference(x, -1, 1e-5, False)[0] * scale + shift
        np.testing.assert_allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE * 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_several_axes_and_statistics(axis: int) -> None:
    rng = np.random.default_rng(axis)
    shape = (3, 4, 20)
    x, y = normal(rng, shape), np.empty(shape, np.float32)
    scale, shift = normal(rng, shape[axis:]), normal(rng, shape[axis:])
    rows = shape[:axis] + (1,) * (3 - axis)
    mean, inverse = np.empty(rows, np.float32), np.empty(rows, np.float32)
    run = compiled(layernorm(shape, axis, statistics=True), AVX2)
    run(x, scale, shift, y, mean, inverse)
    normed, *statistics = reference(x, axis, 1e-5, False)
    np.testing.assert_allclose(y, normed * scale + shift, rtol=TOLERANCE, atol=TOLERANCE * 4)
    np.testing.assert_allclose(mean, statistics[0], atol=TOLERANCE)
    np.testing.assert_allclose(inverse, statistics[1], rtol=TOLERANCE)


def test_rows_far_from_zero_keep_their_variance() -> None:
    x = (np.arange(64, dtype=np.float32)[None] * 0.01 + 1000).astype(np.float32)
    one, y = np.ones(64, np.float32), np.empty_like(x)
    compiled(layernorm(("R", 64), bias=False), AVX2)(x, one, y)
    np.testing.assert_allclose(y, reference(x, -1, 1e-5, False)[0], atol=2e-3)


@pytest.mark.parametrize("seed", range(10))
def test_random_decisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = normal(rng, (11, 100)), np.empty((11, 100), np.float32)
    scale, shift = normal(rng, (100,)), normal(rng, (100,))
    compiled(layernorm(("R", 100)), AVX2, Random(seed))(x, scale, shift, y)
    expected = reference(x, -1, 1e-5, False)[0] * scale + shift
    np.testing.assert_allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE * 4)

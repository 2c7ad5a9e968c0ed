"""softmax(x * scale + mask): values at tile edges, masks that broadcast, extreme scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from scheduled import AVX2, PROFILES, compiled, normal

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.softmax import softmax
from apq_tvm.schedules.decide import Random

TOLERANCE = 5e-7  # of probabilities, which are at most 1


def reference(x: Any, mask: Any, scale: float) -> Any:
    z = x.astype(np.float64) * scale + mask
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("mask", [None, ("B", 1, 1, "S"), (1, 1, "S", "S"), ("S",)])
def test_dynamic_sizes(profile: Any, mask: Any) -> None:
    rng = np.random.default_rng(0)
    run = compiled(softmax(("B", "H", "S", "S"), mask, 0.25), profile)
    for b, h, s in ((1, 1, 1), (2, 3, 7), (1, 2, 16), (2, 1, 17), (1, 2, 33), (1, 1, 129)):
        sizes = {"B": b, "S": s, 1: 1}
        x, y = normal(rng, (b, h, s, s), 8), np.empty((b, h, s, s), np.float32)
        m = normal(rng, [sizes[d] for d in mask], 3) if mask else np.float32(0)
        run(*([x, y] if mask is None else [x, m, y]))
        np.testing.assert_allclose(y, reference(x, m, 0.25), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", [(5,), (3, 21), (2, 3, 40)])
def test_static_shapes_of_any_rank(profile: Any, shape: tuple[int, ...]) -> None:
    x, y = normal(np.random.default_rng(1), shape), np.empty(shape, np.float32)
    compiled(softmax(shape), profile)(x, y)
    np.testing.assert_allclose(y, reference(x, 0, 1.0), atol=TOLERANCE, rtol=0)


def test_masked_and_extreme_scores() -> None:
    lowest = np.finfo(np.float32).min
    x = np.array(
        [[0, lowest, 1, -np.inf], [1e30, 1e30, -1e30, 0], [-1e4, -1e4, -1e4, -1e4]], np.float32
    )
    y = np.empty_like(x)
    compiled(softmax(("R", "S")), AVX2)(x, y)
    np.testing.assert_allclose(y, reference(x, 0, 1.0), atol=TOLERANCE, rtol=0)
    assert y[0, 1] == 0.0 and y[0, 3] == 0.0


def test_nan_and_fully_masked_rows_are_nan() -> None:
    x = np.array([[1, np.nan, 2], [-np.inf, -np.inf, -np.inf], [1, 2, 3]], np.float32)
    y = np.empty_like(x)
    compiled(softmax(("R", "S")), AVX2)(x, y)
    assert np.isnan(y[:2]).all() and not np.isnan(y[2]).any()


@pytest.mark.parametrize("seed", range(10))
def test_random_decisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    run = compiled(softmax(("R", "S"), ("S",), 0.5), AVX2, Random(seed))
    for r, s in ((3, 15), (9, 70)):
        x, m, y = normal(rng, (r, s), 4), normal(rng, (s,)), np.empty((r, s), np.float32)
        run(x, m, y)
        np.testing.assert_allclose(y, reference(x, m, 0.5), atol=TOLERANCE, rtol=0)


def test_a_mask_that_does_not_broadcast_is_refused() -> None:
    with pytest.raises(NotApplicable, match="does not broadcast"):
        softmax(("B", "S"), ("T",))

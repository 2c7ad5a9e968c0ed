"""Batched products: every permutation class, broadcasting, sizes at tile edges."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from scheduled import AVX2, PROFILES, compiled, normal

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.batch_matmul import batch_matmul
from apq_tvm.schedules.decide import Defaults, Random
from apq_tvm.schedules.graph.batch_matmul import schedule_batch_matmul

TOLERANCE = 1e-6  # per term of the sum, times its size


def check(run: Any, a: Any, b: Any, perms: tuple[Any, Any, Any]) -> None:
    pa, pb, po = (
        p if p is not None else tuple(range(max(a.ndim, b.ndim) if i == 2 else (a, b)[i].ndim))
        for i, p in enumerate(perms)
    )
    left, right = a.transpose(pa).astype(np.float64), b.transpose(pb).astype(np.float64)
    expected = np.matmul(left, right).transpose(po)
    y = np.full(expected.shape, np.nan, np.float32)
    run(a, b, y)
    limit = TOLERANCE * max(1, left.shape[-1])
    np.testing.assert_allclose(y, expected, atol=limit, rtol=limit)


QK = (("B", "S", "H", 32), ("B", "S", "H", 32), (0, 2, 1, 3), (0, 2, 3, 1), None)
PV = (("B", "H", "S", "S"), ("B", "S", "H", 32), None, (0, 2, 1, 3), (0, 2, 1, 3))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("case", [QK, PV], ids=["qk", "pv"])
def test_attention(profile: Any, case: Any) -> None:
    rng = np.random.default_rng(0)
    a_shape, b_shape, *perms = case
    run = compiled(batch_matmul(a_shape, b_shape, *perms), profile)
    for b, h, s in ((1, 1, 1), (2, 3, 7), (1, 2, 17), (1, 12, 64), (2, 1, 129)):
        sizes: dict[Any, int] = {"B": b, "H": h, "S": s, 32: 32}
        left = normal(rng, [sizes[d] for d in a_shape])
        right = normal(rng, [sizes[d] for d in b_shape])
        check(run, left, right, tuple(perms))


@pytest.mark.few(3)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("swap", list(product((False, True), repeat=3)))
def test_every_side_transposed_or_not(profile: Any, swap: tuple[bool, bool, bool]) -> None:
    rng = np.random.default_rng(1)
    perms = tuple((0, 2, 1) if s else None for s in swap)
    a_shape = ("B", "K", "M") if swap[0] else ("B", "M", "K")
    b_shape = ("B", "N", "K") if swap[1] else ("B", "K", "N")
    run = compiled(batch_matmul(a_shape, b_shape, *perms), profile)
    for m, n, k in ((1, 1, 1), (5, 33, 9), (8, 32, 128), (13, 31, 129), (1, 70, 300), (16, 1, 8)):
        sizes = {"B": 2, "M": m, "N": n, "K": k}
        left = normal(rng, [sizes[d] for d in a_shape])
        right = normal(rng, [sizes[d] for d in b_shape])
        check(run, left, right, perms)


def test_dynamic_sizes_at_tile_edges() -> None:
    rng = np.random.default_rng(4)
    run = compiled(batch_matmul(("M", "K"), ("K", "N")), AVX2)
    for m, n, k in product((1, 3, 5, 6, 7, 11, 12), (1, 8, 15, 16, 17), (1, 7, 127, 128, 129)):
        check(run, normal(rng, (m, k)), normal(rng, (k, n)), (None, None, None))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 16, 8), (12, 33, 128), (5, 7, 130)])
def test_static_sizes(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    run = compiled(batch_matmul((m, k), (n, k), None, (1, 0)), AVX2)
    check(run, normal(rng, (m, k)), normal(rng, (n, k)), (None, (1, 0), None))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_tile_is_no_wider_than_the_columns(profile: Any) -> None:
    """Lanes past them would multiply whatever lies there: 50 cycles each for denormals."""
    lanes = profile.vector_bytes // 4
    func = batch_matmul(("B", "M", "K"), ("B", "K", lanes))
    text = schedule_batch_matmul(func, profile, Defaults()).script()
    assert "masked_load" not in text
    assert f"T.int64({lanes})" in text and f"T.int64({2 * lanes})" not in text


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((3, 2, 5, 6), (6, 7)),
        ((5, 6), (3, 2, 6, 7)),
        ((3, 1, 5, 6), (2, 6, 7)),
        ((1, 2, 5, 6), (3, 1, 6, 7)),
    ],
)
def test_batch_axes_broadcast(a_shape: Any, b_shape: Any) -> None:
    rng = np.random.default_rng(2)
    run = compiled(batch_matmul(a_shape, b_shape), AVX2)
    check(run, normal(rng, a_shape), normal(rng, b_shape), (None, None, None))


def test_result_with_a_batch_axis_innermost() -> None:
    rng = np.random.default_rng(3)
    perms = (None, None, (2, 3, 1, 0))
    run = compiled(batch_matmul((2, 3, "M", 200), (2, 3, 200, "N"), *perms), AVX2)
    check(run, normal(rng, (2, 3, 9, 200)), normal(rng, (2, 3, 200, 37)), perms)


def test_an_empty_inner_axis_gives_zeros() -> None:
    y = np.full((2, 3), np.nan, np.float32)
    run = compiled(batch_matmul(("M", "K"), ("K", "N")), AVX2)
    run(np.empty((2, 0), np.float32), np.empty((0, 3), np.float32), y)
    np.testing.assert_array_equal(y, 0)


@pytest.mark.parametrize("seed", range(10))
def test_random_decisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a_shape, b_shape, *perms = QK if seed % 2 else PV
    run = compiled(batch_matmul(a_shape, b_shape, *perms), AVX2, Random(seed))
    sizes: dict[Any, int] = {"B": 2, "H": 2, "S": 71, 32: 32}
    left, right = ([sizes[d] for d in s] for s in (a_shape, b_shape))
    check(run, normal(rng, left), normal(rng, right), tuple(perms))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(NotApplicable, match="inner sizes"):
        batch_matmul((2, 3), (4, 5))
    with pytest.raises(NotApplicable, match="batch axes"):
        batch_matmul(("B", 2, 3), ("C", 3, 5))
    with pytest.raises(NotApplicable, match="two axes"):
        batch_matmul((3,), (3, 5))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [("M", "K", 1), (1, "K", "N"), ("M", 1, "N"), (1, 70, 20)])
def test_vectors(sizes: tuple[Any, Any, Any], transposed: bool) -> None:
    """No panel is packed for what is read once: one loop along memory."""
    rng = np.random.default_rng(5)
    m, k, n = sizes
    perms = (None, (0, 2, 1), None) if transposed else (None, None, None)
    b_shape = ("B", n, k) if transposed else ("B", k, n)
    func = batch_matmul(("B", m, k), b_shape, *perms)
    assert "panel" not in str(schedule_batch_matmul(func, AVX2, Defaults()))
    run = compiled(func, AVX2)
    for given in ({"M": 1, "K": 1, "N": 1}, {"M": 17, "K": 130, "N": 33}, {"M": 3, "K": 8, "N": 7}):
        known = {"B": 2, **given, **{size: size for size in sizes if isinstance(size, int)}}
        left = normal(rng, [known[d] for d in ("B", m, k)])
        check(run, left, normal(rng, [known[d] for d in b_shape]), perms)

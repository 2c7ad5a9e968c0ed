"""Attention over int8 and int4 keys and values, and caches that it reads, against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from attention_cases import (
    Problem,
    by_blocks,
    coded,
    floats_of,
    in_fours,
    keys_in_pairs,
    nibbles,
    values_in_pairs,
)
from scheduled import compiled

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.attention import FOURS, PACK, attention
from apq_tvm.ops.graph.caches.coded import coded_cache
from apq_tvm.schedules.decide import Recorded
from apq_tvm.schedules.devices import find_profile

PROFILES = [
    pytest.param("znver4", marks=pytest.mark.isa("avx512vnni"), id="vpdpbusd512"),
    pytest.param("alderlake", marks=pytest.mark.isa("avx_vnni"), id="vpdpbusd256"),
    pytest.param("znver3", marks=pytest.mark.isa("avx2"), id="maddubs"),
    pytest.param("skylake-avx512", marks=pytest.mark.isa("avx512f"), id="maddubs-avx512"),
    pytest.param("x86-64-v2", id="float"),
]
SCORES = ("", "float")
"""As the device prefers to make them, and by floats."""


def run_of(problem: Problem, target: str, scores: str, **others: int) -> Any:
    """Its kernel, and whether q is rounded noted in `problem`."""
    told: dict[str, object] = {**others, **({"scores": scores} if scores else {})}
    problem.rounds_q = not scores and target != "x86-64-v2"
    return compiled(problem.func(), find_profile(target), Recorded(told))


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", ("int8", "int4"))
def test_groups_masks_and_edges(target: str, scores: str, dtype: str) -> None:
    sizes = ((1, 1, 1), (1, 2, 16), (2, 1, 100), (2, 7, 65), (1, 130, 130))
    for group, heads, size in ((3, 2, 64), (1, 1, 36 if dtype == "int8" else 48)):
        problem = Problem(group, heads, size, dtype=dtype)
        run = run_of(problem, target, scores)
        for kind, (batch, queries, tokens) in product(("none", "causal", "window"), sizes):
            problem.check(run, batch, queries, tokens, kind)


@pytest.mark.parametrize("scores", SCORES)
def test_odd_columns_softcap_and_sink(scores: str) -> None:
    """Columns that are no fours, values wider than keys."""
    problem = Problem(2, 2, 10, width=36, dtype="int8", softcap=3.0, sink=True)
    run = run_of(problem, "znver4", scores)
    for queries, tokens in ((9, 150), (1, 5), (1, 700)):
        problem.check(run, 2, queries, tokens, "causal")


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("target", PROFILES[:1] + PROFILES[-1:])
def test_int4_of_other_groups(target: str, scores: str) -> None:
    """Keys in groups of 16 and values in those of 32, and the other way round."""
    for size, width in ((16, 32), (96, 112)):
        problem = Problem(2, 2, size, width=width, dtype="int4", softcap=3.0, sink=True)
        run = run_of(problem, target, scores)
        for queries, tokens in ((9, 150), (1, 5), (1, 700)):
            problem.check(run, 2, queries, tokens, "causal")


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", ("int8", "int4"))
def test_a_row_is_the_same_in_every_tile(dtype: str, scores: str) -> None:
    problem = Problem(3, 1, 64, dtype=dtype)
    runs = [run_of(problem, "znver4", scores, **record) for record in ({}, {"rows": 4, "tiles": 1})]
    for tokens in (200, 1100):
        first, *others = (problem.run(run, 1, 30, tokens, "causal") for run in runs)
        for other in others:
            np.testing.assert_array_equal(first, other)
        alone = problem.run(runs[0], 1, 30, tokens, "causal", only=17)
        np.testing.assert_array_equal(first[:, 17:18], alone)


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("layout", ("keys", "rows"))
@pytest.mark.parametrize("width", (64, 21))
def test_caches_grow_in_place(target: str, layout: str, width: int) -> None:
    """What is kept is not touched, whatever it is; the rest is as if it were made at once."""
    rng = np.random.default_rng(0)
    batch, heads, held, fresh = 2, 3, 5, 30
    past = rng.standard_normal((batch, heads, held, width)).astype(np.float32)
    new = rng.standard_normal((batch, fresh, heads, width)).astype(np.float32)
    new[0, 3, 1] = 0
    new[1, 4, 2, 5] = np.nan
    func = coded_cache(
        ("b", heads, "p", width), ("b", "s", heads, width), ((2, 0, 1, 3), (1, 0, 2, 3)), layout
    )
    run = compiled(func, find_profile(target))
    whole = np.concatenate([past.transpose(2, 0, 1, 3), new.transpose(1, 0, 2, 3)])
    total = len(whole)
    codes, scales = coded(np.nan_to_num(whole))
    packed = in_fours(codes) if layout == "keys" else codes
    by_sixteen = by_blocks(scales)
    made = np.full_like(packed, 99), np.full_like(by_sixteen, np.nan)
    run(past, new, 0, total, made[1], made[0])
    bad = [held + 4, 1, 2]
    block, lane = bad[0] // 16, bad[0] % 16
    assert np.isnan(made[1][block, 1, 2, lane])
    where = [block, 1, 2, slice(None), slice(lane * 4, lane * 4 + 4)] if layout == "keys" else bad
    for each in (made[0], packed):
        each[tuple(where)] = 0
    made[1][block, 1, 2, lane] = by_sixteen[block, 1, 2, lane] = 0
    np.testing.assert_array_equal(made[0], packed)
    np.testing.assert_array_equal(made[1], by_sixteen)
    kept = 20
    again = np.full_like(packed, 99), np.full_like(by_sixteen, np.nan)
    run(past, new, kept, total, again[1], again[0])
    lanes = np.arange(len(packed) * (16 if layout == "keys" else 1))
    if layout == "keys":
        flat = again[0].reshape(len(packed), batch, heads, -1, 16, 4).transpose(0, 4, 1, 2, 3, 5)
        flat = flat.reshape(-1, *flat.shape[2:])
    else:
        flat = again[0]
    assert (flat[lanes < kept] == 99).all() and (flat[kept:total] != 99).any()


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("layout", ("keys", "rows"))
@pytest.mark.parametrize("width", (64, 48))
def test_int4_caches_grow_in_place(target: str, layout: str, width: int) -> None:
    """Bytes are those that numpy makes; a group with what is no number has a scale that is none."""
    rng = np.random.default_rng(0)
    batch, heads, held, fresh, kept = 2, 3, 5, 30, 20
    past = rng.standard_normal((batch, heads, held, width)).astype(np.float32)
    new = rng.standard_normal((batch, fresh, heads, width)).astype(np.float32)
    new[0, 3, 1], new[0, 4, 1, :40], new[0, 5, 1], new[0, 6, 1] = 0, -2, 1e-38, -3e38
    new[1, 4, 2, 5], new[1, 6, 2, 5] = np.nan, np.inf
    shapes = ("b", heads, "p", width), ("b", "s", heads, width)
    func = coded_cache(*shapes, ((2, 0, 1, 3), (1, 0, 2, 3)), layout, dtype="int4")
    run = compiled(func, find_profile(target))
    whole = np.concatenate([past.transpose(2, 0, 1, 3), new.transpose(1, 0, 2, 3)])
    total = len(whole)
    fine = np.isfinite(whole)
    codes, spans, _ = nibbles(np.where(fine, whole, 0))
    packed = keys_in_pairs(codes) if layout == "keys" else values_in_pairs(codes)
    scaled = by_blocks(spans)
    heads_fine = fine.all(-1)
    for first in (0, kept):
        made, scales = np.full_like(packed, 99), np.full_like(scaled, 7)
        run(past, new, first, total, scales, made)
        ours, theirs = by_token(made, layout), by_token(packed, layout)
        assert (ours[:first] == 99).all()
        sure = heads_fine[first:]
        np.testing.assert_array_equal(ours[first:total][sure], theirs[first:total][sure])
        for token in (held + 4, held + 6):
            at = (token // PACK, 1, 2, slice(None), token % PACK)
            assert token < first or np.isnan(floats_of(scales[at][0]))
            scales[at][:2] = scaled[at][:2]
        ours, theirs = (np.moveaxis(s, -1, 1).reshape(-1, *s.shape[1:-1]) for s in (scales, scaled))
        np.testing.assert_array_equal(ours[first:total], theirs[first:total])


def by_token(codes: Any, layout: str) -> Any:
    """Bytes of tokens [T, B, N, ..]."""
    if layout == "rows":
        return codes
    blocks, batch, heads, count, _ = codes.shape
    moved = codes.reshape(blocks, batch, heads, count, PACK, FOURS).transpose(0, 4, 1, 2, 3, 5)
    return moved.reshape(blocks * PACK, batch, heads, count * FOURS)


def test_starts_of_sequences_and_what_is_nowhere() -> None:
    """As GroupQueryAttention puts it; tokens that are neither old nor new are zeros."""
    past = np.ones((2, 1, 4, 8), np.float32)
    new = np.full((2, 1, 1, 8), 2, np.float32)
    orders = ((2, 0, 1, 3), (1, 0, 2, 3))
    func = coded_cache(("b", 1, "p", 8), ("b", "s", 1, 8), orders, "rows", starts=True)
    codes, scales = np.full((7, 2, 1, 8), 9, np.int8), np.full((1, 2, 1, 16), np.nan, np.float32)
    start = np.array([2, 5], np.int64)
    compiled(func, find_profile("znver4"))(past, new, start, 0, 7, scales, codes)
    there = np.array([[1, 1, 2, 0, 0, 0, 0], [1, 1, 1, 1, 0, 2, 0]])
    np.testing.assert_array_equal(codes[:, :, 0, 0], 127 * (there.T > 0))
    np.testing.assert_allclose(scales[0, :, 0, :7] * 127, there)


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"scales": ()}, "int8 with 0 scales"),
        ({"dtype": "float32"}, "float32 with 2 scales"),
        ({"keys": ("C", "B", 2, 16, 16)}, "not packed"),
        ({"keys": ("C", "B", 2, 5, 64)}, "do not match"),
        ({"scales": (("C", "B", 2, 16), ("C", "B", 3, 16))}, "scales .* do not match"),
        ({"dtype": "int4"}, "scales .* do not match"),
        ({"dtype": "int4", "scales": ()}, "int4 with 0 scales"),
        ({"dtype": "int4", "q": ("B", "S", 4, 24)}, "24 columns: int4 wants a multiple of 16"),
        (
            {"dtype": "int4", "scales": (("C", "B", 2, 2, 16),) * 2, "values": ("T", "B", 2, 8)},
            "do not match",
        ),
    ),
)
def test_what_it_declines(changes: Any, words: str) -> None:
    shapes = {
        "q": ("B", "S", 4, 16), "keys": ("C", "B", 2, 4, 64), "values": ("T", "B", 2, 16),
        "dtype": "int8", "scales": (("C", "B", 2, 16),) * 2,
    }  # fmt: skip
    orders = {"order": (0, 2, 1, 3), "order_out": (0, 2, 1, 3)}
    with pytest.raises(NotApplicable, match=words):
        attention(**{**shapes, **changes}, **orders)


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "words"),
    (
        ("n", 8, "int8", "int8 wants numbers"),
        ("n", 16, "int4", "int4 wants numbers"),
        (2, 520, "int4", "512 columns at most"),
        (2, 24, "int4", "24 columns: int4 wants a multiple of 16"),
    ),
)
def test_caches_of_heads_that_are_declined(heads: Any, width: int, dtype: str, words: str) -> None:
    orders = ((2, 0, 1, 3), (1, 0, 2, 3))
    with pytest.raises(NotApplicable, match=words):
        coded_cache(("b", heads, "p", width), ("b", "s", heads, width), orders, "rows", dtype=dtype)

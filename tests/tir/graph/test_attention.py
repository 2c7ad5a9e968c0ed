"""Attention over packed keys against float64: groups, widths, masks, caches of halves."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from attention_cases import Problem
from scheduled import AVX512, PROFILES, compiled

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.attention import PACK, attention
from apq_tvm.ops.graph.caches.pack_keys import pack_keys
from apq_tvm.schedules.decide import Recorded

MOST = (
    PROFILES[0],
    *(pytest.param(*p.values, id=p.id, marks=pytest.mark.all_cases) for p in PROFILES[1:]),
)
"""For what does not depend on the width of vectors: one in `make test`."""

MASKS = ("none", "keys", "causal", "lowest", "window")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("group", "heads", "size"), ((1, 2, 32), (3, 2, 64), (8, 1, 80)))
def test_groups_and_masks(profile: Any, group: int, heads: int, size: int) -> None:
    """Rows and keys at the edges of tiles and blocks."""
    sizes = ((1, 1, 1), (2, 1, 100), (1, 2, 16), (2, 7, 65), (1, 130, 130))
    problem = Problem(group, heads, size)
    run = compiled(problem.func(), profile)
    for kind, (batch, queries, tokens) in product(MASKS, sizes):
        problem.check(run, batch, queries, tokens, kind)


@pytest.mark.parametrize("profile", MOST)
def test_without_a_mask(profile: Any) -> None:
    problem = Problem(2, 1, 16, masked=False)
    run = compiled(problem.func(), profile)
    for queries, tokens in ((1, 64), (5, 90), (1, 31)):
        problem.check(run, 2, queries, tokens, "none")


@pytest.mark.parametrize("profile", MOST)
def test_caches_of_halves(profile: Any) -> None:
    problem = Problem(3, 2, 64, dtype="float16")
    run = compiled(problem.func(), profile)
    for queries, tokens in ((1, 77), (7, 128)):
        problem.check(run, 2, queries, tokens, "causal")


@pytest.mark.parametrize("profile", MOST)
def test_columns_that_are_no_whole_vectors(profile: Any) -> None:
    problem = Problem(2, 1, 10, width=36)
    run = compiled(problem.func(), profile)
    problem.check(run, 1, 5, 70, "causal")


@pytest.mark.parametrize("dtype", ("float32", "float16"))
@pytest.mark.parametrize("order", ((1, 0, 2, 3), (2, 0, 1, 3)))
def test_packing(dtype: str, order: tuple[int, ...]) -> None:
    """Whole squares, columns beside them, and tokens that are no whole 16; 0 behind those."""
    dims = {order[0]: "T", order[1]: "B", order[2]: 3, order[3]: 20}
    run = compiled(pack_keys([dims[i] for i in range(4)], order, dtype), AVX512)
    for tokens in (1, 16, 37):
        sizes = {"T": tokens, "B": 2}
        shape = [sizes.get(str(dims[i]), dims[i]) for i in range(4)]
        k = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        blocks = -(-tokens // PACK)
        packed = np.full((blocks, 2, 3, 20, PACK), np.nan, dtype)
        run(k, packed)
        want = np.zeros((blocks * PACK, 2, 3, 20), dtype)
        want[:tokens] = k.transpose(order)
        want = want.reshape(blocks, PACK, 2, 3, 20).transpose(0, 2, 3, 4, 1)
        np.testing.assert_array_equal(packed, want)


@pytest.mark.parametrize("size", (128, 16))
def test_softcap_and_sink(size: int) -> None:
    problem = Problem(2, 2, size, softcap=3.0, sink=True)
    run = compiled(problem.func(), AVX512)
    problem.check(run, 1, 9, 150, "causal")
    problem.check(run, 2, 1, 5, "causal")


@pytest.mark.parametrize("zero", (False, True))
def test_rows_that_are_masked_altogether(zero: bool) -> None:
    problem = Problem(1, 1, 16, zero_masked=zero)
    run = compiled(problem.func(), AVX512)
    y = problem.run(run, 1, 7, 80, "hidden")
    assert (np.isnan(y) != zero).all() and (not zero or not y.any())


@pytest.mark.parametrize("profile", MOST)
def test_a_row_is_the_same_in_every_tile(profile: Any) -> None:
    """Alone, as decoding has it, or among others; in tasks of one register tile or several."""
    problem = Problem(3, 1, 64)
    records: tuple[dict[str, object], ...] = ({}, {"rows": 4, "tiles": 1})
    runs = [compiled(problem.func(), profile, Recorded(record)) for record in records]
    for tokens in (200, 1100):  # one part of the keys, or three
        first, *others = (problem.run(run, 1, 30, tokens, "causal") for run in runs)
        for other in others:
            np.testing.assert_array_equal(first, other)
        alone = problem.run(runs[0], 1, 30, tokens, "causal", only=17)
        np.testing.assert_array_equal(first[:, 17:18], alone)
        problem.check(runs[0], 1, 30, tokens, "causal")


@pytest.mark.parametrize("profile", MOST)
def test_parts_of_the_keys(profile: Any) -> None:
    """A query alone and many; masks that hide whole parts; a sink counts once."""
    problem = Problem(2, 1, 16, sink=True)
    run = compiled(problem.func(), profile, Recorded({"part": 4}))
    for (queries, tokens), kind in product(((1, 700), (7, 513), (260, 512)), ("window", "keys")):
        problem.check(run, 2, queries, tokens, kind)


def test_grouped_axes_and_other_orders() -> None:
    """q as [B, Nkv, G, S, H], v with heads first, y with heads before queries."""
    rng = np.random.default_rng(0)
    shapes = (("B", 2, 3, "S", 16), ("C", "B", 2, 16, 16), ("B", 2, "T", 16), ("S", "T"))
    straight = (0, 1, 2, 3, 4)
    func = attention(*shapes, order=straight, order_out=straight, order_values=(2, 0, 1, 3))
    q, keys, v, mask = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 2, 3, 5, 16), (2, 2, 2, 16, 16), (2, 2, 20, 16), (5, 20))
    )
    y = np.full_like(q, np.nan)
    compiled(func, AVX512)(q, keys, v, mask, y)
    k = keys.transpose(1, 2, 0, 4, 3).reshape(2, 2, 1, 32, 16)[..., :20, :]
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) + mask
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v[:, :, None]
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"q": ("B", "S", 5, 16)}, "share 2 heads"),
        ({"q": ("B", "S", "N", 16)}, "only a run knows"),
        ({"q": ("B", "S", 4, 32)}, "do not match"),
        ({"values": ("T", "B", 3, 16)}, "do not match"),
        ({"mask": ("B", 1, 1, 1)}, "no column"),
        ({"mask": ("B", 1, "S", "U")}, "broadcast"),
    ),
)
def test_what_it_declines(changes: Any, words: str) -> None:
    shapes = {"q": ("B", "S", 4, 16), "keys": ("C", "B", 2, 16, 16), "values": ("T", "B", 2, 16)}
    orders = {"order": (0, 2, 1, 3), "order_out": (0, 2, 1, 3)}
    with pytest.raises(NotApplicable, match=words):
        attention(**{**shapes, **changes}, **orders)

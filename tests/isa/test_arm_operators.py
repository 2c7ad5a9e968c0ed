"""Operators that are no linear layers on Arm: values under qemu, and their loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import emulated, needs_qemu
from attention_cases import Problem

from apq_tvm.ops.graph.batch_matmul import batch_matmul
from apq_tvm.ops.graph.caches.pack_keys import pack_keys
from apq_tvm.ops.graph.layernorm import layernorm
from apq_tvm.ops.graph.softmax import softmax
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_function

RNG = np.random.default_rng(0)
QK = (("B", "S", 3, 8), ("B", "T", 3, 8), (0, 2, 1, 3), (0, 2, 3, 1), None)
PV = (("B", 3, "S", "T"), ("B", "T", 3, 8), None, (0, 2, 1, 3), (0, 2, 1, 3))
COLUMNS = (("S", 130), (130, "T"), None, None, (1, 0))  # two slices of the depth


def scheduled(func: Any, target: str = "graviton2") -> Any:
    return schedule_function(func, find_profile(target), Defaults())[0]


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.few(2)
@needs_qemu
@pytest.mark.parametrize(("problem", "rank"), ((QK, 4), (PV, 4), (COLUMNS, 2)))
def test_batch_matmul(problem: Any, rank: int, tmp_path: Path) -> None:
    """Rows and columns that are no multiples of a tile; k in fours and beside them."""
    run = emulated(scheduled(batch_matmul(*problem)), find_profile("graviton2"), tmp_path)
    for sizes in ({"B": 2, "S": 11, "T": 19}, {"B": 1, "S": 1, "T": 3}, {"B": 1, "S": 24, "T": 8}):
        a, b = (
            normal(*(sizes[d] if isinstance(d, str) else d for d in shape)) for shape in problem[:2]
        )
        left, right, out = (tuple(p) if p is not None else tuple(range(rank)) for p in problem[2:])
        want = np.matmul(a.transpose(left).astype(np.float64), b.transpose(right)).transpose(out)
        y = np.full(want.shape, np.nan, np.float32)
        run(a, b, y)
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5 * np.abs(want).max())


@needs_qemu
def test_softmax(tmp_path: Path) -> None:
    func = scheduled(softmax(("B", 2, "S", "S"), ("B", 1, 1, "S"), 0.25))
    run = emulated(func, find_profile("graviton2"), tmp_path)
    for size in (1, 3, 4, 7, 13):
        x, mask = normal(2, 2, size, size), normal(2, 1, 1, size)
        mask[..., size // 2 + 1 :] = -np.inf
        y = np.full_like(x, np.nan)
        run(x, mask, y)
        e = x * np.float64(0.25) + mask
        e = np.exp(e - e.max(-1, keepdims=True))
        np.testing.assert_allclose(y, e / e.sum(-1, keepdims=True), rtol=0, atol=1e-6)


@needs_qemu
@pytest.mark.parametrize("width", (7, 48))
def test_layernorm(width: int, tmp_path: Path) -> None:
    run = emulated(scheduled(layernorm(("S", width))), find_profile("graviton2"), tmp_path)
    for rows in (1, 6):
        x, scale, shift = normal(rows, width) * 3 + 10, normal(width), normal(width)
        y = np.full_like(x, np.nan)
        run(x, scale, shift, y)
        centred = x - x.mean(-1, keepdims=True, dtype=np.float64)
        want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift
        np.testing.assert_allclose(y, want, rtol=0, atol=1e-5)


@needs_qemu
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_attention_over_packed_keys(dtype: str, tmp_path: Path) -> None:
    """Masks, the last keys of a cache, and a query alone; keys are packed as packing does."""
    problem = Problem(3, 2, 24, dtype=dtype)
    run = emulated(scheduled(problem.func()), find_profile("graviton2"), tmp_path)
    for queries, tokens, kind in ((1, 77, "keys"), (9, 70, "causal"), (2, 16, "lowest")):
        problem.check(run, 2, queries, tokens, kind)
    pack = pack_keys(("B", "T", 2, 24), (1, 0, 2, 3))
    run = emulated(scheduled(pack), find_profile("graviton2"), tmp_path)
    k = normal(2, 21, 2, 24)
    packed = np.full((2, 2, 2, 24, 16), np.nan, np.float32)
    run(k, packed)
    whole = np.concatenate([k, np.zeros((2, 11, 2, 24), np.float32)], 1)
    want = whole.reshape(2, 2, 16, 2, 24).transpose(1, 0, 3, 4, 2)
    np.testing.assert_array_equal(packed, want)

"""Caches of codes and the attention that reads them, on Arm with sdot and without, under qemu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import assembly, count, emulated, needs_qemu
from attention_cases import (
    NO_NUMBER,
    Problem,
    by_blocks,
    coded,
    in_fours,
    keys_in_pairs,
    nibbles,
    values_in_pairs,
)
from tvm import tirx

from apq_tvm.ops.graph.caches.coded import coded_cache
from apq_tvm.schedules.decide import Defaults
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph.rules import schedule_function

TARGETS = ("graviton2", "cortex-a72")
"""With sdot, and with floats alone."""


def scheduled(func: Any, target: str) -> Any:
    return schedule_function(func, find_profile(target), Defaults())[0]


@needs_qemu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "size"), (("int8", 24), ("int4", 48)))
def test_attention(dtype: str, size: int, target: str, tmp_path: Path) -> None:
    problem = Problem(3, 2, size, dtype=dtype)
    problem.rounds_q = target == "graviton2"
    run = emulated(scheduled(problem.func(), target), find_profile(target), tmp_path)
    for queries, tokens, kind in ((1, 77, "keys"), (9, 70, "causal"), (2, 16, "lowest")):
        problem.check(run, 2, queries, tokens, kind)


@needs_qemu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ("keys", "rows"))
@pytest.mark.parametrize("dtype", ("int8", "int4"))
def test_caches(dtype: str, target: str, layout: str, tmp_path: Path) -> None:
    rng, width = np.random.default_rng(0), 24 if dtype == "int8" else 32
    past = rng.standard_normal((2, 3, 5, width)).astype(np.float32)
    new = rng.standard_normal((2, 16, 3, width)).astype(np.float32)
    shapes = ("b", 3, "p", width), ("b", "s", 3, width)
    func = coded_cache(*shapes, ((2, 0, 1, 3), (1, 0, 2, 3)), layout, dtype=dtype)
    kept, total = (p for p in func.params if not hasattr(p, "shape"))
    fixed = {kept: tirx.const(0, "int64"), total: tirx.const(21, "int64")}
    made = scheduled(func, target).specialize(fixed)
    whole = np.concatenate([past.transpose(2, 0, 1, 3), new.transpose(1, 0, 2, 3)])
    if dtype == "int8":
        codes, scales = coded(whole)
        packed = in_fours(codes) if layout == "keys" else codes
    else:
        codes, scales, _ = nibbles(whole)
        packed = keys_in_pairs(codes) if layout == "keys" else values_in_pairs(codes)
    scales = by_blocks(scales)
    nothing = np.nan if dtype == "int8" else NO_NUMBER
    got = np.full(scales.shape, nothing, scales.dtype), np.full(packed.shape, 99, packed.dtype)
    emulated(made, find_profile(target), tmp_path)(past, new, *got)
    np.testing.assert_array_equal(got[0], scales)
    np.testing.assert_array_equal(got[1], packed)


@pytest.mark.parametrize("dtype", ("int8", "int4"))
def test_scores_are_dot_products_where_there_are_some(dtype: str) -> None:
    func = Problem(3, 2, 64, dtype=dtype).func()
    for target, some in zip(TARGETS, (True, False), strict=True):
        source = assembly(scheduled(func, target), find_profile(target))
        assert (count(source, "sdot") > 0) == some

"""Int8 caches and the attention that reads them, on Arm with sdot and without, under qemu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arm_tools import assembly, count, emulated, needs_qemu
from attention_cases import Problem, by_blocks, coded, in_fours
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
def test_attention(target: str, tmp_path: Path) -> None:
    problem = Problem(3, 2, 24, dtype="int8")
    problem.rounds_q = target == "graviton2"
    run = emulated(scheduled(problem.func(), target), find_profile(target), tmp_path)
    for queries, tokens, kind in ((1, 77, "keys"), (9, 70, "causal"), (2, 16, "lowest")):
        problem.check(run, 2, queries, tokens, kind)


@needs_qemu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ("keys", "rows"))
def test_caches(target: str, layout: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    past = rng.standard_normal((2, 3, 5, 24)).astype(np.float32)
    new = rng.standard_normal((2, 16, 3, 24)).astype(np.float32)
    func = coded_cache(("b", 3, "p", 24), ("b", "s", 3, 24), ((2, 0, 1, 3), (1, 0, 2, 3)), layout)
    kept, total = (p for p in func.params if not hasattr(p, "shape"))
    fixed = {kept: tirx.const(0, "int64"), total: tirx.const(21, "int64")}
    made = scheduled(func, target).specialize(fixed)
    codes, scales = coded(np.concatenate([past.transpose(2, 0, 1, 3), new.transpose(1, 0, 2, 3)]))
    packed = in_fours(codes) if layout == "keys" else codes
    got = np.full((2, 2, 3, 16), np.nan, np.float32), np.full_like(packed, 99)
    emulated(made, find_profile(target), tmp_path)(past, new, *got)
    np.testing.assert_array_equal(got[0], by_blocks(scales))
    np.testing.assert_array_equal(got[1], packed)


def test_scores_are_dot_products_where_there_are_some() -> None:
    func = Problem(3, 2, 64, dtype="int8").func()
    for target, some in zip(TARGETS, (True, False), strict=True):
        source = assembly(scheduled(func, target), find_profile(target))
        assert (count(source, "sdot") > 0) == some

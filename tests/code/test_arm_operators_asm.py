"""Operators on Arm: what LLVM makes of their loops."""

from __future__ import annotations

import re
from typing import Any

import pytest
from arm_tools import assembly, count, inner_loop
from test_arm_operators import PV, QK, scheduled

from apq_tvm.ops.graph.batch_matmul import batch_matmul
from apq_tvm.ops.graph.softmax import softmax
from apq_tvm.schedules.devices import find_profile

WIDE_QK = (("B", "S", 3, 32), ("B", "T", 3, 32), *QK[2:])


@pytest.mark.parametrize(("problem", "target"), ((WIDE_QK, "graviton2"), (PV, "cortex-a55")))
def test_products_multiply_by_lane(problem: Any, target: str) -> None:
    """8 x 8 sums: 64 multiply-adds per four k, 16 vectors loaded for them, nothing spilled."""
    source = assembly(scheduled(batch_matmul(*problem), target), find_profile(target))
    loop = re.split(r"\n\s+(?:b\.\w+|cbn?z)\b", inner_loop(source, "fmla"))[0]
    found = count(loop, "fmla")
    assert found and found % 64 == 0 and count(loop, "dup|ld1r") == 0
    assert "[sp" not in loop


def test_rests_are_loops_not_branches_per_lane() -> None:
    """NEON has no masked stores: LLVM would test every lane of a mask."""
    source = assembly(scheduled(softmax(("B", "S", "S"))), find_profile("graviton2"))
    assert count(source, r"tbn?z|umov") < 30

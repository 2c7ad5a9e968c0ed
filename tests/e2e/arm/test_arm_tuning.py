"""Candidates for Arm under qemu: folded activations have a reference of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apq_tvm.codegen.build.toolchain import find_toolchain
from apq_tvm.errors import ApqError
from apq_tvm.tensorize.meaning.spans.folded_rows import FoldedRows
from apq_tvm.tune.api import devices_of, plan_of
from apq_tvm.tune.candidates import Workshop
from apq_tvm.tune.measure import OK, Bench
from apq_tvm.tune.program import Linker
from apq_tvm.tune.space import covering
from apq_tvm.tune.tasks import extract
from tests.isa.arm_tools import needs_qemu

CASES = [
    ("cortex-a76", "W4A8g32", 1), ("cortex-a76", "W2A8g64", 1), ("graviton3", "W4A8g32", 3),
    ("cortex-a76", "W4zA8g32", 1),
]  # fmt: skip
MORE = [
    ("cortex-a76", "W8A8", 1), ("cortex-a76", "W4A8g32", 5), ("cortex-a76", "W3A8g64", 1),
    ("cortex-a55", "W4A8g32", 1), ("graviton3", "W4A8g32", 1), ("graviton3", "W2A8g64", 8),
    ("graviton3", "W8A8", 2), ("cortex-a72", "W4A8g32", 1), ("cortex-a76", "W4A8", 1),
    ("cortex-a76", "W2zA8g64", 2), ("graviton3", "W4zA8g32", 1), ("cortex-a76", "W1A8g32", 1),
]  # fmt: skip


def trials(target: str, scheme: str, m: int, most: int, folder: Path) -> list[Any]:
    """Of a covering sample of every space."""
    (plan,) = plan_of(None, target, scheme, [(24, 192)])
    (device,) = devices_of("qemu://max", plan.profile)
    linker, made = Linker(find_toolchain(plan.profile.triple, exact=False), folder), []
    for task in extract(plan, [m]):
        points = task.space().points
        bench = Bench(Workshop(task, folder, 1), linker, device, folder, points[0])
        made += [(task, t) for t in bench.trials(covering(points)[:most], rounds=1)]
    return made


@needs_qemu
@pytest.mark.parametrize(
    ("target", "scheme", "m"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.all_cases) for case in MORE)],
)
def test_candidates_for_arm_are_right(
    target: str, scheme: str, m: int, tmp_path: Path, request: Any
) -> None:
    most = 60 if request.config.getoption("--all-cases") else 6
    made = trials(target, scheme, m, most, tmp_path)
    assert {task.op for task, _ in made} == {"linear", "function"}
    wrong = [(t.point.text(), t.status, t.why) for _, t in made if t.status != OK]
    assert not wrong


@needs_qemu
def test_what_a_fold_means_is_what_candidates_are_compared_with(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Without it the default itself would be wrong; with it one weight more is seen."""
    (plan,) = plan_of(None, "cortex-a76", "W4A8g32", [(24, 192)])
    (task,) = [t for t in extract(plan, [1]) if t.op == "linear"]
    made = task.preparation(task.kernel_named(task.kernel))
    assert made is not None and isinstance(made.folded, FoldedRows) and made.folded.rounds
    dense, one = task.dense(), Workshop.expected

    def wrong(self: Workshop, folded: FoldedRows | None = None) -> Any:
        return one(self, None)

    monkeypatch.setattr(Workshop, "expected", wrong)
    with pytest.raises(ApqError, match="as far from the reference"):
        trials("cortex-a76", "W4A8g32", 1, 2, tmp_path)
    monkeypatch.undo()
    step = float(np.abs(task.tensor.scales).min())  # type: ignore[union-attr]
    other = dense.copy()
    other[3, 100] += step
    monkeypatch.setattr(type(task), "dense", lambda self: other)
    with pytest.raises(ApqError, match="as far from the reference"):
        trials("cortex-a76", "W4A8g32", 1, 2, tmp_path)

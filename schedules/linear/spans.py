"""What kernels for weights in small groups share: names, checks and the schedule of few rows.

Their loops are `apq_tvm.ops.few_rows`'s `spans`, `lookup_spans` and `super_records`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.formats import codebook, half, nonlinear, superblock
from apq_tvm.ops.blocks import STAGES
from apq_tvm.ops.few_rows.task import DOTS
from apq_tvm.schedules.linear.kernel import PARALLEL_WEIGHTS, Choice

WEIGHTS = {
    codebook.NAME: "cb",
    nonlinear.NAME: "nl4",
    half.NAME: "Wh",
    superblock.NAME: "Ws",
}
"""Weights of each family in the names of its kernels."""


def schedule_spans(sch: Any, choice: Choice, intrinsic: Callable[[str], str]) -> None:
    """Parallel tasks, stages a vector wide, products by intrinsics.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    choice : Choice
    intrinsic : callable
        Name of a block of products to the registered name of what computes it.
    """
    annotations = sch.get(sch.get_sblock("root")).annotations
    (task,) = sch.get_loops(sch.get_sblock("task"))
    if choice.spec.n * choice.spec.k >= PARALLEL_WEIGHTS:
        sch.parallel(task)
    for name in map(str, annotations[STAGES]):
        *outer, lane = sch.get_loops(sch.get_sblock(name))
        sch.vectorize(lane)
        for loop in outer:
            sch.unroll(loop)
    for name in map(str, annotations[DOTS]):
        sch.tensorize(sch.get_loops(sch.get_sblock(name))[0], intrinsic(name))

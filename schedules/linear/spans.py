"""The schedule of layers in small groups: `apq_tvm.ops.few_rows`'s `spans` and `lookup_spans`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.ops.few_rows.spans import DOTS, STAGES

PARALLEL = 1 << 16
"""Weights from which on a second thread pays."""


def schedule_spans(sch: Any, intrinsic: Callable[[str], str], parallel: bool) -> None:
    """Parallel tasks, stages a vector wide, products by intrinsics.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    intrinsic : callable
        Name of a block of products to the registered name of what computes it.
    parallel : bool
        Whether bundles are shared among threads.
    """
    annotations = sch.get(sch.get_sblock("root")).annotations
    (task,) = sch.get_loops(sch.get_sblock("task"))
    if parallel:
        sch.parallel(task)
    for name in map(str, annotations[STAGES]):
        *outer, lane = sch.get_loops(sch.get_sblock(name))
        sch.vectorize(lane)
        for loop in outer:
            sch.unroll(loop)
    for name in map(str, annotations[DOTS]):
        sch.tensorize(sch.get_loops(sch.get_sblock(name))[0], intrinsic(name))

"""What the schedules of all GEMMs share: the stages of a task (`apq_tvm.ops.many_rows.task`)."""

from __future__ import annotations

from typing import Any

from apq_tvm.ops.blocks import STAGES

TILE_STAGES = ("load", "wait", "start", "sum", "spill", "store")
"""What the names of a tile's stages begin with."""


def even_block(k: int, step: int, target: int) -> int:
    """About `target` of K, a multiple of `step`, so that K falls into blocks of nearly one size."""
    steps = -(-k // step)
    blocks = -(-steps // max(1, target // step))
    return -(-steps // blocks) * step


def schedule_stages(
    sch: Any, unrolled: tuple[str, ...] = TILE_STAGES, parallel: bool = True
) -> None:
    """Parallel tasks; every stage a vector wide, the `unrolled` ones in registers."""
    (task,) = sch.get_loops(sch.get_sblock("task"))
    if parallel:
        sch.parallel(task)
    stages = [str(name) for name in sch.get(sch.get_sblock("root")).annotations[STAGES]]
    for name in stages:
        *_, lane = loops = sch.get_loops(sch.get_sblock(name))
        sch.vectorize(lane)
        if name.startswith(unrolled):
            for loop in loops[:-1]:
                sch.unroll(loop)
        elif name.startswith("decode"):
            sch.unroll(loops[-2])

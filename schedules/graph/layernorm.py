"""LayerNormalization: rows in parallel, three passes over a row that stays in L1."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.generic import schedule_generic
from apq_tvm.schedules.graph.rewrites.loops import distribute_rows, elements, parallel_when
from apq_tvm.schedules.graph.rewrites.lowering import finish, lower_blocks
from apq_tvm.schedules.graph.rewrites.vectorize import vectorize_loops
from apq_tvm.types import DeviceProfile


def schedule_layernorm(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.graph.layernorm.layernorm`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``row_tile`` (rows whose passes alternate), ``unroll`` (vectors per iteration),
        ``parallel_least`` (elements).

    Returns
    -------
    tvm.tirx.PrimFunc
        Lowered and vectorized.
    """
    if func.attrs["apq.statistics"]:  # rows cannot share a loop with steps that are results
        return schedule_generic(func, profile, decide)[0]
    sch = s_tir.Schedule(func)
    y = sch.get_sblock("y")
    outer = sch.get_loops(y)[: int(func.attrs["apq.rows"])]
    if outer:
        for name in reversed([str(s) for s in func.attrs["apq.steps"]]):
            sch.compute_at(sch.get_sblock(name), outer[-1], preserve_unit_loops=True)
        sch.parallel(sch.fuse(*outer))
    lowered = lower_blocks(sch.mod["main"])
    if outer:
        lowered = distribute_rows(lowered, decide("row_tile", (4, 1, 2, 8)))
    lowered = vectorize_loops(lowered, profile.vector_bytes, decide("unroll", (4, 2, 1)))
    return finish(parallel_when(lowered, elements(func.params[0]), 32768, decide))

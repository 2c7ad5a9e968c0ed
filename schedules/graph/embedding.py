"""Embedding lookup: one row per id, decoded a vector of codes at a time."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.rewrites.loops import elements, parallel_when
from apq_tvm.schedules.graph.rewrites.lowering import finish, lower_blocks
from apq_tvm.schedules.graph.rewrites.vectorize import vectorize_loops
from apq_tvm.types import DeviceProfile


def schedule_embedding(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.graph.embedding.embedding`.

    Rows whose width is no multiple of the layout's slice are decoded element by element.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``unroll`` (vectors per iteration), ``parallel_least`` (elements).

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    sch = s_tir.Schedule(func)
    *outer, last = sch.get_loops(sch.get_sblock("y"))
    width, run = int(func.params[-1].shape[-1]), int(func.attrs["apq.slice"])
    if run < width:
        sch.split(last, [None, min(32, width) // run if width % 32 == 0 else 1, run])
    if outer:
        sch.parallel(sch.fuse(*outer))
    lowered = lower_blocks(sch.mod["main"])
    lowered = vectorize_loops(lowered, profile.vector_bytes, decide("unroll", (1, 2, 4)))
    return finish(parallel_when(lowered, elements(func.params[-1]), 65536, decide))

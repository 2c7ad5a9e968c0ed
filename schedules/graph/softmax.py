"""softmax: one row at a time, in three passes over a row that stays in L1.

Pass 1 finds the largest score, pass 2 writes the exponentials into the output and sums them, pass 3
multiplies by the inverse sum. Rows run in parallel.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.rewrites.loops import (
    distribute_rows,
    elements,
    parallel_when,
    reuse_output,
)
from apq_tvm.schedules.graph.rewrites.lowering import finish, lower_blocks
from apq_tvm.schedules.graph.rewrites.vectorize import vectorize_loops
from apq_tvm.types import DeviceProfile


def schedule_softmax(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.graph.softmax.softmax`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``unroll`` (vectors per iteration), ``parallel_least`` (elements).

    Returns
    -------
    tvm.tirx.PrimFunc
        Lowered and vectorized.
    """
    sch = s_tir.Schedule(func)
    *outer, _ = sch.get_loops(sch.get_sblock("y"))
    if outer:
        for name in ("inverse", "total", "e", "largest"):
            sch.compute_at(sch.get_sblock(name), outer[-1], preserve_unit_loops=True)
    # The sum reads each exponential right after it is computed.
    element = sch.get_loops(sch.get_sblock("e"))[-1]
    sch.reverse_compute_at(sch.get_sblock("total"), element)
    if outer:  # fused last: of a fused loop TVM cannot prove that its rows are in bounds
        sch.parallel(sch.fuse(*outer))
    lowered = reuse_output(lower_blocks(sch.mod["main"]), "e")
    if outer:
        lowered = distribute_rows(lowered, decide("row_tile", (4, 1, 2, 8, 16)))
    lowered = vectorize_loops(lowered, profile.vector_bytes, decide("unroll", (2, 1, 4)))
    return finish(parallel_when(lowered, elements(func.params[-1]), 16384, decide))

"""Kernels tell the module's runtime of a parallel loop before they launch it.

TVM's launch does not say how many iterations it has, and deals them to tasks in equal shares,
rounded up. Only who knows their number can cut a loop so that no task is empty and all threads end
together. A kernel whose grain was decided tells that too
(`apq_tvm.schedules.graph.rewrites.loops.with_grain`).
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from apq_tvm.schedules.graph.rewrites.loops import grain_of

FUNCTION, GRAIN = "apq_loop_iterations", "apq_loop_grain"
"""Of codegen/runtime/cpu/launch.c."""


def tell_iterations(func: Any) -> Any:
    """Put a call of `FUNCTION` before every parallel loop, and one of `GRAIN` if it is decided.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered to loops.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    grain = grain_of(func)

    def tell(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        calls = [(FUNCTION, tirx.Cast("int64", loop.extent))]
        if grain != 1:
            calls.append((GRAIN, tirx.const(grain, "float64")))
        told = [tirx.Evaluate(tirx.call_extern("int32", *call)) for call in calls]
        return tirx.SeqStmt([*told, loop])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, tell)))

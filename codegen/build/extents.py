"""Kernels tell the module's runtime how many iterations a parallel loop has, before they launch it.

TVM's launch says nothing of it, and deals iterations to tasks in equal shares, rounded up. Only who
knows their number can cut a loop so that no task is empty and all threads end together.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

FUNCTION = "apq_loop_iterations"
"""Of codegen/runtime/cpu/launch.c."""


def tell_iterations(func: Any) -> Any:
    """Put a call of `FUNCTION` before every parallel loop.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered to loops.

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def tell(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        count = tirx.Cast("int64", loop.extent)
        return tirx.SeqStmt([tirx.Evaluate(tirx.call_extern("int32", FUNCTION, count)), loop])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, tell)))

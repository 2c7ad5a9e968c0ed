"""Decision trees: tasks of some rows, spread over the threads."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.rewrites.loops import fuse_outer
from apq_tvm.schedules.graph.rewrites.lowering import finish, lower_blocks
from apq_tvm.types import DeviceProfile


def schedule_trees(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.graph.trees.trees`.

    LLVM would make vectors of walks that go side by side, and gather what they compare, which takes
    2.5 times as long on a Zen 5. It knows no vectors of the fence, which costs no instruction.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def fenced(load: Any) -> Any:
        if not load.source.same_as(func.params[0]):
            return load
        return tirx.call_llvm_intrin(str(load.ty), "llvm.arithmetic.fence", load)

    alone = func.with_body(tvm_ffi.structural_map(func.body, (ir.TensorLoad, fenced)))
    lowered = lower_blocks(alone if profile.arch == "x86_64" else func)
    *views, tasks = lowered.body.seq
    return finish(lowered.with_body(tirx.stmt_seq(*views, fuse_outer([tasks], tasks.body))))

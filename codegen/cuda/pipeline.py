"""What becomes of scheduled TensorIR before CUDA: TVM's passes, without those that change nothing.

TVM's default pipeline (``tvm/s_tir/pipeline.py``, 0.27) also walks every function for what no
schedule of ours asks for: software pipelines, virtual threads, double buffers, permuted layouts,
copies and fragments that TVM writes itself, VTCM, types of 8 bits. They took a third of its time.
Functions that are written as they are to run, as attention is, have no array that is too large:
``CompactBufferAllocation`` took half of the time of one over caches.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir, tirx

from apq_tvm.schedules.graph.exprs import collect


def to_kernels() -> Any:
    """Make a pass that cuts scheduled functions into kernels and what launches them.

    Returns
    -------
    tvm.ir.transform.Pass
        Of a module whose functions have their target bound.
    """
    structured, plain = s_tir.transform, tirx.transform
    passes = (
        tvm.transform.module_pass(_lower_blocks, opt_level=0, name="apq.LowerBlocks"),
        structured.UnifyThreadBinding(),
        structured.LowerMatchBuffer(),
        structured.StmtSimplify(),
        structured.LowerOpaqueBlock(),
        plain.FlattenBuffer(),
        plain.BF16ComputeLegalize(),
        plain.NarrowDataType(32),
        structured.LoopPartition(),
        plain.VectorizeLoop(True),
        structured.ConvertSSA(),  # loops that were cut have the same variables
        plain.StorageRewrite(),
        plain.UnrollLoop(),
        structured.RenormalizeSplitPattern(),
        plain.StmtSimplify(),
        plain.RemoveNoOp(),
        structured.RewriteUnsafeSelect(),
        plain.CommonSubexprElim(),
        plain.VerifyMemory(),
        plain.AnnotateEntryFunc(),
        structured.ThreadSync("shared"),
        structured.ThreadSync("shared.dyn"),
        structured.ThreadSync("warp"),
        structured.LowerThreadAllreduce(),
        structured.MergeSharedMemoryAllocations(),
        plain.SplitHostDevice(),
        plain.MakePackedAPI(),
        plain.BF16StorageLegalize(),
    )
    return tvm.ir.transform.Sequential(passes)


def _lower_blocks(mod: Any, _: Any) -> Any:
    """Arrays are as large as need be, and made where they are used."""
    structured = s_tir.transform
    passes = (
        structured.CanonicalizeLoop(),
        structured.LowerCrossThreadReduction(),
        structured.LowerInitBlock(),
        structured.PlanAndUpdateBufferAllocationLocation(),
        structured.ConvertBlocksToOpaque(),
        structured.LiftThreadBinding(),
    )
    opened = tvm.ir.transform.Sequential(passes)(mod)
    # Blocks with axes are what schedules are about; opened ones have none.
    scheduled = {
        name: opened[name]
        for name, func in mod.functions.items()
        if any(block.iter_vars for block in collect(func.body, s_tir.SBlock))
    }
    compact = structured.CompactBufferAllocation()(tvm.IRModule(scheduled))
    # `update` would put these last, and the source's kernels into another order.
    made = {
        name: compact[name] if name in scheduled else func
        for name, func in opened.functions.items()
    }
    return tvm.IRModule(made, attrs=opened.attrs)

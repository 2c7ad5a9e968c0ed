"""What becomes of scheduled TensorIR before LLVM: TVM's passes for CPUs, and one of ours.

TVM's default pipeline (``tvm/s_tir/pipeline.py``, 0.27) walks every function for GPUs too, and for
values of nested ``Let`` expressions it puts back what each stands for, in every pass anew: a kernel
with ``gelu`` took 2 to 4 s, of which LLVM's share is a tenth. Here passes for GPUs are left out,
which changes nothing, and large values become slots as soon as loops are vectorized
(`apq_tvm.schedules.graph.rewrites.lets.spill_large`). Functions that a schedule has lowered to
loops itself skip the passes over blocks, of which ``CompactBufferAllocation`` alone took half of
all the time.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.s_tir.pipeline import finalize_device_passes, finalize_host_passes
from tvm.tirx.compilation_pipeline import register_tir_pipeline

from apq_tvm.codegen.build.alignment import lower_alignment
from apq_tvm.codegen.build.divisions import around
from apq_tvm.codegen.build.each import each_function
from apq_tvm.codegen.build.extents import tell_iterations
from apq_tvm.codegen.build.near import keep_near
from apq_tvm.codegen.build.slots import bind_slots
from apq_tvm.codegen.build.wraps import keep_scalar
from apq_tvm.schedules.graph.exprs import collect
from apq_tvm.schedules.graph.rewrites.lets import hide_binds, spill_large

NAME = "apq_cpu"
IN_MODULE = "apq_cpu_module"
"""The same for kernels of a module, whose runtime is ours."""


def complete_conditions(func: Any) -> Any:
    """Give an ``if`` without ``else``, inside of one that has it, an ``else`` that does nothing.

    For TVM 0.27's ``HoistIfThenElse``, which otherwise takes the outer one's other case away.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def complete(inner: Any) -> Any:
        if inner.else_case is not None:
            return inner
        return tirx.IfThenElse(inner.condition, inner.then_case, tirx.Evaluate(0))

    def inside(outer: Any) -> Any:
        if outer.else_case is None:
            return outer
        rule = (tirx.IfThenElse, complete)
        cases = (tvm_ffi.structural_map(c, rule) for c in (outer.then_case, outer.else_case))
        return tirx.IfThenElse(outer.condition, *cases)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.IfThenElse, inside)))


def _share(mod: Any, _: Any) -> Any:
    """Common subexpressions, except where TVM 0.27 cannot bind them; LLVM finds them by itself."""
    shared = tirx.transform.CommonSubexprElim()(mod)
    functions = {
        name: func if _can_bind(func) else mod[name] for name, func in shared.functions.items()
    }
    return tvm.IRModule(functions, attrs=shared.attrs)


def _can_bind(func: Any) -> bool:
    """Whether the analyzer, which later passes and LLVM code generation ask, takes every binding.

    It makes an integer of what it knows of a vector of conditions, or of a float that was cast
    from a dimension, and fails.
    """
    for bind in collect(func.body, tirx.Bind):
        try:
            sym.Analyzer().bind(bind.var, bind.value)
        except Exception as error:
            if "IntImm" not in str(error):
                raise
            return False
    return True


def _lower_blocks(mod: Any, _: Any) -> Any:
    """Blocks become loops over buffers as large as need be."""
    done, open_ = {}, {}
    for name, func in mod.functions.items():
        body = _within_root(func)
        if body is None:
            open_[name] = func
        else:
            done[name] = func.with_body(body)
    structured = s_tir.transform
    passes = (
        structured.CanonicalizeLoop(),
        structured.LowerInitBlock(),
        structured.PlanAndUpdateBufferAllocationLocation(),
        structured.ConvertBlocksToOpaque(),
        structured.CompactBufferAllocation(),
        structured.LowerMatchBuffer(),
    )
    if open_:
        done.update(tvm.ir.transform.Sequential(passes)(tvm.IRModule(open_)).functions.items())
    return tvm.IRModule(done, attrs=mod.attrs)


def _within_root(func: Any) -> Any:
    """The body of a function without blocks but for the root; None if there are others.

    `apq_tvm.schedules.graph.rewrites.lowering.finish` makes such functions.
    """
    body = func.body
    if not isinstance(body, s_tir.SBlockRealize):
        return None if collect(body, s_tir.SBlock) else body
    root = body.block
    plain = not (root.alloc_buffers or root.match_buffers or root.annotations or root.iter_vars)
    return root.body if plain and len(collect(body, s_tir.SBlock)) == 1 else None


def _passes(in_module: bool = False) -> tuple[Any, Any, Any]:
    """The passes of all functions, then what finishes those of hosts and of devices."""
    tell = each_function(tell_iterations, "apq.TellIterations")
    structured, plain = s_tir.transform, tirx.transform
    passes = (
        tvm.transform.module_pass(_lower_blocks, opt_level=0, name="apq.LowerBlocks"),
        each_function(hide_binds, "apq.HideBinds"),
        structured.StmtSimplify(),
        structured.AnnotateIrregularLoop(),
        structured.LowerOpaqueBlock(),  # also takes away loops of one iteration
        plain.FlattenBuffer(),
        plain.BF16ComputeLegalize(),
        plain.NarrowDataType(32),
        structured.LoopPartition(),
        plain.VectorizeLoop(True),
        each_function(spill_large, "apq.SpillLarge"),
        plain.StorageRewrite(),
        each_function(complete_conditions, "apq.CompleteConditions"),
        structured.HoistIfThenElse(),
        plain.UnrollLoop(),
        structured.RenormalizeSplitPattern(),
        plain.StmtSimplify(),
        plain.RemoveNoOp(),
        structured.RewriteUnsafeSelect(),
        tvm.transform.module_pass(_share, opt_level=0, name="apq.CommonSubexprElim"),
        each_function(keep_scalar, "apq.KeepScalar"),
        each_function(keep_near, "apq.KeepNear"),
        *([tell] if in_module else []),
        plain.FP8ComputeLegalize(),
        plain.VerifyMemory(),
        plain.AnnotateEntryFunc(),
        plain.SplitHostDevice(),
        *([each_function(lower_alignment, "apq.LowerAlignment")] if in_module else []),
        plain.MakePackedAPI(),
        plain.FP8StorageLegalize(),
        plain.BF16StorageLegalize(),
    )
    sequence = tvm.ir.transform.Sequential
    slots = each_function(bind_slots, "apq.BindSlots")

    def finish() -> Any:
        return sequence([around(finalize_host_passes()), slots])

    return sequence(passes), finish, finalize_device_passes


register_tir_pipeline(NAME, _passes)
register_tir_pipeline(IN_MODULE, lambda: _passes(in_module=True))


def build(mod: Any, target: Any, checked: bool = True, in_module: bool = False) -> Any:
    """Compile PrimFuncs for a CPU.

    Parameters
    ----------
    mod : tvm.IRModule
        Scheduled functions with a ``global_symbol`` each.
    target : tvm.target.Target
        Of kind llvm.
    checked : bool
        Let kernels check the type, rank and dimensions of their arguments; several KB of code each.
    in_module : bool
        They will call our runtime instead of TVM's.

    Returns
    -------
    tvm.runtime.Module

    Raises
    ------
    Exception
        Of TVM's own, which have no base.
    """
    with tvm.transform.PassContext(config={"tirx.disable_assert": not checked}):
        return tirx.build(mod, target=target, pipeline=IN_MODULE if in_module else NAME)

"""From scheduled blocks to plain loops: the passes that come before our own loop rewrites.

The same passes open TVM's own pipeline (``tvm.s_tir.pipeline``), which leaves functions without
blocks as they are. Running them early gives `vectorize` flat buffers and loops to work on.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from apq_tvm.ops import math
from apq_tvm.schedules.graph.exprs import uses

_MATH = {
    f"tirx.{name}": getattr(math, name)
    for name in ("exp", "log", "sin", "cos", "asin", "acos", "atan", "erf", "tanh", "sigmoid")
}


def expand_math(func: Any) -> Any:
    """Replace float32 calls of elementary functions by expressions that vectorize.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc

    Returns
    -------
    tvm.tirx.PrimFunc
    """

    def visit(call: Any) -> Any:
        expand = _MATH.get(getattr(call.op, "name", ""))
        if expand is None or str(call.ty) != "float32":
            return call
        return expand(call.args[0])

    return func.with_body(tvm_ffi.structural_map(func.body, (ir.Call, visit)))


def hoist_init(func: Any) -> Any:
    """Move the start value of a reduction, ``if k == 0: s = 0``, in front of the loop over ``k``.

    TensorIR's ``decompose_reduction`` does this on blocks, but must come after ``parallel`` and
    then adds bound checks that TVM cannot prove away on fused loops.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered.

    Returns
    -------
    tvm.tirx.PrimFunc
        An empty reduction gives its start value instead of nothing.
    """

    def conjuncts(condition: Any) -> list[Any]:
        if isinstance(condition, tirx.And):
            return conjuncts(condition.a) + conjuncts(condition.b)
        return [condition]

    def is_first(condition: Any, var: Any) -> bool:
        return isinstance(condition, tirx.EQ) and any(
            a.same_as(var) and isinstance(b, tirx.IntImm) and int(b) == 0
            for a, b in ((condition.a, condition.b), (condition.b, condition.a))
        )

    def visit(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.SERIAL:
            return loop
        parts = list(loop.body.seq) if isinstance(loop.body, tirx.SeqStmt) else [loop.body]
        before: list[Any] = []
        kept: list[Any] = []
        for part in parts:
            tests = conjuncts(part.condition) if isinstance(part, tirx.IfThenElse) else []
            others = [t for t in tests if not is_first(t, loop.loop_var)]
            first = len(others) < len(tests) and part.else_case is None
            if not first or uses(part.then_case, loop.loop_var):
                kept.append(part)
                continue
            start = part.then_case
            if others:
                start = tirx.IfThenElse(functools.reduce(tirx.And, others), start, None)
            before.append(start)
        if not before:
            return loop
        body = tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, tirx.stmt_seq(*kept),
            annotations=loop.annotations,
        )  # fmt: skip
        return tirx.stmt_seq(*before, body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, visit)))


def lower_blocks(func: Any) -> Any:
    """Lower blocks to loops over flat buffers and simplify every index.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        With or without blocks.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    passes = tvm.ir.transform.Sequential(
        [
            s_tir.transform.CanonicalizeLoop(),
            s_tir.transform.LowerInitBlock(),
            s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
            s_tir.transform.ConvertBlocksToOpaque(),
            s_tir.transform.CompactBufferAllocation(),
            s_tir.transform.LowerMatchBuffer(),
            s_tir.transform.StmtSimplify(),
            s_tir.transform.LowerOpaqueBlock(),
            tirx.transform.FlattenBuffer(),
            s_tir.transform.StmtSimplify(),
        ]
    )
    return hoist_init(passes(tvm.IRModule({"main": func}))["main"])


def truncate_divisions(func: Any, sizes: Collection[str] = ()) -> Any:
    """Make ``//`` and ``%`` of sizes and loop variables the processor's own division.

    TVM rounds towards minus infinity and cannot know that a dynamic size is not negative: each
    division becomes several with selections around them, and a nest of them (batch indices out of
    one task number) takes its simplifier exponential time.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Scalar arguments may be negative; sizes and loop variables are not.
    sizes : collection of str
        Scalar arguments that are sizes.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    scalars = {p.name for p in func.params if not tirx.is_buffer_var(p)}
    unknown = scalars.difference(sizes)

    def bind(node: Any) -> Any:
        if not natural(node.value):
            unknown.add(node.var.name)
        return node

    def natural(e: Any) -> bool:
        if isinstance(e, tirx.IntImm):
            return int(e) >= 0
        if isinstance(e, tirx.Var):
            return str(e.ty) in ("int32", "int64") and e.name not in unknown
        if isinstance(e, tirx.Cast):
            return natural(e.value)
        if isinstance(
            e, tirx.Add | tirx.Mul | tirx.FloorDiv | tirx.FloorMod | tirx.Div | tirx.Mod
        ) or isinstance(e, tirx.Min | tirx.Max):
            return natural(e.a) and natural(e.b)
        return False

    def divide(node: Any) -> Any:
        if not (natural(node.a) and natural(node.b)):
            return node
        return tirx.truncdiv(node.a, node.b)

    def modulo(node: Any) -> Any:
        if not (natural(node.a) and natural(node.b)):
            return node
        return tirx.truncmod(node.a, node.b)

    def let(node: Any) -> Any:
        unknown.add(node.var.name)
        return node

    tvm_ffi.structural_map(func.body, ((tirx.Bind, bind), (tirx.Let, let)))
    return func.with_body(
        tvm_ffi.structural_map(func.body, ((tirx.FloorDiv, divide), (tirx.FloorMod, modulo)))
    )


def finish(func: Any) -> Any:
    """Give every definition a variable of its own and mark the function as scheduled.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Lowered; rewrites may have copied loops with their variables.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    func = s_tir.transform.ConvertSSA()(tvm.IRModule({"main": func}))["main"]
    func = truncate_divisions(func)
    # Relax passes that look at PrimFuncs (RewriteDataflowReshape) insist on a root block.
    root = s_tir.SBlock([], [], [], "root", func.body)
    func = func.with_body(s_tir.SBlockRealize([], tirx.const(True, "bool"), root))
    return func.with_attr("tirx.is_scheduled", True)

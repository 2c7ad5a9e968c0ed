"""Steps of the generic schedules on TensorIR blocks: inlining, loop order, row operations.

Every step tries and skips: a primitive that TVM refuses leaves the schedule as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from apq_tvm.schedules.graph.exprs import call_name, collect, uses

# Calls that cost more than loading their result again.
_CHEAP = frozenset(("reinterpret", "shift_left", "shift_right", "bitwise_and", "bitwise_or", "abs"))

SPATIAL, REDUCE = 0, 2  # IterVar.iter_type of data-parallel and reduction axes


def is_reduction(sch: Any, block: Any) -> bool:
    """True if the block reduces over an axis."""
    return any(int(v.iter_type) == REDUCE for v in sch.get(block).iter_vars)


def is_plain(sch: Any, block: Any) -> bool:
    """True if the block is one store under loops that are its axes one by one."""
    node = sch.get(block)
    return (
        isinstance(node.body, tirx.BufferStore)
        and all(int(v.iter_type) in (SPATIAL, REDUCE) for v in node.iter_vars)
        and len(sch.get_loops(block)) == len(node.iter_vars)
    )


def _is_costly(sch: Any, block: Any) -> bool:
    calls = collect(sch.get(block).body, ir.Call)
    return any(call_name(c) not in _CHEAP for c in calls)


def _try(sch: Any, primitive: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        primitive(*args, **kwargs)
    except (s_tir.ScheduleError, RuntimeError):
        return False
    return True


def is_contraction(sch: Any, block: Any) -> bool:
    """True for a sum of products in which some factor does not depend on every result axis."""
    node = sch.get(block)
    if not is_reduction(sch, block) or not isinstance(node.body, tirx.BufferStore):
        return False
    value = node.body.value
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        return False
    loads = collect(value.b, ir.TensorLoad)
    axes = [
        v.var
        for v in node.iter_vars
        if int(v.iter_type) == SPATIAL
        and not (isinstance(v.dom.extent, tirx.IntImm) and int(v.dom.extent) == 1)
    ]
    return len(loads) > 1 and any(
        not any(uses(i, axis) for i in load.indices) for load in loads for axis in axes
    )


def child_blocks(sch: Any) -> list[Any]:
    """Blocks under the root, in order; empty if the function is not made of blocks."""
    try:
        return list(sch.get_child_blocks(sch.get_sblock("root")))
    except (s_tir.ScheduleError, RuntimeError):
        return []


def _writes_output(sch: Any, block: Any, outputs: Sequence[Any]) -> bool:
    return any(w.source.same_as(o) for w in sch.get(block).writes for o in outputs)


def inline_producers(sch: Any, outputs: Sequence[Any]) -> None:
    """Compute elementwise intermediates where they are used.

    Not where that would repeat costly work: a value with a function call that several blocks use,
    or a reduction, which reads each element many times.
    """
    for block in child_blocks(sch):
        if is_reduction(sch, block) or _writes_output(sch, block, outputs):
            continue
        consumers = sch.get_consumers(block)
        copies = isinstance(sch.get(block).body.value, ir.TensorLoad)
        if any(is_contraction(sch, c) for c in consumers) and not copies:
            continue
        repeated = len(consumers) > 1 or any(is_reduction(sch, c) for c in consumers)
        if not (repeated and _is_costly(sch, block)):
            _try(sch, sch.compute_inline, block)


def _stride_class(indices: Any, var: Any) -> int:
    """1: neighbours in memory; 0: not indexed by `var`; -1: apart."""
    if not any(uses(i, var) for i in indices):
        return 0
    if any(uses(i, var) for i in list(indices)[:-1]):
        return -1
    last = indices[-1]
    if last.same_as(var):
        return 1
    step = tvm_ffi.structural_map(last, (tirx.Var, lambda v: v + 1 if v.same_as(var) else v))
    return 1 if sym.Analyzer().can_prove_equal(step - last, tirx.const(1, str(last.ty))) else -1


def inner_axis(sch: Any, block: Any) -> int | None:
    """Position of the axis to run innermost: the one along which most accesses are neighbours.

    What a reduction adds up counts for more than its sums, which are few and stay in cache.
    """
    node = sch.get(block)
    sums = is_reduction(sch, block) and not is_contraction(sch, block)
    written = [write.source for write in node.writes] if sums else []
    accesses = [
        (load.indices, 0.25 if any(load.source.same_as(w) for w in written) else 1.0)
        for load in collect(node.body, ir.TensorLoad)
    ]
    stores = collect(node.body, tirx.BufferStore)
    accesses += [(store.indices, 0.25 if sums else 1.5) for store in stores]
    best, best_score = None, float("-inf")
    for position, axis in enumerate(node.iter_vars):
        if isinstance(axis.dom.extent, tirx.IntImm) and int(axis.dom.extent) == 1:
            continue
        score = sum(weight * _stride_class(indices, axis.var) for indices, weight in accesses)
        if score >= best_score:
            best, best_score = position, score
    return best


def arrange_loops(sch: Any, block: Any, shared: int) -> None:
    """Bring the best axis innermost, other reductions outside it, their start outside those.

    Parameters
    ----------
    sch : Schedule
    block : SBlockRV
    shared : int
        Loops around the block that belong to the rows it shares with others; not touched.
    """
    node = sch.get(block)
    loops = sch.get_loops(block)
    count = len(node.iter_vars)
    moved = len(loops) - shared == count  # below the rows, with a loop for each axis
    axes = list(node.iter_vars)[0 if moved else shared :]
    own = loops[len(loops) - len(axes) :]
    reduce = [int(v.iter_type) == REDUCE for v in axes]
    position = inner_axis(sch, block)
    if position is None:
        position = count - 1
    if not moved:
        position -= shared
    if not own or position < 0:
        return
    inner = own[position]
    others = [(r, x) for i, (r, x) in enumerate(zip(reduce, own, strict=True)) if i != position]
    outer = [x for r, x in others if not r]
    reductions = [x for r, x in others if r]
    if len(own) > 1:
        _try(sch, sch.reorder, *outer, *reductions, inner)
    if any(reduce):
        start = reductions[0] if reductions else inner
        if is_contraction(sch, block) and not shared:
            start = (outer or [start])[0]  # apart, so that register tiles see one perfect nest
        _try(sch, sch.decompose_reduction, block, start)


def _prefix(sch: Any, block: Any, intermediates: Sequence[Any]) -> int:
    """Leading spatial loops that index every intermediate the block reads, in this order: under a
    row of a transpose, say, what its rows read would be computed again and again."""
    node = sch.get(block)
    spatial = [v for v in node.iter_vars if int(v.iter_type) == SPATIAL]
    shortest = len(spatial)
    for load in collect(node.body, ir.TensorLoad):
        if not any(load.source.same_as(b) for b in intermediates):
            continue
        used = 0
        for number, axis in enumerate(spatial):
            unit = isinstance(axis.dom.extent, tirx.IntImm) and int(axis.dom.extent) == 1
            if not unit and not any(uses(i, axis.var) for i in load.indices[: number + 1]):
                break
            used += 1
        shortest = min(shortest, used)
    return shortest


def share_rows(sch: Any, outputs: Sequence[Any]) -> int:
    """Move the steps of a row operation under the row loops of its last step.

    Returns
    -------
    int
        Row loops, 0 if the steps stay apart.
    """
    blocks = child_blocks(sch)
    if len(blocks) < 2 or not all(is_plain(sch, b) for b in blocks):
        return 0
    if any(is_contraction(sch, b) for b in blocks):
        return 0
    *steps, last = blocks
    if [_writes_output(sch, b, outputs) for b in blocks] != [False] * len(steps) + [True]:
        return 0
    intermediates = [w.source for b in steps for w in sch.get(b).writes]
    rank = len([v for v in sch.get(last).iter_vars if int(v.iter_type) == SPATIAL])
    along_rows = [
        int(sch.get(b).iter_vars[inner_axis(sch, b) or 0].iter_type) == REDUCE
        for b in steps
        if is_reduction(sch, b)
    ]
    limit = rank if along_rows and all(along_rows) and is_reduction(sch, steps[-1]) else rank - 1
    depth = min([limit, *(_prefix(sch, b, intermediates) for b in blocks)])
    if is_reduction(sch, last) or depth < 1:
        return 0
    trial = sch.copy()
    row = trial.get_loops(trial.get_sblock(sch.get(last).name_hint))[depth - 1]
    for step in reversed(steps):
        name = trial.get_sblock(sch.get(step).name_hint)
        if not _try(trial, trial.compute_at, name, row, preserve_unit_loops=True):
            return 0
    row = sch.get_loops(last)[depth - 1]
    for step in reversed(steps):
        sch.compute_at(step, row, preserve_unit_loops=True)
    return depth

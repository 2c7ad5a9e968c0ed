"""Schedules for GPUs of whatever is no linear layer, by the shape of its blocks.

Blocks are inlined as for CPUs (`apq_tvm.schedules.graph.blocks`); each that is left becomes a
kernel:

- ``rows``: steps over the rows of one tensor (softmax, a normalization) are one kernel, a warp a
  row; what a step finds of a row stays in registers, and lanes meet by shuffles;
- ``reduction`` along memory: a warp for each result; across memory: a thread for each;
- ``elementwise``: a thread for each result;
- ``serial``: where a block holds more than one store (sorting, a scatter), a thread takes as many
  of its steps as follow from each other: all of them, where no outer loop is free of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from tvm import s_tir, tirx
from tvm_ffi import structural_map

from apq_tvm.schedules.cuda.lookups import clamp_lookups, own_memory
from apq_tvm.schedules.cuda.reducers import know_infinities
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.blocks import (
    REDUCE,
    SPATIAL,
    child_blocks,
    inline_producers,
    inner_axis,
    is_plain,
    is_reduction,
    share_rows,
)
from apq_tvm.schedules.graph.exprs import collect, uses
from apq_tvm.types import DeviceProfile

WARP = 32
"""Threads that run together on every GPU of NVIDIA's."""

THREADS = (256, 128, 512)
"""Threads of a block, most of which hide that memory is far."""


def schedule_graph(func: Any, profile: DeviceProfile, decide: Decide) -> tuple[Any, str]:
    """Schedule any PrimFunc that is no linear layer.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Made of blocks, as `apq_tvm.ops` and Relax's LegalizeOps and FuseTIR leave it.
    profile : DeviceProfile
    decide : Decide
        ``threads`` of a block.

    Returns
    -------
    tvm.tirx.PrimFunc, str
        The function and what it is, of those above.
    """
    know_infinities()
    sch = s_tir.Schedule(own_memory(clamp_lookups(func)))
    threads = decide("threads", THREADS)
    blocks = child_blocks(sch)
    if not blocks:
        return _finish(sch), "serial"
    plain = all(is_plain(sch, block) for block in blocks)
    if plain:
        inline_producers(sch, func.params)
    if plain and (trial := _rows(sch, func.params, threads)) is not None:
        return _finish(trial), "rows"
    reduces, bound = False, list[tuple[Any, str]]()
    for block in child_blocks(sch):
        _keep_own(sch, block)
        if is_plain(sch, block) and not _has_order(sch, block):
            reduces = reduces or is_reduction(sch, block)
            _apart(sch, block, threads)
        else:
            plain = False
            bound += _steps(sch, block)
    kind = "serial" if not plain else "reduction" if reduces else "elementwise"
    return _finish(sch, bound), kind


def _has_order(sch: Any, block: Any) -> bool:
    """True if rounds of the block follow each other: a reduction that begins with nothing."""
    return is_reduction(sch, block) and sch.get(block).init is None


def _finish(sch: Any, bound: Sequence[tuple[Any, str]] = ()) -> Any:
    loops = {sch.get(loop).loop_var: tag for loop, tag in bound}

    def bind(loop: Any) -> Any:
        tag = loops.get(loop.loop_var)
        return loop if tag is None else _thread(loop.loop_var, loop.extent, loop.body, tag)

    func = sch.mod["main"]
    func = func.with_body(structural_map(func.body, (tirx.For, bind)))
    return _on_threads(func).with_attr("tirx.is_scheduled", True)


def _keep_own(sch: Any, block: Any) -> None:
    """What no other block reads is a thread's own: TVM would allocate it in the kernel."""
    others = [sch.get(other) for other in child_blocks(sch)]
    others = [other for other in others if not other.same_as(sch.get(block))]
    root = sch.get(sch.get_sblock("root"))
    for number, write in enumerate(sch.get(block).writes):
        made = any(write.source.same_as(buffer) for buffer in root.alloc_buffers)
        if made and not any(uses(other, write.source) for other in others):
            sch.set_scope(block, number, "local")


def _apart(sch: Any, block: Any, threads: int) -> None:
    """One kernel of one block."""
    along = inner_axis(sch, block)
    axes = sch.get(block).iter_vars
    kinds = [int(axis.iter_type) for axis in axes]
    loops = sch.get_loops(block)
    reduce = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == REDUCE]
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != REDUCE]
    sch.reorder(*spatial, *reduce)
    if along is not None and kinds[along] == REDUCE:
        _warps(sch, block, spatial, reduce, threads // WARP)
    else:
        _threads(sch, block, spatial, threads)


def _threads(sch: Any, block: Any, spatial: Sequence[Any], threads: int) -> None:
    """A thread for each result."""
    outermost = (*sch.get_loops(block), block)[0]
    fused = _fused(sch, spatial) if spatial else sch.add_unit_loop(outermost)
    grid, thread = sch.split(fused, [None, _sharing(sch, fused, threads)])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")


def _fused(sch: Any, loops: Sequence[Any]) -> Any:
    """One loop; a pair at a time where one is as long as a sum (``n + 30``), of which TVM 0.27 does
    not find that it divides its own products."""
    if all(isinstance(sch.get(loop).extent, (tirx.IntImm, tirx.Var)) for loop in loops):
        return sch.fuse(*loops)
    fused, *others = loops
    for loop in others:
        fused = sch.fuse(fused, loop)
    return fused


def _sharing(sch: Any, loop: Any, most: int) -> int:
    """How many share a loop: of one round only one, or all of them would store its result."""
    extent = sch.get(loop).extent
    return 1 if isinstance(extent, tirx.IntImm) and int(extent) == 1 else most


def _warps(sch: Any, block: Any, spatial: Sequence[Any], reduce: Sequence[Any], warps: int) -> None:
    """A warp for each result, whose lanes take turns along the reduction."""
    along = sch.fuse(*reduce) if len(reduce) > 1 else reduce[0]
    turns, lane = sch.split(along, [None, WARP])
    fused = _fused(sch, spatial) if spatial else sch.add_unit_loop(turns)
    grid, warp = sch.split(fused, [None, _sharing(sch, fused, warps)])
    sch.reorder(grid, warp, lane, turns)
    sch.bind(grid, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")


def _rows(sch: Any, outputs: Sequence[Any], threads: int) -> Any | None:
    """A warp for each row, for all steps; None where a step finds more than a number of a row."""
    trial = sch.copy()
    for block in child_blocks(trial)[:-1]:
        if not is_reduction(trial, block):
            with suppress(s_tir.ScheduleError):
                trial.compute_inline(block)
    rows = share_rows(trial, outputs)
    *steps, last = child_blocks(trial)
    if not rows or not all(_finds_one(trial, step, rows) for step in steps):
        return None
    for block in (*steps, last):
        own = trial.get_loops(block)[rows:] or [trial.add_unit_loop(block)]
        inner = trial.fuse(*own) if len(own) > 1 else own[0]
        turns, lane = trial.split(inner, [None, WARP])
        if is_reduction(trial, block):
            trial.reorder(lane, turns)
        trial.bind(lane, "threadIdx.x")
        if block is not last:
            trial.set_scope(block, 0, "local")
    outer = trial.get_loops(last)[:rows]
    fused = trial.fuse(*outer) if rows > 1 else outer[0]
    grid, warp = trial.split(fused, [None, threads // WARP])
    trial.bind(grid, "blockIdx.x")
    trial.bind(warp, "threadIdx.y")
    return trial


def _finds_one(sch: Any, step: Any, rows: int) -> bool:
    """True if below the loops over rows only a reduction is left."""
    if not is_reduction(sch, step):
        return False
    own = [sch.get(loop) for loop in sch.get_loops(step)[rows:]]
    along = [value for axis, value in _axes(sch, step) if int(axis.iter_type) == SPATIAL]
    return all(
        int(loop.extent) == 1 if isinstance(loop.extent, tirx.IntImm) else False
        for loop in own
        if any(uses(value, loop.loop_var) for value in along)
    )


def _axes(sch: Any, block: Any) -> list[tuple[Any, Any]]:
    """The axes of a block, each with its value."""
    node = sch.get(block)
    realizes = collect(sch.mod["main"].body, s_tir.SBlockRealize)
    (values,) = (realize.iter_values for realize in realizes if realize.block.same_as(node))
    return list(zip(node.iter_vars, values, strict=True))


def _steps(sch: Any, block: Any) -> list[tuple[Any, str]]:
    """A thread for each round of the outer loops that are free of order; loops and their threads.

    Our operators say which are (`apq_tvm.ops.graph`); TVM would ask that rounds read nothing of
    what they wrote.
    """
    loops = sch.get_loops(block)
    free = [value for axis, value in _axes(sch, block) if int(axis.iter_type) == SPATIAL]
    ordered = takewhile(lambda one: any(sch.get(one).loop_var.same_as(v) for v in free), loops)
    outer = list(ordered)
    if not outer or "apq.op" not in (sch.mod["main"].attrs or {}):
        return []
    grid, thread = sch.split(sch.fuse(*outer) if len(outer) > 1 else outer[0], [None, WARP])
    return [(grid, "blockIdx.x"), (thread, "threadIdx.x")]


def _on_threads(func: Any) -> Any:
    """Bind what is not bound yet, each part of the body for itself, to one thread."""
    realize = func.body
    if not isinstance(realize, s_tir.SBlockRealize):
        return func.with_body(_alone(realize))
    block = realize.block
    parts = block.body.seq if isinstance(block.body, tirx.SeqStmt) else [block.body]
    if all(map(_is_bound, parts)):
        return func
    parts = [part if _is_bound(part) else _alone(part) for part in parts]
    body = tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]
    block = s_tir.SBlock(
        block.iter_vars, block.reads, block.writes, block.name_hint, body, block.init,
        block.alloc_buffers, block.match_buffers, block.annotations,
    )  # fmt: skip
    return func.with_body(s_tir.SBlockRealize(realize.iter_values, realize.predicate, block))


def _is_bound(part: Any) -> bool:
    return any(loop.kind == tirx.ForKind.THREAD_BINDING for loop in collect(part, tirx.For))


def _alone(body: Any) -> Any:
    """A kernel of one thread."""
    for tag in ("threadIdx.x", "blockIdx.x"):
        var = tirx.Var(tag.replace(".", "_"), "int32")
        body = _thread(var, tirx.const(1, "int32"), body, tag)
    return body


def _thread(var: Any, extent: Any, body: Any, tag: str) -> Any:
    axis = tirx.IterVar(None, var, tirx.IterVar.ThreadIndex, tag)
    zero = tirx.const(0, str(var.ty))
    return tirx.For(var, zero, extent, tirx.ForKind.THREAD_BINDING, body, axis)

"""Schedules for GPUs of whatever is no linear layer, by the shape of its blocks.

Blocks are inlined as for CPUs (`apq_tvm.schedules.graph.blocks`); each that is left becomes a
kernel:

- ``rows``: steps over the rows of one tensor (softmax, a normalization) are one kernel, a warp a
  row; what a step finds of a row stays in registers, and lanes meet by shuffles;
- ``reduction`` along memory: a warp for each result; across memory: a thread for each;
- ``elementwise``: a thread for each result;
- ``serial``: blocks that hold something else than one store (sorting, a scatter), on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.blocks import (
    REDUCE,
    child_blocks,
    inline_producers,
    inner_axis,
    is_plain,
    is_reduction,
    share_rows,
)
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
    sch = s_tir.Schedule(func)
    blocks = child_blocks(sch)
    threads = decide("threads", THREADS)
    if not blocks or not all(is_plain(sch, block) for block in blocks):
        return _serial(sch), "serial"
    inline_producers(sch, func.params)
    rows = share_rows(sch, func.params)
    if rows:
        _rows(sch, rows, threads)
        return _finish(sch), "rows"
    reduces = False
    for block in child_blocks(sch):
        reduces = reduces or is_reduction(sch, block)
        _apart(sch, block, threads)
    return _finish(sch), "reduction" if reduces else "elementwise"


def _finish(sch: Any) -> Any:
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)


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
    fused = sch.fuse(*spatial) if spatial else sch.add_unit_loop(sch.get_loops(block)[0])
    grid, thread = sch.split(fused, [None, threads])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")


def _warps(sch: Any, block: Any, spatial: Sequence[Any], reduce: Sequence[Any], warps: int) -> None:
    """A warp for each result, whose lanes take turns along the reduction."""
    along = sch.fuse(*reduce) if len(reduce) > 1 else reduce[0]
    turns, lane = sch.split(along, [None, WARP])
    fused = sch.fuse(*spatial) if spatial else sch.add_unit_loop(turns)
    grid, warp = sch.split(fused, [None, warps])
    sch.reorder(grid, warp, lane, turns)
    sch.bind(grid, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")


def _rows(sch: Any, rows: int, threads: int) -> None:
    """A warp for each row, for all steps."""
    *steps, last = child_blocks(sch)
    for block in (*steps, last):
        own = sch.get_loops(block)[rows:]
        if len(own) > 1:
            sch.fuse(*own)
        inner = sch.get_loops(block)[rows]
        turns, lane = sch.split(inner, [None, WARP])
        if is_reduction(sch, block):
            sch.reorder(lane, turns)
        sch.bind(lane, "threadIdx.x")
        if block is not last:
            sch.set_scope(block, 0, "local")
    outer = sch.get_loops(last)[:rows]
    fused = sch.fuse(*outer) if rows > 1 else outer[0]
    grid, warp = sch.split(fused, [None, threads // WARP])
    sch.bind(grid, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")


def _serial(sch: Any) -> Any:
    return sch.mod["main"]

"""Schedules for whatever Relax legalizes: elementwise chains, reductions, data movement, pooling.

Three steps, none of which knows an operator's name:

1. on blocks: producers are inlined, the steps of a row operation (softmax, normalization) move into
   one loop over its rows, and reductions get the loop order that runs along memory;
2. on lowered loops: neighbouring loops that run along memory become one, outer ones run in parallel
   where the work is worth it;
3. innermost loops are vectorized.

What does not fit a step skips it; the function stays correct. The name says what became of it.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.graph.blocks import (
    arrange_loops,
    child_blocks,
    inline_producers,
    is_plain,
    is_reduction,
    share_rows,
)
from apq_tvm.schedules.graph.exprs import collect, uses
from apq_tvm.schedules.graph.register_tile import register_tile
from apq_tvm.schedules.graph.rewrites.loops import (
    chunk,
    collapse,
    elements,
    fuse_outer,
    is_straight,
    nest,
    parallel_when,
    rebuild,
    reuse_outputs,
    unrolled_size,
)
from apq_tvm.schedules.graph.rewrites.lowering import expand_math, finish, lower_blocks
from apq_tvm.schedules.graph.rewrites.split_guards import split_guards
from apq_tvm.schedules.graph.rewrites.vectorize import vectorize_loops
from apq_tvm.schedules.graph.tile_transpose import tile_transpose
from apq_tvm.types import DeviceProfile

LARGEST = 12000
"""Variables in a function from which on it gets smaller tiles: some five seconds of passes."""


def schedule_generic(func: Any, profile: DeviceProfile, decide: Decide) -> tuple[Any, str]:
    """Schedule any PrimFunc.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Made of blocks, as LegalizeOps and FuseTIR leave it; others are only lowered.
    profile : DeviceProfile
    decide : Decide
        ``chunk`` (elements of a task), ``unroll`` (vectors per iteration), ``parallel_least``
        (elements worth a second thread).

    Returns
    -------
    tvm.tirx.PrimFunc, str
        The function and what it is: "elementwise", "reduction", "rows", or "serial" where blocks
        hold something else than one store (sorting, scatter, loops to a condition). With
        "_small_tile" behind it where tiles of the best size would take long to compile.
    """
    sch = s_tir.Schedule(func)
    blocks = child_blocks(sch)
    if not blocks or not all(is_plain(sch, b) for b in blocks):
        return _serial(func, profile, decide), "serial"
    inline_producers(sch, func.params)
    shared = share_rows(sch, func.params)
    reduces = any(is_reduction(sch, b) for b in child_blocks(sch))
    for block in child_blocks(sch):
        arrange_loops(sch, block, shared)
    lowered = reuse_outputs(expand_math(lower_blocks(sch.mod["main"])))
    size = decide("chunk", (4096, 1024, 16384))
    wide = profile.vector_registers >= 32
    rows = decide("rows", (8, 6, 4) if wide else (6, 4))
    vectors = decide("vectors", (2, 1))

    unroll = decide("unroll", (2, 1, 4))

    def arranged(rows: int, vectors: int) -> Any:
        def arrange(part: Any) -> Any:
            tiled = register_tile(part, profile.vector_bytes // 4, rows, vectors)
            if tiled is None:
                part = collapse(part)
                tiled = tile_transpose(part)
            return _parallel(part, size) if tiled is None else tiled

        body = split_guards(tirx.stmt_seq(*(arrange(part) for part in _parts(lowered.body))))
        return vectorize_loops(lowered.with_body(body), profile.vector_bytes, unroll)

    made, small = arranged(rows, vectors), ""
    while unrolled_size(made.body) > LARGEST and rows > 1:
        rows, vectors, small = rows // 2, 1, "_small_tile"
        made = arranged(rows, vectors)
    work = sum((elements(p) for p in func.params), tirx.const(0, "int64"))
    name = "rows" if shared else "reduction" if reduces else "elementwise"
    return finish(parallel_when(made, work, 65536, decide)), f"{name}{small}"


def _parts(body: Any) -> list[Any]:
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _serial(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    lowered = expand_math(lower_blocks(func))
    return finish(vectorize_loops(lowered, profile.vector_bytes, decide("unroll", (1, 2))))


def _parallel(part: Any, size: int) -> Any:
    """Spread one nest over the threads: chunks of a single loop, else its outer loops."""
    loops, body = nest(part)
    if not loops:
        return part
    places = _places(body)
    apart = next((i for i, loop in enumerate(loops) if _reduced(places, loop)), len(loops))
    if not apart:
        return part
    outer = loops[:apart]
    if is_straight(body):
        if len(loops) == 1:
            constant = isinstance(loops[0].extent, tirx.IntImm) and int(loops[0].extent) <= size
            return part if constant else chunk(loops[0], size)
        outer = outer[: len(loops) - 1]
    # Dividing out indices for every short inner loop would cost more than it spreads.
    keep = len(outer) if len(outer) <= 2 else len(outer) - 1
    return fuse_outer(outer[:keep], rebuild(loops[keep:], body))


def _reduced(places: list[list[Any]], loop: Any) -> bool:
    """True if iterations of `loop` may store to the same place."""
    return any(not any(uses(i, loop.loop_var) for i in indices) for indices in places)


def _places(body: Any) -> list[list[Any]]:
    """Indices of what is stored, but for scratch of the body's own, without what they load.

    As a scatter's do: what is stored where an index says, which is loaded, may be there twice.
    """
    own = [made.buffer for made in collect(body, tirx.AllocBuffer)]
    return [
        [_without_loads(index) for index in store.indices]
        for store in collect(body, tirx.BufferStore)
        if not any(store.buffer.same_as(buffer) for buffer in own)
    ]


def _without_loads(index: Any) -> Any:
    """An index with zeros for what it loads."""
    zero = (ir.TensorLoad, lambda load: tirx.const(0, str(load.ty)))
    return tvm_ffi.structural_map(index, zero)

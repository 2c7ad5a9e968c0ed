"""Schedules of GEMVs whose weights are streamed through once, for any vector instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.interleaved import float_linear
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_dequantized, interleaved
from apq_tvm.schedules.linear.kernel import LinearKernel, legacy
from apq_tvm.tensorize.pairs.float_dot import float_dot_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share a decoded weight vector; a kernel is for at least that many rows."""

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays: launching one costs 1 to 2 us, a thread reads about
30 weights a nanosecond."""

Streams = Callable[[Decide, InterleavedLayout, LinearSpec, int], int]
"""Decides how many row blocks are read at once; the last argument is the M tile."""

Ahead = Callable[[Decide, InterleavedLayout, int], int]
"""Decides how many bytes ahead weights are prefetched; the last argument is the M tile."""


def _unroll(decide: Decide, blocking: Blocking) -> int:
    return decide("unroll", tuple(u for u in (1, 2, 4) if blocking.units % u == 0))


def schedule_gemv(
    sch: Any,
    blocking: Blocking,
    intrinsic: str,
    whole: bool,
    unroll: int = 1,
    parallel: bool = True,
) -> None:
    """Schedule a PrimFunc of `apq_tvm.ops.linear.interleaved`: one task per bundle of row blocks.

    Per tile of rows of x: sums to zero; over the spans of K, dot products of every stream by
    `intrinsic`, then their scales; the epilogue.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    blocking : Blocking
        Of the PrimFunc.
    intrinsic : str
        Registered name.
    whole : bool
        True if N is a multiple of the lanes; if not, the store has no loop over lanes.
    unroll : int
        Units per iteration within a span.
    parallel : bool
        Whether bundles are shared among threads.
    """
    store, scale, dot = (sch.get_sblock(name) for name in ("store", "scale", "dot"))
    tile, bundle, stream, *row = sch.get_loops(store)
    if whole:
        sch.vectorize(row.pop())
    sch.reorder(bundle, tile, stream)
    if parallel:
        sch.parallel(bundle)
    _unroll_all(sch, stream, *row)

    pair_axes = 1 if blocking.per_unit > 1 else 0
    sch.compute_at(scale, tile, preserve_unit_loops=True)
    stream, *row, lane, span, pair = _last(sch, scale, 3 + len(row) + pair_axes, pair_axes)
    sch.reorder(span, stream, *row, *pair, lane)
    _unroll_all(sch, stream, *row, *pair)
    sch.vectorize(lane)

    # Spans of several units run all streams side by side; single units finish one after another,
    # which needs fewer registers.
    at = span if blocking.units > 1 else stream
    sch.compute_at(dot, at, preserve_unit_loops=True)
    count = 5 + pair_axes + len(row)
    stream, *inner, unit, vector, four = sch.get_loops(dot)[-count:]
    sch.reorder(unit, stream, *inner, vector, four)
    if unroll > 1:
        unit, part = sch.split(unit, [None, unroll])
        sch.unroll(part)
    init = sch.decompose_reduction(dot, unit)
    stream_init, *inner_init, lane_init = sch.get_loops(init)[-(count - 3) :]
    _unroll_all(sch, stream, stream_init, *inner_init)
    sch.vectorize(lane_init)
    sch.tensorize(inner[0], intrinsic)

    init = sch.decompose_reduction(scale, span)
    *outer, lane = sch.get_loops(init)[-(2 + len(row)) :]
    _unroll_all(sch, *outer)
    sch.vectorize(lane)
    if "pad" in {
        sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))
    }:
        _, column = sch.get_loops(sch.get_sblock("pad"))
        sch.vectorize(sch.split(column, [None, 8])[1])


def _unroll_all(sch: Any, *loops: Any) -> None:
    for loop in loops:
        sch.unroll(loop)


def _last(sch: Any, block: Any, count: int, pairs: int) -> tuple[Any, ...]:
    """The last `count` loops of a block, the axis of groups in a unit as a list of 0 or 1."""
    loops = sch.get_loops(block)[-count:]
    split = len(loops) - pairs
    return (*loops[:split], loops[split:])


def gemv_kernel(
    name: str,
    bits: int,
    m_tile: int,
    lanes: int,
    check: Callable[[LinearSpec, DeviceProfile], None],
    func: Callable[[LinearSpec, DeviceProfile, Decide], Any],
    intrinsic: Callable[[InterleavedLayout, int], str],
    streams_of: Streams,
    ahead_of: Ahead,
) -> LinearKernel:
    """The record of a kernel for M >= m_tile, of `apq_tvm.ops.linear.interleaved`.

    Parameters
    ----------
    name : str
    bits, m_tile, lanes : int
        Lanes are rows of the weights that a vector holds.
    check : callable
        As in `LinearKernel`.
    func : callable
        As in `LinearKernel`; its streams are those that `streams_of` decides.
    intrinsic : callable
        Registers and names the dot product for a layout and a prefetch distance.
    streams_of, ahead_of : callable
    """

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = interleaved(spec, lanes)
        streams = streams_of(decide, layout, spec, m_tile)
        blocking = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
        chosen = intrinsic(layout, ahead_of(decide, layout, m_tile))
        whole, parallel = spec.n % lanes == 0, spec.n * spec.k >= _PARALLEL
        schedule_gemv(sch, blocking, chosen, whole, _unroll(decide, blocking), parallel)

    return legacy(
        name, m_tile, -1, check, lambda spec, _: interleaved(spec, lanes), func, schedule, bits
    )


def float_kernel(
    lanes: int,
    features: tuple[str, ...],
    bits: int,
    m_tile: int,
    streams_of: Streams,
    ahead_of: Ahead,
) -> LinearKernel:
    """The record of one kernel with float activations for M >= m_tile."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_dequantized(spec, profile, bits, features, lanes)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = interleaved(spec, lanes)
        return float_linear(spec, layout, m_tile, streams_of(decide, layout, spec, m_tile))

    def intrinsic(layout: InterleavedLayout, ahead: int) -> str:
        return float_dot_intrinsic(layout.unit, layout.zero_points, m_tile, ahead)

    name = f"gemv_W{bits}A16_fma_r{lanes}m{m_tile}"
    return gemv_kernel(name, bits, m_tile, lanes, check, func, intrinsic, streams_of, ahead_of)

"""Default schedules of linear layers for few rows of x: the weights are streamed through once.

What the decisions mean, and why their defaults come first (measured on Zen 4, out of cache):

- ``streams``: row blocks read at once. Two keep more cache misses in flight than one (AVX2 W4A8g32
  283 us against 321). With several rows of x the sums of two streams spill, and spilled vectors lie
  unaligned on the stack: by the luck of its address M=4 took 500 or 915 us, one stream always 510.
- ``ahead``: software prefetch distance in bytes. 4 KB is a page, where the hardware prefetcher
  stops. 512-bit vectors pass so fast over 4 and 8 bits and over wide groups that prefetches only
  take fill buffers from the loads: four streams and the hardware do better there (W4A8g128 248 us
  against 386, W8A8g32 559 against 778, W4A8g32 275 against 297).
- ``unroll``: units per iteration where a group spans several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear import Blocking, LinearSpec, float_linear, integer_linear, unit_of
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear_checks import check_dequantized, check_integer, interleaved
from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.tensorize.float_dot import float_dot_intrinsic
from apq_tvm.tensorize.x86_dot import INSTRUCTIONS, DotInstruction, dot_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share a decoded weight vector; a kernel is for at least that many rows."""

_FLOAT_FEATURES = {16: ("avx512f",), 8: ("fma",), 4: ()}
"""Lanes of the float kernels -> feature they need; 4 lanes are in every x86-64."""

_TASKS = 8
"""Bundles of row blocks a layer should have, so that threads can share it evenly."""

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays: launching one costs 1 to 2 us, a thread reads about
30 weights a nanosecond."""

def _fast(layout: InterleavedLayout, m_tile: int) -> bool:
    """Whether units pass faster than prefetches pay."""
    one_scale_per_unit = layout.group_size in (16, UNIT_K)
    return layout.rows == 16 and m_tile == 1 and (layout.bits in (4, 8) or not one_scale_per_unit)


def _streams(decide: Decide, layout: InterleavedLayout, spec: LinearSpec, m_tile: int) -> int:
    if _fast(layout, m_tile):
        choices: tuple[int, ...] = (4, 2, 1)
    else:
        choices = (2, 1, 4) if m_tile == 1 else (1, 2)
    blocks = layout.row_blocks(spec.n)
    possible = [s for s in choices if s <= blocks]
    # Narrow layers keep work for every core rather than many streams.
    return decide("streams", tuple(sorted(possible, key=lambda s: blocks < _TASKS * s)))


def _ahead(decide: Decide, layout: InterleavedLayout, m_tile: int) -> int:
    fast = _fast(layout, m_tile)
    return decide("ahead", (0, 4096, 2048, 8192) if fast else (4096, 0, 2048, 8192))


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
    """Schedule a PrimFunc of `apq_tvm.ops.linear`: one task per bundle of row blocks.

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


def integer_kernel(instruction: DotInstruction, bits: int, m_tile: int) -> LinearKernel:
    """The record of one integer kernel for M >= m_tile."""
    lanes = instruction.rows

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer(spec, profile, bits, instruction.features, lanes)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = interleaved(spec, lanes)
        streams = _streams(decide, layout, spec, m_tile)
        return integer_linear(spec, layout, m_tile, streams, bits == 8 and instruction.signed8)

    def intrinsic(layout: InterleavedLayout, ahead: int) -> str:
        return dot_intrinsic(instruction, unit_of(layout), m_tile, ahead)

    name = f"gemv_W{bits}A8_{instruction.name}_r{lanes}m{m_tile}"
    return _record(name, bits, m_tile, lanes, check, func, intrinsic)


def float_kernel(lanes: int, bits: int, m_tile: int) -> LinearKernel:
    """The record of one kernel with float activations for M >= m_tile."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_dequantized(spec, profile, bits, _FLOAT_FEATURES[lanes], lanes)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = interleaved(spec, lanes)
        return float_linear(spec, layout, m_tile, _streams(decide, layout, spec, m_tile))

    def intrinsic(layout: InterleavedLayout, ahead: int) -> str:
        return float_dot_intrinsic(unit_of(layout), layout.zero_points, m_tile, ahead)

    name = f"gemv_W{bits}A16_fma_r{lanes}m{m_tile}"
    return _record(name, bits, m_tile, lanes, check, func, intrinsic)


def _record(
    name: str,
    bits: int,
    m_tile: int,
    lanes: int,
    check: Callable[[LinearSpec, DeviceProfile], None],
    func: Callable[[LinearSpec, DeviceProfile, Decide], Any],
    intrinsic: Callable[[InterleavedLayout, int], str],
) -> LinearKernel:
    """`intrinsic` registers and names the dot product for a layout and a prefetch distance."""

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = interleaved(spec, lanes)
        streams = _streams(decide, layout, spec, m_tile)
        blocking = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
        chosen = intrinsic(layout, _ahead(decide, layout, m_tile))
        whole, parallel = spec.n % lanes == 0, spec.n * spec.k >= _PARALLEL
        schedule_gemv(sch, blocking, chosen, whole, _unroll(decide, blocking), parallel)

    return LinearKernel(
        name, m_tile, -1, check, lambda spec, _: interleaved(spec, lanes), func, schedule, bits
    )


GEMV_KERNELS: tuple[LinearKernel, ...] = (
    *(
        integer_kernel(instruction, bits, m_tile)
        for instruction in INSTRUCTIONS
        for bits in range(1, 9)
        for m_tile in M_TILES
    ),
    *(
        float_kernel(lanes, bits, m_tile)
        for lanes in _FLOAT_FEATURES
        for bits in range(1, 9)
        for m_tile in M_TILES
    ),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

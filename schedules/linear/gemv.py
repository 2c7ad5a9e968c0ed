"""Kernels that stream packed integer weights through once, for any vector instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.interleaved import packed_linear
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_dequantized, interleaved
from apq_tvm.schedules.linear.kernel import PARALLEL_WEIGHTS, Choice, Instruction, LinearKernel
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.pairs.float_dot import float_dot_intrinsic
from apq_tvm.types import DeviceProfile

Streams = Callable[[Decide, InterleavedLayout, LinearSpec, int], int]
"""Decides how many row blocks are read at once; the last argument is the M tile."""

Aheads = Callable[[InterleavedLayout, int], tuple[int, ...]]
"""Bytes ahead that weights may be prefetched, none to decide for none; for a layout and M tile."""


def schedule_gemv(
    sch: Any,
    choice: Choice,
    blocking: Blocking,
    intrinsic: str,
    whole: bool,
    beside: bool = False,
) -> None:
    """Schedule the nests of `apq_tvm.ops.linear.nest`: one task per bundle of row blocks.

    Per tile of rows of x: sums to zero; over the spans of K, dot products of every stream by
    `intrinsic`, then their scales; the epilogue. Decisions, if they are asked: ``unroll``, units
    per iteration within a span.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    choice : Choice
    blocking : Blocking
        Of the PrimFunc.
    intrinsic : str
        Registered name.
    whole : bool
        Whether the store has a loop over lanes.
    beside : bool
        Whether streams run side by side in spans of one unit too.
    """
    store, scale, dot = (sch.get_sblock(name) for name in ("store", "scale", "dot"))
    tile, bundle, stream, *row = sch.get_loops(store)
    if whole:
        sch.vectorize(row.pop())
    sch.reorder(bundle, tile, stream)
    if choice.spec.n * choice.spec.k >= PARALLEL_WEIGHTS:
        sch.parallel(bundle)
    unroll_all(sch, stream, *row)

    pair_axes = 1 if blocking.per_unit > 1 else 0
    sch.compute_at(scale, tile, preserve_unit_loops=True)
    loops = sch.get_loops(scale)[-(3 + len(row) + pair_axes) :]
    stream, *row, lane, span = loops[: len(loops) - pair_axes]
    pair = loops[len(loops) - pair_axes :]
    sch.reorder(span, stream, *row, *pair, lane)
    unroll_all(sch, stream, *row, *pair)
    sch.vectorize(lane)

    # Spans of several units run all streams side by side; single units finish one after another,
    # which needs fewer registers.
    at = span if blocking.units > 1 or beside else stream
    axes = len(sch.get_loops(dot)) - len((tile, bundle, span))
    inner_axes = sum(axis.iter_type == 0 for axis in sch.get(dot).iter_vars) - 4
    sch.compute_at(dot, at, preserve_unit_loops=True)
    stream, *loops = sch.get_loops(dot)[-axes:]
    inner, (unit, *within) = loops[:inner_axes], loops[inner_axes:]
    sch.reorder(unit, stream, *inner, *within)
    unroll = choice.decisions.get("unroll", 1)
    if unroll > 1:
        unit, part = sch.split(unit, [None, unroll])
        sch.unroll(part)
    init = sch.decompose_reduction(dot, unit)
    *inits, lane = sch.get_loops(init)[-(1 + inner_axes) :]
    unroll_all(sch, stream, *inits)
    sch.vectorize(lane)
    sch.tensorize(inner[0], intrinsic)

    init = sch.decompose_reduction(scale, span)
    *outer, lane = sch.get_loops(init)[-(2 + len(row)) :]
    unroll_all(sch, *outer)
    sch.vectorize(lane)
    names = {sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))}
    if "pad" in names:
        _, column = sch.get_loops(sch.get_sblock("pad"))
        sch.vectorize(sch.split(column, [None, 8])[1])


def unroll_all(sch: Any, *loops: Any) -> None:
    """Unroll every one of `loops`."""
    for loop in loops:
        sch.unroll(loop)


def gemv_kernel(
    instruction: Instruction,
    bits: int,
    act_bits: int,
    m_tile: int,
    check: Callable[[LinearSpec, DeviceProfile], None],
    meaning: Callable[[InterleavedLayout], UnitDot],
    intrinsic: Callable[[UnitDot, int], str],
    streams_of: Streams,
    aheads_of: Aheads,
    weights: str = "",
    family: str = "int",
) -> LinearKernel:
    """The record of a kernel for M >= m_tile, of `apq_tvm.ops.linear.interleaved`.

    Parameters
    ----------
    instruction : Instruction
    bits, act_bits, m_tile, check
        As in `LinearKernel`.
    meaning : callable
        What a unit of a layout is multiplied to.
    intrinsic : callable
        Registers and names that product for a prefetch distance.
    streams_of, aheads_of : callable
    weights, family : str
        As in `LinearKernel`, where they are not integers of `bits`.
    """
    lanes = instruction.lanes

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Blocking:
        layout = interleaved(spec, lanes)
        streams = streams_of(decide, layout, spec, m_tile)
        blocking = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
        aheads = aheads_of(layout, m_tile)
        if aheads:
            decide("ahead", aheads)
        decide("unroll", tuple(u for u in (1, 2, 4) if blocking.units % u == 0))
        return blocking

    def func(choice: Choice) -> Any:
        layout = interleaved(choice.spec, lanes)
        return packed_linear(choice.spec, layout, choice.plan, meaning(layout))

    def schedule(sch: Any, choice: Choice) -> None:
        spec = choice.spec
        dot = meaning(interleaved(spec, lanes))
        chosen = intrinsic(dot, choice.decisions.get("ahead", 0))
        schedule_gemv(sch, choice, choice.plan, chosen, spec.n % lanes == 0)

    return LinearKernel(
        "gemv",
        weights or f"W{bits}",
        act_bits,
        instruction,
        m_tile,
        check=check,
        layout=lambda spec, profile: interleaved(spec, lanes),
        func=func,
        schedule=schedule,
        ask=ask,
        bits=bits,
        family=family,
        m_named=m_tile,
    )


def float_kernel(
    instruction: Instruction, bits: int, m_tile: int, streams_of: Streams, aheads_of: Aheads
) -> LinearKernel:
    """The record of one kernel with float activations for M >= m_tile."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_dequantized(spec, profile, instruction.features, instruction.lanes)

    def meaning(layout: InterleavedLayout) -> UnitDot:
        return UnitDot(layout.unit, m_tile, "float32", zeros=layout.zero_points)

    product = float_dot_intrinsic
    return gemv_kernel(
        instruction, bits, 16, m_tile, check, meaning, product, streams_of, aheads_of
    )

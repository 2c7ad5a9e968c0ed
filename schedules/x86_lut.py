"""Kernels for binary codes on x86: tables of activation sums in registers (LUT-GEMM, T-MAC).

What the decisions mean: ``streams``: row blocks read at once, which keeps more cache misses in
flight and shares the loads of tables; ``ahead``: software prefetch distance in bytes; ``unroll``:
units per iteration. Figures below are of Zen 5, one thread, minima on a loaded machine.

Latency follows the bytes of (q, g), as in the paper's figure 9: 4096x4096, M = 1, out of cache,
microseconds by vpermb and by pshufb, and megabytes of codes, scales and offsets:

=====  ==================  ==================  ==================  ==================
q      g = 32              g = 64              g = 128             a whole row
=====  ==================  ==================  ==================  ==================
1      136, 154 (4.2 MB)   87, 91 (3.1 MB)     71, 67 (2.6 MB)     55, 59 (2.1 MB)
2      215, 244 (7.3 MB)   150, 148 (5.8 MB)   130, 128 (5.0 MB)   111, 112 (4.2 MB)
3      290, 292 (10.5 MB)  217, 223 (8.4 MB)   194, 192 (7.3 MB)   165, 178 (6.3 MB)
4      387, 430 (13.6 MB)  293, 300 (11.0 MB)  262, 300 (9.7 MB)   221, 258 (8.4 MB)
=====  ==================  ==================  ==================  ==================

Integer tables (A8) serve every M: 2048x2048, bcq2g128, M = 64 takes 0.6 ms by vpermb where decoding
to floats takes 3.4 ms; bcq8g128 3.0 ms and 15 ms. Float tables (A32) hold 16 or 8 sums a register,
and from M = 32 on decoding a panel once and multiplying is as fast or faster.

The paper's tables of 256 sums of eight activations (mu = 8) live in shared memory on GPUs. Here
they would live in caches: 4096x4096, q = 2, out of cache takes 1046 us by scalar loads of float
entries (two loads for eight weights and a plane, 512 KB of tables), 1651 us of int16 ones, 1682 us
by AVX2 gathers and 2088 us in blocks of K that keep tables in the L1 cache; sixteen sums of four in
registers take 135 us as bytes (AVX2 and AVX-512), 177 us as floats (AVX-512) and 457 us (AVX2).
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear import LinearSpec
from apq_tvm.ops.lut_linear import LutBlocking, lut_linear
from apq_tvm.ops.lut_tables import lut_tables, span_width, units_of
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear_kernel import LinearKernel, Preparation
from apq_tvm.tensorize.x86_lut import INSTRUCTIONS, LutInstruction, lut_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share extracted keys; a kernel is for at least that many rows."""

_VPERMB_SUMS = 12
"""Rows of x times planes whose sums, with the tables of each row, fit in 32 registers: four rows of
q = 4 took 593 us where two took 449 (4096x4096, M = 4, out of cache, Zen 5)."""

_FLOAT_M_MAX = 31
"""Most rows of x for lookups in float tables."""

_TASKS = 8
"""Bundles of row blocks a layer should have, so that threads can share it evenly."""

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays."""


def _layout(spec: LinearSpec, instruction: LutInstruction) -> BcqLayout:
    assert spec.scheme is not None
    return BcqLayout(spec.scheme.bits, instruction.rows, spec.scheme.group_size)


def _streams(decide: Decide, layout: BcqLayout, spec: LinearSpec, m_tile: int) -> int:
    # Eight lanes are those of vpermps on AVX2, whose tables alone take all 16 registers.
    choices = (2, 1, 4) if m_tile == 1 and layout.rows > 8 else (1, 2)
    blocks = layout.row_blocks(spec.n)
    possible = [s for s in choices if s <= blocks]
    return decide("streams", tuple(sorted(possible, key=lambda s: blocks < _TASKS * s)))


def _check(
    spec: LinearSpec, profile: DeviceProfile, instruction: LutInstruction, m_tile: int
) -> None:
    scheme = spec.scheme
    if scheme is None or scheme.family != "bcq":
        raise NotApplicable(f"is for binary codes, not {scheme or 'float32 weights'}")
    if scheme.integer_acts != (instruction.table_dtype == "uint8"):
        kind = "int8" if instruction.table_dtype == "uint8" else "float"
        raise NotApplicable(f"looks up {kind} tables, which {scheme} does not ask for")
    missing = sorted(set(instruction.features) - profile.features)
    if missing:
        raise NotApplicable(f"needs {' and '.join(missing)}, which {profile.name} lacks")
    if instruction.name == "vpermb" and m_tile > 1 and m_tile * scheme.bits > _VPERMB_SUMS:
        raise NotApplicable(f"{m_tile} rows of {scheme.bits} planes do not fit the registers")


def _prepare(spec: LinearSpec, instruction: LutInstruction) -> Preparation:
    layout = _layout(spec, instruction)
    padded = layout.padded_k(spec.k)
    span = span_width(padded, layout.group_size)
    func = lut_tables(spec.k, padded, span, instruction.table_dtype)
    return Preparation(f"lut_tables_k{spec.k}_g{span}_{instruction.table_dtype}", func)


def lut_kernel(instruction: LutInstruction, bits: int, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = _layout(spec, instruction)
        streams = _streams(decide, layout, spec, m_tile)
        return lut_linear(spec, layout, m_tile, streams, instruction.table_dtype)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = _layout(spec, instruction)
        streams = _streams(decide, layout, spec, m_tile)
        blocking = LutBlocking.of(layout, spec.n, spec.k, m_tile, streams, instruction.table_dtype)
        ahead = decide("ahead", (4096, 0, 2048, 8192))
        units = units_of(blocking.span)
        unroll = decide("unroll", tuple(u for u in (1, 2, 4) if units % u == 0))
        chosen = lut_intrinsic(instruction, bits, m_tile, ahead)
        whole = spec.n % layout.rows == 0 and layout.row_blocks(spec.n) % streams == 0
        parallel = spec.n * spec.k >= _PARALLEL
        schedule_lut(sch, blocking, chosen, whole, unroll, parallel)

    acts = 8 if instruction.table_dtype == "uint8" else 32
    return LinearKernel(
        name=f"lut_bcq{bits}A{acts}_{instruction.name}_r{instruction.rows}m{m_tile}",
        m_min=m_tile,
        m_max=-1 if acts == 8 else _FLOAT_M_MAX,
        check=lambda spec, profile: _check(spec, profile, instruction, m_tile),
        layout=lambda spec, profile: _layout(spec, instruction),
        func=func,
        schedule=schedule,
        bits=bits,
        family="bcq",
        prepare=lambda spec, profile, decide: _prepare(spec, instruction),
    )


def schedule_lut(
    sch: Any, blocking: LutBlocking, intrinsic: str, whole: bool, unroll: int, parallel: bool
) -> None:
    """Schedule a PrimFunc of `apq_tvm.ops.lut_linear`: one task per bundle of row blocks.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    blocking : LutBlocking
        Of the PrimFunc.
    intrinsic : str
        Registered name.
    whole : bool
        True if the store has a loop over lanes.
    unroll : int
        Units per iteration within a span.
    parallel : bool
        Whether bundles are shared among threads.
    """
    store, scale, dot = (sch.get_sblock(name) for name in ("store", "scale", "dot"))
    tile, bundle, stream, *inner = sch.get_loops(store)
    if whole:
        sch.vectorize(inner.pop())
    sch.reorder(bundle, tile, stream)
    if parallel:
        sch.parallel(bundle)
    _unroll_all(sch, stream, *inner)

    axes = blocking.row_axes + len(blocking.lanes)
    sch.compute_at(scale, tile, preserve_unit_loops=True)
    stream, *inner, lane, span = sch.get_loops(scale)[-(axes + 2) :]
    sch.reorder(span, stream, *inner, lane)
    _unroll_all(sch, stream, *inner)
    sch.vectorize(lane)

    sch.compute_at(dot, span, preserve_unit_loops=True)
    shape, reduced = blocking.dot.acc_shape, blocking.dot.reduced
    loops = sch.get_loops(dot)[-(1 + len(shape) + 1 + len(reduced)) :]
    stream, target, (unit, *rest) = loops[0], loops[1 : 1 + len(shape)], loops[1 + len(shape) :]
    sch.reorder(unit, stream, *target, *rest)
    if unroll > 1:
        unit, part = sch.split(unit, [None, unroll])
        sch.unroll(part)
    init = sch.decompose_reduction(dot, unit)
    *outer, lane = sch.get_loops(init)[-(1 + len(shape)) :]
    _unroll_all(sch, stream, *outer)
    sch.vectorize(lane)
    sch.tensorize(target[0], intrinsic)

    init = sch.decompose_reduction(scale, span)
    *outer, lane = sch.get_loops(init)[-(1 + axes) :]
    _unroll_all(sch, *outer)
    sch.vectorize(lane)


def _unroll_all(sch: Any, *loops: Any) -> None:
    for loop in loops:
        sch.unroll(loop)


def schedule_tables(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule a PrimFunc of `apq_tvm.ops.lut_tables`: a rule of `apq_tvm.schedules.rules`."""
    from tvm import s_tir

    sch = s_tir.Schedule(func)
    (row,) = sch.get_loops(sch.get_sblock("row"))
    sch.parallel(row)
    inside = {str(sch.get(b).name_hint) for b in sch.get_child_blocks(sch.get_sblock("row"))}
    for suffix, block in (("", "span"), ("_tail", "span_tail")):
        if block in inside:
            _schedule_span(sch, suffix, block)
    return sch.mod["main"]


def _schedule_span(sch: Any, suffix: str, block: str) -> None:
    names = {str(sch.get(b).name_hint) for b in sch.get_child_blocks(sch.get_sblock(block))}
    for name in ("add", "largest"):
        if f"{name}{suffix}" in names:
            work = sch.get_sblock(f"{name}{suffix}")
            chunk, lane = sch.get_loops(work)
            sch.vectorize(lane)
            sch.decompose_reduction(work, chunk)
    if f"top{suffix}" in names:
        work = sch.get_sblock(f"top{suffix}")
        (lane,) = sch.get_loops(work)
        sch.decompose_reduction(work, lane)
        sch.unroll(lane)
    quad, entry = sch.get_loops(sch.get_sblock(f"table{suffix}"))
    sch.vectorize(entry)
    sch.unroll(sch.split(quad, [None, 2])[1])


LUT_KERNELS: tuple[LinearKernel, ...] = tuple(
    lut_kernel(instruction, bits, m_tile)
    for instruction in INSTRUCTIONS
    for bits in range(1, 9)
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

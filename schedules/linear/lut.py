"""Kernels for binary codes: tables of activation sums in registers (LUT-GEMM, T-MAC).

What the decisions mean: ``streams``: row blocks read at once, which keeps more cache misses in
flight and shares the loads of tables; ``ahead``: software prefetch distance in bytes; ``unroll``:
units per iteration.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.lut_tables import lut_tables, span_width, units_of
from apq_tvm.ops.few_rows.lut import LutBlocking, lut_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import (
    PARALLEL_WEIGHTS,
    Choice,
    Instruction,
    LinearKernel,
    Preparation,
)
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.tensorize.pairs.lut_dot import LutInstruction, lut_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share extracted keys; a kernel is for at least that many rows."""

AHEADS = (4096, 0, 2048, 8192)
"""Software prefetch distances in bytes."""


def _layout(spec: LinearSpec, instruction: LutInstruction) -> BcqLayout:
    assert spec.scheme is not None
    scheme = spec.scheme
    return BcqLayout(scheme.bits, instruction.rows, scheme.group_size, instruction.narrow)


def _streams(
    decide: Decide, layout: BcqLayout, spec: LinearSpec, m_tile: int, instruction: LutInstruction
) -> int:
    # Eight lanes are those of vpermps on AVX2, whose tables alone take all 16 registers.
    choices = (2, 1, 4) if m_tile == 1 and layout.rows > 8 else (1, 2)
    blocks = layout.row_blocks(spec.n)
    most = (instruction.sums or blocks * m_tile * layout.bits) // (m_tile * layout.bits)
    return choose_streams(decide, choices, blocks, max(1, most))


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
    if m_tile > 1 and m_tile * scheme.bits > (instruction.tile_sums or m_tile * scheme.bits):
        raise NotApplicable(f"{m_tile} rows of {scheme.bits} planes do not fit the registers")


def _prepare(choice: Choice, instruction: LutInstruction) -> Preparation:
    spec, layout = choice.spec, _layout(choice.spec, instruction)
    padded = layout.padded_k(spec.k)
    span = span_width(padded, layout.group_size)
    func = lut_tables(spec.k, padded, span, instruction.table_dtype)
    key = f"lut_tables_k{spec.k}_g{span}_{instruction.table_dtype}"
    return Preparation(key, func, schedule=schedule_tables)


def lut_kernel(
    instruction: LutInstruction, bits: int, m_tile: int, aheads: tuple[int, ...] = AHEADS
) -> LinearKernel:
    """The record of one kernel for M >= m_tile; `aheads` are the prefetch distances to try."""

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> LutBlocking:
        layout = _layout(spec, instruction)
        streams = _streams(decide, layout, spec, m_tile, instruction)
        blocking = LutBlocking.of(layout, spec.n, spec.k, m_tile, streams, instruction.table_dtype)
        decide("ahead", aheads)
        units = units_of(blocking.span)
        decide("unroll", tuple(u for u in (1, 2, 4) if units % u == 0))
        return blocking

    def func(choice: Choice) -> Any:
        spec, streams = choice.spec, choice["streams"]
        layout = _layout(spec, instruction)
        return lut_linear(spec, layout, m_tile, streams, instruction.table_dtype)

    def schedule(sch: Any, choice: Choice) -> None:
        spec, layout = choice.spec, _layout(choice.spec, instruction)
        chosen = lut_intrinsic(instruction, bits, m_tile, choice["ahead"])
        whole = spec.n % layout.rows == 0 and layout.row_blocks(spec.n) % choice["streams"] == 0
        parallel = spec.n * spec.k >= PARALLEL_WEIGHTS
        schedule_lut(sch, choice.plan, chosen, whole, choice["unroll"], parallel)

    acts = 8 if instruction.table_dtype == "uint8" else 32
    return LinearKernel(
        "lut",
        f"bcq{bits}",
        acts,
        Instruction(instruction.name, instruction.features, instruction.rows),
        m_tile,
        check=lambda spec, profile: _check(spec, profile, instruction, m_tile),
        layout=lambda spec, profile: _layout(spec, instruction),
        func=func,
        schedule=schedule,
        ask=ask,
        prepare=lambda choice: _prepare(choice, instruction),
        bits=bits,
        family="bcq",
        m_named=m_tile,
    )


def schedule_lut(
    sch: Any, blocking: LutBlocking, intrinsic: str, whole: bool, unroll: int, parallel: bool
) -> None:
    """Schedule a PrimFunc of `apq_tvm.ops.few_rows.lut`: one task per bundle of row blocks.

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
    """Schedule a PrimFunc of `apq_tvm.ops.activations.lut_tables`."""
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

"""Kernels for binary codes: tables of activation sums in registers (LUT-GEMM, T-MAC).

What the decisions mean: ``streams``: row blocks read at once, which keeps more cache misses in
flight and shares the loads of tables; ``ahead``: software prefetch distance in bytes; ``unroll``:
units per iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.lut_tables import lut_tables, span_width
from apq_tvm.ops.few_rows.lut import lut_blocking, lut_linear
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_all_features
from apq_tvm.schedules.linear.gemv import schedule_gemv
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.schedules.linear.streams import AHEADS, M_TILES, choose_streams
from apq_tvm.tensorize.pairs.lut_dot import LutInstruction, lut_intrinsic
from apq_tvm.types import DeviceProfile


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


def _check(spec: LinearSpec, profile: DeviceProfile, instruction: LutInstruction) -> None:
    scheme = spec.scheme
    assert scheme is not None
    if scheme.integer_acts != (instruction.table_dtype == "uint8"):
        kind = "int8" if instruction.table_dtype == "uint8" else "float"
        raise NotApplicable(f"looks up {kind} tables, which {scheme} does not ask for")
    check_all_features(profile, instruction.features)


def _prepare(choice: Choice, instruction: LutInstruction) -> Preparation:
    spec, layout = choice.spec, _layout(choice.spec, instruction)
    padded = layout.padded_k(spec.k)
    span = span_width(padded, layout.group_size)
    key = f"lut_tables_k{spec.k}_g{span}_{instruction.table_dtype}"

    def make(decide: Decide) -> Any:
        return lut_tables(spec.k, padded, span, instruction.table_dtype)

    return Preparation(key, make, schedule=schedule_tables)


def lut_kernels(
    instruction: LutInstruction, aheads: tuple[int, ...] = AHEADS
) -> Iterator[LinearKernel]:
    """Records of all planes and M tiles whose sums fit the registers.

    Parameters
    ----------
    instruction : LutInstruction
    aheads : tuple of int
        Prefetch distances to try.
    """
    for bits in range(1, 9):
        for m_tile in M_TILES:
            sums = m_tile * bits
            if m_tile == 1 or sums <= (instruction.tile_sums or sums):
                yield _lut_kernel(instruction, bits, m_tile, aheads)


def _lut_kernel(
    instruction: LutInstruction, bits: int, m_tile: int, aheads: tuple[int, ...]
) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Blocking:
        layout = _layout(spec, instruction)
        streams = _streams(decide, layout, spec, m_tile, instruction)
        blocking = lut_blocking(layout, spec.n, spec.k, m_tile, streams)
        decide("ahead", aheads)
        decide("unroll", tuple(u for u in (1, 2, 4) if blocking.units % u == 0))
        return blocking

    def func(choice: Choice) -> Any:
        layout = _layout(choice.spec, instruction)
        return lut_linear(choice.spec, layout, choice.plan, instruction.table_dtype)

    def schedule(sch: Any, choice: Choice) -> None:
        spec, layout = choice.spec, _layout(choice.spec, instruction)
        chosen = lut_intrinsic(instruction, bits, m_tile, choice["ahead"])
        whole = spec.n % layout.rows == 0 and layout.row_blocks(spec.n) % choice["streams"] == 0
        schedule_gemv(sch, choice, choice.plan, chosen, whole, beside=True)

    acts = 8 if instruction.table_dtype == "uint8" else 32
    return LinearKernel(
        "lut",
        f"bcq{bits}",
        acts,
        Instruction(instruction.name, instruction.features, instruction.rows),
        m_tile,
        check=lambda spec, profile: _check(spec, profile, instruction),
        layout=lambda spec, profile: _layout(spec, instruction),
        func=func,
        schedule=schedule,
        ask=ask,
        prepare=lambda choice: _prepare(choice, instruction),
        bits=bits,
        family="bcq",
        m_named=m_tile,
    )


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

"""Default schedules of integer linear layers for few rows of x on 64-bit Arm with sdot.

What the decisions mean:

- ``streams``: row blocks of 4 that are read at once; they share the loads of the activations. As
  many as leave no vector on the stack (`tests/code/test_arm_gemv_asm.py`); on V1, where LLVM brings
  pairs of loads far forward, that is two.
- ``copies``: whether each of them has its own copy of what a chunk starts from
  (`apq_tvm.ops.few_rows.folded`). Cores with four vector pipes are out of issue slots for vectors
  before they are out of loads (V1: 43 % of the sdot peak without, 47 % with); N1 is short of slots
  of any kind (37 % with, 39 % without).
- ``ordered``: written assembly instead of LLVM's order, for cores that issue in order
  (`apq_tvm.tensorize.arm.written.in_order`): 40 % of the sdot peak of Cortex-A55 instead of 31 %.
- ``together``: whether one ``ld1`` loads four vectors of codes. N1 has three slots a cycle in
  LLVM's model and takes three for an ``ldp`` of two (41 % of the sdot peak with, 39 % without).
- ``unroll``: chunks per iteration. Scales of two chunks are one 16-byte load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.ops.activations.fold import fold_activations
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of, folded_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.chunks import fold_preparation, schedule_chunks, task_rows
from apq_tvm.schedules.arm.layouts import LANES, check_folded
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import interleaved
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.tensorize.arm.fold import folded_intrinsic
from apq_tvm.tensorize.arm.written.in_order import in_order_intrinsic
from apq_tvm.tensorize.arm.written.in_order_asm import STREAMS
from apq_tvm.tensorize.pairs.folded_dot import FoldedDot
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share an unpacked weight vector; a kernel is for at least that many rows."""

SDOT = Instruction("sdot", ("dotprod",), LANES)


@dataclass(frozen=True)
class _Plan:
    dot: FoldedDot
    ordered: bool
    unroll: int = 1
    together: bool = False


def _wide(profile: DeviceProfile) -> bool:
    """Four vector pipes, as far as anybody knows."""
    return profile.vector_pipes >= 4


def _streams(spec: LinearSpec, profile: DeviceProfile, m_tile: int, decide: Decide) -> int:
    fold = fold_of(interleaved(spec, LANES))
    if m_tile == 4 or (m_tile == 2 and not fold.raw):
        choices: tuple[int, ...] = (1, 2, 4)
    else:
        few = fold.parts == 1 or (profile.paired_loads and _wide(profile))
        choices = (2, 1, 4) if few else (4, 2, 1)
        if fold.unit.whole and fold.unit.bits > 3 and not (profile.in_order or _wide(profile)):
            choices = (1, 2, 4)  # their bytes are wanted again for codes that are split over them
    blocks = -(-spec.n // LANES)
    return decide("streams", tuple(s for s in choices if s <= blocks))


def _unrolls(dot: FoldedDot, chunks: int) -> tuple[int, ...]:
    fold, m_tile = dot.fold, dot.m
    more = dot.units == 1 and (m_tile == 4 or (m_tile == 1 and not fold.zeros))
    choices = (2, 1) if more and fold.raw and not (fold.unit.whole and m_tile > 1) else (1, 2)
    return tuple(u for u in choices if chunks % u == 0)


def _may_be_ordered(spec: LinearSpec, dot: FoldedDot) -> bool:
    layout, fold = interleaved(spec, LANES), dot.fold
    possible = dot.m == 1 and fold.parts > 1 and not fold.zeros
    possible = possible and layout.row_blocks(spec.n) % STREAMS == 0
    possible = possible and (dot.units == 1 or fold.parts == 2)
    return possible and layout.group_size == UNIT_K * dot.units < layout.padded_k(spec.k)


def _ask(m_tile: int, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> _Plan:
    layout = interleaved(spec, LANES)
    dot = FoldedDot(fold_of(layout), m_tile, chunk_units(layout, spec.k))
    streams = _streams(spec, profile, m_tile, decide)
    own = profile.in_order or _wide(profile)
    copies = decide("copies", (streams, 1) if own else (1, streams))
    if _may_be_ordered(spec, dot) and streams == copies == STREAMS:
        first = profile.in_order
        if decide("ordered", (first, not first)):
            return _Plan(dot, True)
    chunks = layout.padded_k(spec.k) // UNIT_K // dot.units
    unroll = decide("unroll", _unrolls(dot, chunks))
    # For one row of x LLVM moves the loads of longer chunks up, and they do not fit the registers.
    fits = (dot.units <= 2 or m_tile > 1) and not layout.whole
    scarce = fits and not profile.in_order and profile.vector_pipes == 2
    return _Plan(dot, False, unroll, decide("together", (scarce, not scarce)))


def _func(choice: Choice) -> Any:
    plan, layout, own = choice.plan, interleaved(choice.spec, LANES), choice["copies"] > 1
    return folded_linear(choice.spec, layout, plan.dot, choice["streams"], own, plan.ordered)


def _prepare(choice: Choice) -> Preparation:
    spec, layout, copies = choice.spec, interleaved(choice.spec, LANES), choice["copies"]
    assert spec.scheme is not None
    per_token = spec.scheme.act_group == -1
    func = fold_activations(spec.k, layout, per_token, copies, task_rows(spec))
    return fold_preparation(spec, layout, choice.plan.dot, copies, func)


def _schedule(sch: Any, choice: Choice) -> None:
    spec, plan = choice.spec, choice.plan
    dot = plan.dot
    if plan.ordered:
        chunks = interleaved(spec, LANES).padded_k(spec.k) // UNIT_K // dot.units
        intrinsic = in_order_intrinsic(dot.fold, chunks, dot.units)
    else:
        intrinsic = folded_intrinsic(dot.fold, dot.m, dot.units, plan.together)
    schedule_chunks(sch, spec, dot, intrinsic, plan.unroll, whole=plan.ordered)


def _kernel(bits: int, m_tile: int) -> LinearKernel:
    return LinearKernel(
        "gemv",
        f"W{bits}",
        8,
        SDOT,
        m_tile,
        check=lambda spec, profile: check_folded(
            spec, profile, bits, SDOT, interleaved(spec, LANES)
        ),
        layout=lambda spec, _: interleaved(spec, LANES),
        func=_func,
        schedule=_schedule,
        ask=lambda spec, profile, decide: _ask(m_tile, spec, profile, decide),
        prepare=_prepare,
        bits=bits,
        m_named=m_tile,
    )


SDOT_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(bits, m_tile) for bits in range(1, 9) for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

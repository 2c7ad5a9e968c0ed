"""Default schedules of integer linear layers for few rows of x on 64-bit Arm with sdot.

What the decisions mean:

- ``streams``: row blocks of 4 that are read at once; they share the loads of the activations. As
  many as leave no vector on the stack (`tests/code/test_arm_gemv_asm.py`); on V1, where LLVM brings
  pairs of loads far forward, that is two.
- ``copies``: whether each of them has its own copy of what a chunk starts from
  (`apq_tvm.ops.few_rows.folded`). Cores with four vector pipes are out of issue slots for vectors
  before they are out of loads (V1: 43 % of the sdot peak without, 47 % with); N1 is short of slots
  of any kind (37 % with, 39 % without).
- ``unroll``: chunks per iteration. Scales of two chunks are one 16-byte load.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.ops.activations.fold import fold_activations
from apq_tvm.ops.few_rows.folded import chunk_units, fold_of, folded_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.chunks import fold_preparation, schedule_chunks
from apq_tvm.schedules.arm.layouts import LANES, check_folded
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import interleaved
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.schedules.linear.quantize import task_rows
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.tensorize.arm.fold import folded_intrinsic
from apq_tvm.tensorize.pairs.folded_dot import FoldedDot
from apq_tvm.types import DeviceProfile

SDOT = Instruction("sdot", ("dotprod",), LANES)


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


def _ask(m_tile: int, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> FoldedDot:
    layout = interleaved(spec, LANES)
    dot = FoldedDot(fold_of(layout), m_tile, chunk_units(layout, spec.k))
    streams = _streams(spec, profile, m_tile, decide)
    own = profile.in_order or _wide(profile)
    decide("copies", (streams, 1) if own else (1, streams))
    decide("unroll", _unrolls(dot, layout.padded_k(spec.k) // UNIT_K // dot.units))
    return dot


def _func(choice: Choice) -> Any:
    layout, own = interleaved(choice.spec, LANES), choice["copies"] > 1
    return folded_linear(choice.spec, layout, choice.plan, choice["streams"], own)


def _prepare(choice: Choice) -> Preparation:
    spec, layout, copies = choice.spec, interleaved(choice.spec, LANES), choice["copies"]
    assert spec.scheme is not None
    per_token = spec.scheme.act_group == -1

    def make(decide: Decide) -> Any:
        rows = task_rows(spec.k, decide)
        return fold_activations(spec.k, layout, per_token, copies, rows, spec.asymmetric)

    return fold_preparation("fold_activations", spec, layout, choice.plan, copies, make)


def _schedule(sch: Any, choice: Choice) -> None:
    dot = choice.plan
    intrinsic = folded_intrinsic(dot.fold, dot.m, dot.units)
    schedule_chunks(sch, choice.spec, dot, intrinsic, choice["unroll"])


def _kernel(bits: int, m_tile: int) -> LinearKernel:
    return LinearKernel(
        "gemv",
        f"W{bits}",
        8,
        SDOT,
        m_tile,
        check=lambda spec, profile: check_folded(spec, profile, SDOT, interleaved(spec, LANES)),
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

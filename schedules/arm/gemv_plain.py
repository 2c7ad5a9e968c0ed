"""Default schedules of linear layers for few rows of x on any 64-bit Arm: smull, and float sums.

For cores without sdot (Cortex-A53, A72), for groups of 16, for activations of fewer bits than 8 or
of none, and for codes with minima and k-quants. Operators and schedule are those of x86
(`apq_tvm.schedules.linear.gemv`). One row block is read at a time where several rows of x fill the
registers, else two, which share the loads of x.
"""

from __future__ import annotations

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.gemv import SDOT_KERNELS
from apq_tvm.schedules.arm.layouts import LANES, check_layout
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_integer, interleaved
from apq_tvm.schedules.linear.gemv import float_kernel, gemv_kernel
from apq_tvm.schedules.linear.kernel import Instruction, LinearKernel
from apq_tvm.schedules.linear.stepped import KINDS
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.tensorize.arm.dot import smull_intrinsic, smull_meaning
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.types import DeviceProfile

_FMA = Instruction("fma", ("neon",), LANES)


def _streams(decide: Decide, layout: InterleavedLayout, spec: LinearSpec, m_tile: int) -> int:
    choices = (2, 1, 4) if m_tile == 1 else (1, 2)
    return decide("streams", tuple(s for s in choices if s <= layout.row_blocks(spec.n)))


def _aheads(layout: InterleavedLayout, m_tile: int) -> tuple[int, ...]:
    return ()  # nobody has measured what a prefetch is worth


def _smull_kernel(bits: int, m_tile: int, weights: str = "", family: str = "int") -> LinearKernel:
    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer(spec, profile, ("neon",), LANES)
        check_layout(spec, profile, interleaved(spec, LANES))

    def meaning(layout: InterleavedLayout) -> UnitDot:
        return smull_meaning(layout.unit, m_tile)

    smull = Instruction("smull", ("neon",), LANES)
    return gemv_kernel(
        smull, bits, 8, m_tile, check, meaning, smull_intrinsic, _streams, _aheads, weights, family
    )


GEMV_KERNELS: tuple[LinearKernel, ...] = (
    *SDOT_KERNELS,
    *(_smull_kernel(bits, m_tile) for bits in range(1, 9) for m_tile in M_TILES),
    *(
        _smull_kernel(bits, m_tile, weights, family)
        for family, weights, bits in KINDS
        for m_tile in M_TILES
    ),
    *(
        float_kernel(_FMA, bits, m_tile, _streams, _aheads)
        for bits in range(1, 9)
        for m_tile in M_TILES
    ),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

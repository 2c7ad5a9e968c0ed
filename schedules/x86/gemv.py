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

from functools import partial

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_integer
from apq_tvm.schedules.linear.gemv import float_kernel, gemv_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.streams import M_TILES, choose_streams
from apq_tvm.schedules.x86.instructions import FMA, dot_record
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, DotInstruction, dot_intrinsic
from apq_tvm.types import DeviceProfile


def _fast(layout: InterleavedLayout, m_tile: int) -> bool:
    """Whether units pass faster than prefetches pay."""
    one_scale_per_unit = layout.group_size in (16, UNIT_K)
    return layout.rows == 16 and m_tile == 1 and (layout.bits in (4, 8) or not one_scale_per_unit)


def _streams(decide: Decide, layout: InterleavedLayout, spec: LinearSpec, m_tile: int) -> int:
    if _fast(layout, m_tile):
        choices: tuple[int, ...] = (4, 2, 1)
    else:
        choices = (2, 1, 4) if m_tile == 1 else (1, 2)
    return choose_streams(decide, choices, layout.row_blocks(spec.n))


def _aheads(layout: InterleavedLayout, m_tile: int) -> tuple[int, ...]:
    return (0, 4096, 2048, 8192) if _fast(layout, m_tile) else (4096, 0, 2048, 8192)


def integer_kernel(
    instruction: DotInstruction, bits: int, m_tile: int, weights: str = "", family: str = "int"
) -> LinearKernel:
    """The record of one integer kernel for M >= m_tile; of a family whose codes lie like those."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer(spec, profile, instruction.features, instruction.rows)

    def meaning(layout: InterleavedLayout) -> UnitDot:
        return instruction.meaning(layout.unit, m_tile)

    record, product = dot_record(instruction), partial(dot_intrinsic, instruction)
    return gemv_kernel(
        record, bits, 8, m_tile, check, meaning, product, _streams, _aheads, weights, family
    )


GEMV_KERNELS: tuple[LinearKernel, ...] = (
    *(
        integer_kernel(instruction, bits, m_tile)
        for instruction in INSTRUCTIONS
        for bits in range(1, 9)
        for m_tile in M_TILES
    ),
    *(
        float_kernel(instruction, bits, m_tile, _streams, _aheads)
        for instruction in FMA.values()
        for bits in range(1, 9)
        for m_tile in M_TILES
    ),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

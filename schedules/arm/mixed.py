"""Kernels for ``mixed24`` weights on Arm: by dot products, or by multiplications of bytes.

No software prefetch by default: weights are one stream, which hardware follows. A word row of
8 x 64 weights takes 66 cycles on Neoverse N1, 31.2 on V1 and 181 on Cortex-A55 (llvm-mca 22):
0.129, 0.061 and 0.35 per weight, since every 2-bit group of 16 has a scale of its own. Four
outliers take 16 cycles on N1 and 8 on V1.
"""

from __future__ import annotations

from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.mixed import mixed_kernel
from apq_tvm.schedules.linear.streams import FOLLOWED_AHEADS, M_TILES
from apq_tvm.tensorize.arm.mixed import INSTRUCTIONS

ROWS = 8
"""That are interleaved."""

ARM_MIXED_KERNELS: tuple[LinearKernel, ...] = tuple(
    mixed_kernel(instruction, m_tile, lambda profile: ROWS, FOLLOWED_AHEADS)
    for instruction in INSTRUCTIONS
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

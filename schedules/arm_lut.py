"""Kernels for binary codes on Arm: activations rounded in tables that ``tbl`` looks up.

One schedule serves every core: a lookup needs nothing but AdvSIMD. No software prefetch by default:
weights are one or two streams, which hardware follows.
"""

from __future__ import annotations

from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.schedules.lut import M_TILES, lut_kernel
from apq_tvm.tensorize.arm_lut import TBL

AHEADS = (0, 1024, 2048, 4096)
"""Software prefetch distances in bytes."""

ARM_LUT_KERNELS: tuple[LinearKernel, ...] = tuple(
    lut_kernel(TBL, bits, m_tile, AHEADS) for bits in range(1, 9) for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

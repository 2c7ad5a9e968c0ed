"""Kernels for ``W2*`` weights on Arm, for any number of rows of x.

No software prefetch by default: weights are one stream, which hardware follows.
"""

from __future__ import annotations

from functools import partial

from apq_tvm.schedules.balance import M_TILES, gemv_kernel
from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.tensorize.arm_balance import INSTRUCTIONS, LANES, balance_intrinsic

AHEADS = (0, 1024, 2048, 4096)
"""Software prefetch distances in bytes."""

ARM_BALANCE_KERNELS: tuple[LinearKernel, ...] = tuple(
    gemv_kernel(
        instruction.name,
        LANES,
        ((instruction.feature,),),
        partial(balance_intrinsic, instruction),
        m_tile,
        AHEADS,
    )
    for instruction in INSTRUCTIONS
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

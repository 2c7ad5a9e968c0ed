"""Kernels for ``W2*`` weights on Arm, for any number of rows of x.

No software prefetch by default: weights are one stream, which hardware follows. Cycles per weight
with the scaling, 4096x4096, g = 128, M = 1, llvm-mca 22: 0.126 on Neoverse N1, 0.067 on V1 and
0.303 on Cortex-A55; four rows of x share the codes and take 0.07 a row on N1.
"""

from __future__ import annotations

from functools import partial

from apq_tvm.schedules.linear.balance import gemv_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.streams import FOLLOWED_AHEADS, M_TILES
from apq_tvm.tensorize.arm.balance import INSTRUCTIONS, LANES, balance_intrinsic

ARM_BALANCE_KERNELS: tuple[LinearKernel, ...] = tuple(
    gemv_kernel(
        instruction.name,
        LANES,
        ((instruction.feature,),),
        partial(balance_intrinsic, instruction),
        m_tile,
        FOLLOWED_AHEADS,
    )
    for instruction in INSTRUCTIONS
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

"""Kernels of any-precision linear layers on 64-bit Arm (`apq_tvm.schedules.anyprec`)."""

from __future__ import annotations

from apq_tvm.schedules.anyprec import gemm_kernel, gemv_kernel
from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.tensorize.arm_planes import INSTRUCTIONS

M_TILE = 4
"""Rows of x in a tile: with four rows of weights their sums fill half of the registers."""

ANYPREC_KERNELS: tuple[LinearKernel, ...] = tuple(
    kernel
    for instruction in INSTRUCTIONS
    for width in range(1, 9)
    for kernel in (gemm_kernel(instruction, width, M_TILE), gemv_kernel(instruction, width))
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

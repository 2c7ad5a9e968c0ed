"""Kernels of any-precision linear layers on x86 (`apq_tvm.schedules.anyprec`)."""

from __future__ import annotations

from apq_tvm.schedules.anyprec import gemm_kernel, gemv_kernel
from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.tensorize.x86_planes import INSTRUCTIONS, PSHUFB, VPERMB

M_TILES = {VPERMB: (4,), PSHUFB: (2,)}
"""Rows of x in a tile: with four rows of weights their sums fill 32 zmm or 16 ymm by half. Fewer
rows are taken one by one: there is a kernel for every width, and code counts in small packages."""

ANYPREC_KERNELS: tuple[LinearKernel, ...] = tuple(
    kernel
    for instruction in INSTRUCTIONS
    for width in range(1, 9)
    for kernel in (
        *(gemm_kernel(instruction, width, m_tile) for m_tile in M_TILES[instruction]),
        gemv_kernel(instruction, width),
    )
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

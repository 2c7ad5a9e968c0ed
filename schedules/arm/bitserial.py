"""Bit-serial linear layers on Arm: their kernel records."""

from __future__ import annotations

from apq_tvm.schedules.linear.bitserial import bitserial_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.streams import FOLLOWED_AHEADS, M_TILES
from apq_tvm.tensorize.arm.bitserial import INSTRUCTIONS

ARM_BITSERIAL_KERNELS: tuple[LinearKernel, ...] = tuple(
    bitserial_kernel(instruction, bits, m_tile, FOLLOWED_AHEADS)
    for instruction in INSTRUCTIONS
    for bits in range(1, 9)
    for m_tile in M_TILES
)
"""In order of preference, before the integer dot products: they decline where those are faster."""

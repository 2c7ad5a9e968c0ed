"""Kernels for ``mixed24`` weights on x86."""

from __future__ import annotations

from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.mixed import M_TILES, mixed_kernel
from apq_tvm.tensorize.x86.mixed import INSTRUCTIONS

MIXED_KERNELS: tuple[LinearKernel, ...] = tuple(
    mixed_kernel(instruction, m_tile) for instruction in INSTRUCTIONS for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

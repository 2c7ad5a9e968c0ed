"""Kernels for ``mixed24`` weights on x86."""

from __future__ import annotations

from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.mixed import mixed_kernel
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.tensorize.x86.dot import VNNI512
from apq_tvm.tensorize.x86.mixed import INSTRUCTIONS
from apq_tvm.types import DeviceProfile


def _rows(profile: DeviceProfile) -> int:
    """16 where a kernel has 512-bit vectors, else 8."""
    return 16 if profile.features & set(VNNI512.features) else 8


MIXED_KERNELS: tuple[LinearKernel, ...] = tuple(
    mixed_kernel(instruction, m_tile, _rows) for instruction in INSTRUCTIONS for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

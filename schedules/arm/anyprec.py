"""Kernels of any-precision linear layers on 64-bit Arm (`apq_tvm.schedules.linear.anyprec`)."""

from __future__ import annotations

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.anyprec import apart_kernel, cells_kernel, gemm_kernel, gemv_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.arm.planes import INSTRUCTIONS, SDOT_TBX
from apq_tvm.types import DeviceProfile

M_TILE = 4
"""Rows of x in a tile: with four rows of weights their sums fill half of the registers."""

APART = 7
"""Bits from which on tables of two channels do not fit the registers beside codes."""


def _check_in_order(spec: LinearSpec, profile: DeviceProfile) -> None:
    """Decline cores on which a lookup waits for the one before it that others would not."""
    if not profile.in_order:
        raise NotApplicable(f"is for cores that issue in order; {profile.name} does not")


ANYPREC_KERNELS: tuple[LinearKernel, ...] = tuple(
    apart_kernel(SDOT_TBX, width, check=_check_in_order) for width in range(APART, 9)
) + tuple(
    kernel
    for instruction in INSTRUCTIONS
    for width in range(1, 9)
    for kernel in (
        gemm_kernel(instruction, width, M_TILE),
        (apart_kernel if width >= APART else gemv_kernel)(instruction, width),
        *([cells_kernel(instruction, width)] if width >= APART else []),
    )
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

"""Kernels of any-precision linear layers on 64-bit Arm (`apq_tvm.schedules.linear.anyprec`)."""

from __future__ import annotations

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.anyprec import (
    apart_kernel,
    check_cells,
    check_tables,
    gemm_kernel,
    gemv_kernel,
)
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.arm.planes import INSTRUCTIONS, SDOT_TBX
from apq_tvm.types import DeviceProfile

M_TILE = 4
"""Rows of x in a tile: with four rows of weights their sums fill half of the registers."""

APART = 7
"""Bits from which on tables of two channels do not fit the registers beside codes."""

CELLS = 7
"""Bits from which on codes of divided cells are put together before. With 6, 4 registers a channel,
tables that are loaded again cost less (Neoverse N1, llvm-mca 22: 481 to 528)."""


def _check_in_order(spec: LinearSpec, profile: DeviceProfile) -> None:
    """Decline cells, and cores on which a lookup does not wait for the one before it."""
    check_tables(spec, profile)
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
        *([apart_kernel(instruction, width, "_cells", check_cells)] if width >= CELLS else []),
        (apart_kernel if width >= APART else gemv_kernel)(instruction, width),
    )
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

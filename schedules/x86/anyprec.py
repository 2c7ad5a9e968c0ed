"""Kernels of any-precision linear layers on x86 (`apq_tvm.schedules.linear.anyprec`)."""

from __future__ import annotations

from dataclasses import replace

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.few_rows.anyprec import RUN
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.anyprec import apart_kernel, gemm_kernel, gemv_kernel
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.x86.planes import INSTRUCTIONS, PSHUFB, VPERMB, PlanesInstruction
from apq_tvm.types import DeviceProfile

M_TILES = {VPERMB: (4,), PSHUFB: (2,)}
"""Rows of x in a tile: with four rows of weights their sums fill 32 zmm or 16 ymm by half. Fewer
rows are taken one by one: there is a kernel for every width, and code counts in small packages."""

APART = 7
"""Bits from which on codes are put together before lookups by vpermb."""


def _apart(instruction: PlanesInstruction, width: int) -> tuple[LinearKernel, ...]:
    """The kernel that does so, for K of whole registers, two at least after whole runs."""
    if instruction is not VPERMB or width < APART:
        return ()
    kernel = apart_kernel(instruction, width)

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        kernel.check(spec, profile)
        rest = kernel.layout(spec, profile).padded_k(spec.k) % RUN
        if rest % instruction.vector or rest == instruction.vector:
            raise NotApplicable(f"K={spec.k} leaves {rest} columns after runs of {RUN}")

    return (replace(kernel, old_name=kernel.name.replace("gemv_", "apart_"), check=check),)


ANYPREC_KERNELS: tuple[LinearKernel, ...] = tuple(
    kernel
    for instruction in INSTRUCTIONS
    for width in range(1, 9)
    for kernel in (
        *(gemm_kernel(instruction, width, m_tile) for m_tile in M_TILES[instruction]),
        *_apart(instruction, width),
        gemv_kernel(instruction, width),
    )
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

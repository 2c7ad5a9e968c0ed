"""Kernels of any-precision linear layers on x86 (`apq_tvm.schedules.linear.anyprec`)."""

from __future__ import annotations

from apq_tvm.codegen.layouts.planes import PlanesLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.few_rows.anyprec import RUN
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.anyprec import (
    apart_kernel,
    check_tables,
    gemm_kernel,
    gemv_kernel,
    strided_kernel,
)
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.tensorize.x86.planes import INSTRUCTIONS, PSHUFB, VPERMB
from apq_tvm.types import DeviceProfile

M_TILES = {VPERMB: (4, 2), PSHUFB: (2,)}
"""Rows of x in a tile, the most first: with four rows of weights their sums fill 32 zmm or 16 ymm
by half. Two rows share lookups too, where three read the middle one twice: a step of a small batch,
or of a check of drafts."""


def _check_runs(spec: LinearSpec, profile: DeviceProfile) -> None:
    """Decline K that is not of whole registers, two at least after whole runs."""
    check_tables(spec, profile)
    assert spec.scheme is not None
    rest = PlanesLayout.of(spec.scheme, spec.details).padded_k(spec.k) % RUN
    if rest % VPERMB.vector or rest == VPERMB.vector:
        raise NotApplicable(f"K={spec.k} leaves {rest} columns after runs of {RUN}")


APART_KERNELS = {width: apart_kernel(VPERMB, width, "_apart", _check_runs) for width in (7, 8)}
"""By width: from 7 bits on codes are put together before lookups by vpermb."""

STRIDED_KERNELS = {
    (instruction, width): strided_kernel(instruction, width, M_TILES[instruction][0])
    for instruction in INSTRUCTIONS
    for width in range(1, 9)
}
"""By instruction and width: where groups of activations have scales and rows are many."""

ANYPREC_KERNELS: tuple[LinearKernel, ...] = tuple(
    kernel
    for instruction in INSTRUCTIONS
    for width in range(1, 9)
    for kernel in (
        STRIDED_KERNELS[instruction, width],
        *(gemm_kernel(instruction, width, m_tile) for m_tile in M_TILES[instruction]),
        *([APART_KERNELS[width]] if instruction == VPERMB and width in APART_KERNELS else []),
        gemv_kernel(instruction, width),
    )
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

"""Kernels on x86 for codes with minima and for k-quants: those of integers, with other scales.

Schedules, decisions and intrinsics are those of `apq_tvm.schedules.x86.gemv` and
`apq_tvm.schedules.x86.gemm`; the layout says what a group's sum is multiplied by and what is taken
off (`apq_tvm.codegen.layouts.stepped`).
"""

from __future__ import annotations

from functools import partial

from apq_tvm.ops.many_rows.stepped import SteppedGemm
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.stepped import KINDS
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.schedules.x86 import gemm, gemv
from apq_tvm.schedules.x86.instructions import dot_record
from apq_tvm.schedules.x86.tiles import integer_tiles
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, DotInstruction
from apq_tvm.tensorize.x86.gemm import integer_gemm_intrinsic


def _many(instruction: DotInstruction, family: str, weights: str, bits: int) -> LinearKernel:
    return gemm.integer_kernel(
        dot_record(instruction), bits, partial(integer_tiles, instruction),
        partial(integer_gemm_intrinsic, instruction, bits=bits), SteppedGemm,
        weights=weights, family=family,
    )  # fmt: skip


STEPPED_KERNELS: tuple[LinearKernel, ...] = (
    *(_many(instruction, *kind) for kind in KINDS for instruction in INSTRUCTIONS),
    *(
        gemv.integer_kernel(instruction, bits, m_tile, weights, family)
        for family, weights, bits in KINDS
        for instruction in INSTRUCTIONS
        for m_tile in M_TILES
    ),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

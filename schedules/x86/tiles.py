"""Tiles and steps of GEMMs on x86, chosen so that a tile stays in registers.

Accumulators, one weight vector per column vector and one broadcast fit 32 zmm or 16 ymm registers.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.gemm_stages import schedule_stages
from apq_tvm.tensorize.x86.dot import MADDUBS, DotInstruction
from apq_tvm.tensorize.x86.gemm import float_gemm_intrinsic, splits_codes

TALLEST = 5
"""Rows of x of the highest tile of kernels that decode a panel, which they may read at once."""

Tiles = tuple[tuple[int, int], ...]
"""(rows of x, column vectors), the best first."""


def integer_tiles(instruction: DotInstruction, whole: bool, bits: int) -> Tiles:
    """(rows, column vectors); grouped schemes hold an int32 and a float32 sum per element."""
    if instruction.rows == 16:
        return ((4, 3), (5, 3), (3, 4), (3, 5)) if whole else ((4, 3), (5, 2), (3, 4), (4, 2))
    if instruction is not MADDUBS:
        return ((4, 3), (5, 2), (3, 3), (4, 2)) if whole else ((4, 2), (3, 2), (5, 1), (2, 3))
    # int16 sums besides: LLVM finishes one accumulator after the other, so that the eight weight
    # vectors of a unit want registers too.
    if splits_codes(instruction, bits):
        return ((2, 2), (4, 1), (2, 1), (3, 2)) if whole else ((2, 1), (2, 2), (3, 1), (3, 2))
    return ((4, 2), (2, 2), (3, 2), (2, 3)) if whole else ((2, 2), (4, 1), (3, 1), (1, 4))


def float_k_step(k: int, k_block: int, decide: Decide) -> int:
    """Decide columns of a step of a float GEMM: of those that divide K and its blocks."""
    return decide("k_step", tuple(s for s in (8, 4, 2, 1) if k % s == 0 and k_block % s == 0))


def micro_kernel(sch: Any, intrinsic: str, axes: int) -> None:
    """Give the products of a tile, the innermost `axes` loops, to an intrinsic."""
    loops = sch.get_loops(sch.get_sblock("dot"))
    sch.tensorize(loops[-axes], intrinsic)


def schedule_float_gemm(sch: Any, blocking: GemmBlocking, lanes: int) -> None:
    """Schedule a GEMM with float activations, but for what fills its panels."""
    schedule_stages(sch)
    micro_kernel(sch, float_gemm_intrinsic(blocking.tile(lanes)), 4)

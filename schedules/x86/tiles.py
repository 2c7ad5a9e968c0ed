"""Tiles and steps of GEMMs on x86, chosen so that a tile stays in registers.

Accumulators, one weight vector per column vector and one broadcast fit 32 zmm or 16 ymm registers.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.tensorize.x86.dot import MADDUBS, DotInstruction
from apq_tvm.tensorize.x86.gemm import float_gemm_intrinsic

TALLEST = 5
"""Rows of x of the highest tile of kernels that decode a panel, which they may read at once."""

WASTE = 1.1
"""Columns computed for each that is wanted, up to which the best tile stays the best."""

Tiles = tuple[tuple[int, int], ...]
"""(rows of x, column vectors), the best first."""

WORD_TILES: Tiles = ((2, 4), (4, 2), (3, 3), (5, 2))
"""Of products of words: four vectors share a broadcast, and the activations that are widened."""


TALL_TILES: Tiles = ((5, 3), (5, 4), (4, 4), (4, 3), (3, 5))
"""Of 512-bit dot products over whole rows. The first two are as fast within 3 % (384 outputs by
1536, and 512 by 4608, on a Xeon of model 167): which of them repeats less is the best."""


def integer_tiles(instruction: DotInstruction, whole: bool) -> Tiles:
    """(rows, column vectors); grouped schemes hold an int32 and a float32 sum per element."""
    if instruction.rows == 16:
        return TALL_TILES if whole else ((4, 3), (5, 2), (3, 4), (4, 2))
    if instruction is not MADDUBS:
        return ((4, 3), (5, 2), (3, 3), (4, 2)) if whole else ((4, 2), (3, 2), (5, 1), (2, 3))
    # int16 sums besides: LLVM finishes one accumulator after the other, so that the eight weight
    # vectors of a unit want registers too.
    return ((4, 2), (2, 2), (3, 2), (2, 3)) if whole else ((2, 2), (4, 1), (3, 1), (1, 4))


def widened_tiles(whole: bool) -> Tiles:
    """Of ``vpmaddubsw`` whose results are widened one by one: no int16 sums.

    On Zen 3, 7 bits: 5 x 2 is 1.04 to 1.3 times as fast as 4 x 2 (384 outputs by 1536 and 128 by
    1152, of 128 and 784 rows), in groups of 32 4 x 1 is 1.3 times as fast as 2 x 2.
    """
    return ((5, 2), (4, 2), (3, 3), (5, 1)) if whole else ((4, 1), (4, 2), (5, 1), (3, 2))


def fitting_tiles(tiles: Tiles, blocks: int) -> Tiles:
    """The same, those first that repeat fewest of the weights' row `blocks`, where many would be.

    A panel past the last row block computes it again: of 64 outputs in panels of 48 a third of the
    work was for nothing. Narrow layers (the projections of convolution nets) get narrow panels.
    """

    def share(tile: tuple[int, int]) -> float:
        return -(-blocks // tile[1]) * tile[1] / blocks

    if share(tiles[0]) <= (1 if tiles is TALL_TILES else WASTE):
        return tiles
    narrow = tuple((TALLEST, v) for v in (1, 2) if v >= blocks and (TALLEST, v) not in tiles)
    return tuple(sorted((*tiles, *narrow), key=share))


def float_k_step(k: int, k_block: int, decide: Decide) -> int:
    """Decide columns of a step of a float GEMM: of those that divide K and its blocks."""
    return decide("k_step", tuple(s for s in (8, 4, 2, 1) if k % s == 0 and k_block % s == 0))


def decoded_blocking(
    k: int, padded: int, step: int, m_tiles: tuple[int, ...], decide: Decide
) -> GemmBlocking:
    """The decisions of a GEMM with float activations whose panels are decoded.

    Blocks of the `padded` K are multiples of `step`.
    """
    m_tile, vectors = decide("tile", ((4, 3), (5, 2), (3, 4)))
    k_block = even_block(padded, step, decide("k_block", (128, 64, 256, 512)))
    k_step = float_k_step(k, k_block, decide)
    return GemmBlocking(m_tile, vectors, k_step, k_block, decide("m_tiles", m_tiles))


def micro_kernel(sch: Any, intrinsic: str) -> None:
    """Give the products of a tile, all loops inside that over its steps, to an intrinsic."""
    block = sch.get_sblock("dot")
    sch.tensorize(sch.get_loops(block)[1 - len(sch.get(block).iter_vars)], intrinsic)


def schedule_float_gemm(sch: Any, blocking: GemmBlocking, lanes: int) -> None:
    """Schedule a GEMM with float activations, but for what fills its panels."""
    schedule_stages(sch)
    micro_kernel(sch, float_gemm_intrinsic(blocking.tile(lanes)))

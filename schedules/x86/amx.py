"""Large-M linear layers by AMX: their decisions, default schedule and kernel records.

A micro-kernel is 2 x 2 tiles of sums, which take 64 cycles a step for 64 k and load four tiles in
32. For 16 to 31 rows of x it is one row of three.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.ops.many_rows.tiles import TiledGemm, in_place
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import (
    check_all_features,
    check_int32,
    check_integer_acts,
    interleaved,
)
from apq_tvm.schedules.linear.gemm_stages import schedule_stages
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.tensorize.meaning.tile_registers import ROWS
from apq_tvm.tensorize.x86.amx import release_intrinsic, shapes_intrinsic, tile_intrinsic
from apq_tvm.types import DeviceProfile

AMX = Instruction("tdpbsud", ("amx-int8", "avx512f"), ROWS)

TILES = {32: (2, 1), 16: (3, 2, 1)}
"""Rows of x -> vectors of columns, the best first."""

SUMS_AT_ONCE = 4096
"""K above which sums wait in memory, so that a panel of codes stays in the second cache."""


def even_part(k: int, most: int) -> int:
    """The largest part of K in whole units that divides it, of `most` / 4 to `most`; else all."""
    units = k // UNIT_K
    parts = [p for p in range(most // (4 * UNIT_K), most // UNIT_K + 1) if units % p == 0]
    return k if units * UNIT_K <= most or not parts else parts[-1] * UNIT_K


def blocking(spec: LinearSpec, m_tile: int, decide: Decide) -> GemmBlocking:
    """The decisions: ``vectors``, ``k_block``, ``m_tiles`` (rows of a task)."""
    layout = interleaved(spec, ROWS)
    blocks = layout.row_blocks(spec.n)
    vectors = decide("vectors", tuple(v for v in TILES[m_tile] if v <= blocks))
    parts = dict.fromkeys(
        even_part(layout.padded_k(spec.k), most)
        for most in (SUMS_AT_ONCE, SUMS_AT_ONCE // 2, SUMS_AT_ONCE // 4, 2 * SUMS_AT_ONCE)
    )
    k_block = decide("k_block", tuple(parts))
    m_tiles = decide("m_tiles", (8, 4, 16, 2, 32))
    return GemmBlocking(m_tile, vectors, k_block, k_block, m_tiles)


def give(sch: Any, name: str, intrinsic: str) -> None:
    """Give all loops of a block to an intrinsic."""
    block = sch.get_sblock(name)
    sch.tensorize(sch.get_loops(block)[-len(sch.get(block).iter_vars)], intrinsic)


def tiled_kernel(bits: int, m_tile: int) -> LinearKernel:
    """The record of one integer GEMM by tiles."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer_acts(spec)
        check_all_features(profile, AMX.features, 4 * ROWS)
        check_int32(spec, ROWS)
        if interleaved(spec, ROWS).padded_groups(spec.k) > 1:
            raise NotApplicable(
                "is for one scale a row: sums of a group would leave the tiles at its end"
            )

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_stages(sch, unrolled=())
        layout, tile = interleaved(choice.spec, ROWS), choice.plan.tile(ROWS)
        single = choice.plan.k_block == layout.padded_k(choice.spec.k)
        dot = tile_intrinsic(tile, single, not in_place(layout))
        give(sch, "shapes", shapes_intrinsic(tile))
        give(sch, "release", release_intrinsic())
        if single:
            sch.tensorize(sch.get_sblock("dot_fresh"), dot)
        else:
            give(sch, "dot", dot)

    return LinearKernel(
        "gemm", f"W{bits}", 8, AMX, m_tile,
        check=check, layout=lambda spec, profile: interleaved(spec, ROWS),
        func=lambda choice: TiledGemm(
            choice.spec, interleaved(choice.spec, ROWS), choice.plan
        ).build(),
        schedule=schedule, ask=lambda spec, profile, decide: blocking(spec, m_tile, decide),
        bits=bits, m_named=m_tile,
    )  # fmt: skip


AMX_KERNELS: tuple[LinearKernel, ...] = tuple(
    tiled_kernel(bits, m_tile) for bits in range(1, 9) for m_tile in TILES
)
"""In order of preference."""

"""Default schedules of ``W2*`` layers on x86 and their kernel records."""

from __future__ import annotations

from functools import partial
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, BalanceLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.balance import BalanceGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.balance import check_balance, gemv_kernel, layout_of
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.schedules.linear.streams import M_TILES
from apq_tvm.schedules.x86.tiles import TALLEST, micro_kernel
from apq_tvm.tensorize.x86.balance import balance_intrinsic
from apq_tvm.tensorize.x86.balance_codes import (
    INSTRUCTIONS,
    MADDUBS,
    VNNI256,
    BalanceInstruction,
    digits_intrinsic,
)
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS as DOT_INSTRUCTIONS
from apq_tvm.tensorize.x86.gemm import Tile, integer_gemm_intrinsic
from apq_tvm.types import DeviceProfile

_K_BLOCKS = (256, 512, 384, 1024, 2048)

_PRODUCTS = {"vpermi2b": "vpdpbusd512"} | {
    name: name for name in ("vpdpbusd512", "vpdpbusd256", "maddubs")
}
"""Instruction that takes codes apart -> the one that multiplies digits."""

_DIGIT_BITS = 3


def gemm_blocking(
    spec: LinearSpec, layout: BalanceLayout, instruction: BalanceInstruction, decide: Decide
) -> GemmBlocking:
    """The decisions of a GEMM: ``tile``, ``k_block``, ``k_step``, ``m_tiles``, ``prefetch``."""
    group, kp = layout.group_width(spec.k), layout.padded_k(spec.k)
    whole = group == kp
    # Accumulators of three vectors, twice where groups add up in float32.
    tiles = {MADDUBS: (2, 1, 4), VNNI256: (4, 3, 2) if whole else (2, 3, 4)}
    m_tile = decide("tile", tiles.get(instruction, (4, 5, 3)))
    k_block = even_block(kp, max(UNIT_K, group if not whole else 0), decide("k_block", _K_BLOCKS))
    steps = [s for s in (32, 64, 128) if k_block % s == 0 and (whole or group % s == 0)]
    k_step = decide("k_step", tuple(steps))
    if whole and kp % k_step:
        k_step = UNIT_K
    m_tiles, ahead = decide("m_tiles", (32, 16, 64, 8)), decide("prefetch", (True, False))
    return GemmBlocking(m_tile, 3, k_step, k_block, m_tiles, ahead)


def gemm_kernel(instruction: BalanceInstruction) -> LinearKernel:
    """The record of one kernel that takes a panel's codes apart once for many rows of x."""
    lanes = instruction.lanes

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
        return gemm_blocking(spec, layout_of(spec, lanes), instruction, decide)

    def schedule(sch: Any, choice: Choice) -> None:
        bl: GemmBlocking = choice.plan
        schedule_stages(sch)
        digits = sch.get_loops(sch.get_sblock("digits"))
        sch.tensorize(digits[-4], digits_intrinsic(instruction))
        tile = Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)
        dot = next(i for i in DOT_INSTRUCTIONS if i.name == _PRODUCTS[instruction.name])
        micro_kernel(sch, integer_gemm_intrinsic(dot, tile, _DIGIT_BITS))

    features = tuple(f for names in instruction.features for f in names)
    return LinearKernel(
        "gemm",
        "W2star",
        8,
        Instruction(instruction.name, features, 3 * lanes),
        TALLEST,
        check=lambda spec, profile: check_balance(spec, profile, lanes, instruction.features),
        layout=lambda spec, profile: layout_of(spec, lanes),
        func=lambda c: BalanceGemm(c.spec, layout_of(c.spec, lanes), c.plan).build(),
        schedule=schedule,
        ask=ask,
        family="balance",
    )


GEMM_KERNELS: tuple[LinearKernel, ...] = tuple(map(gemm_kernel, INSTRUCTIONS))
"""In order of preference."""

GEMV_KERNELS: tuple[LinearKernel, ...] = tuple(
    gemv_kernel(
        instruction.name,
        instruction.lanes,
        instruction.features,
        partial(balance_intrinsic, instruction),
        m_tile,
    )
    for instruction in INSTRUCTIONS
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

BALANCE_KERNELS = (*GEMM_KERNELS, *GEMV_KERNELS)
"""In order of preference."""

"""Default schedules and search spaces of large-M linear layers on x86, and their kernel records.

A task's panel of decoded weights stays in L1, its activations in L2; the accumulators of a tile
stay in registers (`apq_tvm.schedules.x86.tiles`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, FloatLayout, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import IntegerGemm
from apq_tvm.ops.many_rows.float import DequantizedGemm, FloatGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.ops.many_rows.units import UnitGemm
from apq_tvm.ops.many_rows.words import WordGemm
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import (
    check_dequantized,
    check_features,
    check_float,
    check_integer,
    interleaved,
)
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.schedules.x86.instructions import FMA, MADDWD, dot_record
from apq_tvm.schedules.x86.tiles import (
    TALLEST,
    WORD_TILES,
    Tiles,
    decoded_blocking,
    fitting_tiles,
    integer_tiles,
    micro_kernel,
    schedule_float_gemm,
    widened_tiles,
)
from apq_tvm.tensorize.meaning.tile import Tile
from apq_tvm.tensorize.x86.dot import MADDUBS, MADDUBS_SUMS, VNNI256, VNNI512, DotInstruction
from apq_tvm.tensorize.x86.gemm import (
    dequantize_intrinsic,
    integer_gemm_intrinsic,
    unit_gemm_intrinsic,
    word_gemm_intrinsic,
)
from apq_tvm.types import DeviceProfile

FLOAT_M_TILES = (4, 2, 1)
"""Tiles of the float kernels; each needs that many rows."""


def panel_block(profile: DeviceProfile, columns: int) -> int:
    """K of a panel of bytes that takes three quarters of the first cache."""
    return profile.l1_bytes * 3 // 4 // columns // UNIT_K * UNIT_K


def integer_blocking(
    spec: LinearSpec,
    layout: InterleavedLayout,
    tiles: Callable[[bool], Tiles],
    decide: Decide,
    most: Callable[[int], int] = lambda columns: 256,
) -> GemmBlocking:
    """The decisions of an integer GEMM.

    ``tile``, ``k_block``, ``k_step``, ``m_tiles`` (rows of a task), ``prefetch``. `most` gives the
    default K of a panel of so many columns.
    """
    group, kp = layout.group_width(spec.k), layout.padded_k(spec.k)
    whole = group == kp
    m_tile, vectors = decide("tile", fitting_tiles(tiles(whole), layout.row_blocks(spec.n)))
    assert m_tile <= TALLEST  # what the kernel's record promises to be given
    step = UNIT_K if whole else max(UNIT_K, group)
    target = most(vectors * layout.rows)
    targets = dict.fromkeys((target, 256, 512, 384, 1024, 2048))
    k_block = even_block(kp, step, decide("k_block", tuple(targets)))
    steps = [s for s in (32, 64, 128) if k_block % s == 0 and (whole or group % s == 0)]
    k_step = decide("k_step", tuple(steps) if steps else (min(group, UNIT_K),))
    if whole and kp % k_step:
        k_step = UNIT_K
    m_tiles = decide("m_tiles", (32, 16, 64, 8))
    # A layer of one panel has nothing to ask for but what all its tasks use.
    several = layout.row_blocks(spec.n) > vectors
    ahead = decide("prefetch", (several, not several))
    return GemmBlocking(m_tile, vectors, k_step, k_block, m_tiles, ahead)


def float_blocking(spec: LinearSpec, lanes: int, m_tile: int, decide: Decide) -> GemmBlocking:
    """The decisions of a float GEMM whose M tile is fixed by the kernel."""
    blocks = -(-spec.n // lanes)
    wanted = decide("vectors", {4: (3, 2, 1), 2: (6, 4, 3), 1: (8, 4, 6, 12)}[m_tile])
    target = spec.k if m_tile == 1 else decide("k_block", (256, 128, 512, 1024))
    k_step = decide("k_step", tuple(s for s in (8, 4, 2, 1) if spec.k % s == 0))
    k_block = even_block(spec.k, k_step, target)
    m_tiles = 1 if m_tile == 1 else decide("m_tiles", (32, 16, 64, 8))
    return GemmBlocking(m_tile, min(wanted, blocks), k_step, k_block, m_tiles)


def integer_kernel(
    instruction: Instruction,
    bits: int,
    tiles: Callable[[bool], Tiles],
    intrinsic: Callable[[Tile], str],
    gemm: type[IntegerGemm] = IntegerGemm,
    in_place: Callable[[Tile], str] | None = None,
    weights: str = "",
    family: str = "int",
) -> LinearKernel:
    """The record of one integer GEMM; tiles are those of whole rows or of groups.

    `in_place` is the intrinsic for codes where they lie, in steps of whole units; `weights` and
    `family` are those of `LinearKernel`, for a family whose codes lie like integers.
    """
    lanes = instruction.lanes
    (features,) = (any_of.split("|") for any_of in instruction.features)

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer(spec, profile, tuple(features), lanes)

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
        layout = interleaved(spec, lanes)
        if in_place is None or layout.group_width(spec.k) < layout.padded_k(spec.k):
            return integer_blocking(spec, layout, tiles, decide)
        # Codes of 8 bits are read where they lie: a block costs its sums a way to memory and back.
        return integer_blocking(spec, layout, tiles, decide, partial(panel_block, profile))

    def way(choice: Choice) -> tuple[type[IntegerGemm], Callable[[Tile], str]]:
        bl, blocks = choice.plan, interleaved(choice.spec, lanes).row_blocks(choice.spec.n)
        if in_place is None or bl.k_step % UNIT_K or bl.vectors > blocks:
            return gemm, intrinsic
        return UnitGemm, in_place

    def func(choice: Choice) -> Any:
        made, _ = way(choice)
        return made(choice.spec, interleaved(choice.spec, lanes), choice.plan).build()

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_stages(sch)
        _, mine = way(choice)
        micro_kernel(sch, mine(choice.plan.tile(lanes)))

    return LinearKernel(
        "gemm", weights or f"W{bits}", 8, instruction, TALLEST,
        check=check, layout=lambda spec, profile: interleaved(spec, lanes),
        func=func, schedule=schedule, ask=ask, bits=bits, family=family,
    )  # fmt: skip


def dot_kernel(instruction: DotInstruction, bits: int) -> LinearKernel:
    """The record of a GEMM of bytes."""
    widened = instruction is MADDUBS and MADDUBS_SUMS[bits] == 1
    return integer_kernel(
        dot_record(instruction),
        bits,
        widened_tiles if widened else partial(integer_tiles, instruction),
        partial(integer_gemm_intrinsic, instruction, bits=bits),
        in_place=partial(unit_gemm_intrinsic, instruction) if bits == 8 else None,
    )


def dequantized_kernel(bits: int, lanes: int) -> LinearKernel:
    """The record of one GEMM with float activations and integer weights."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_dequantized(spec, profile, FMA[lanes].features, lanes)

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
        padded = interleaved(spec, lanes).padded_k(spec.k)
        return decoded_blocking(spec.k, padded, UNIT_K, (32, 16, 64, 8), decide)

    def func(choice: Choice) -> Any:
        return DequantizedGemm(choice.spec, interleaved(choice.spec, lanes), choice.plan).build()

    def schedule(sch: Any, choice: Choice) -> None:
        schedule_float_gemm(sch, choice.plan, lanes)
        halves = interleaved(choice.spec, lanes).group_size == 16
        for block in ("convert0", "convert1") if halves else ("convert0",):
            sch.tensorize(sch.get_loops(sch.get_sblock(block))[-2], dequantize_intrinsic(lanes))

    return LinearKernel(
        "gemm", f"W{bits}", 16, FMA[lanes], TALLEST,
        check=check, layout=lambda spec, profile: interleaved(spec, lanes),
        func=func, schedule=schedule, ask=ask, bits=bits,
    )  # fmt: skip


def float_kernel(lanes: int, m_tile: int) -> LinearKernel:
    """The record of one float32 linear kernel."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_float(spec)
        check_features(profile, FMA[lanes].features, lanes)

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
        return float_blocking(spec, lanes, m_tile, decide)

    return LinearKernel(
        "gemm", "F32", 0, FMA[lanes], m_tile,
        check=check, layout=lambda spec, profile: FloatLayout(lanes),
        func=lambda choice: FloatGemm(choice.spec, FloatLayout(lanes), choice.plan).build(),
        schedule=lambda sch, choice: schedule_float_gemm(sch, choice.plan, lanes),
        ask=ask, m_named=m_tile,
    )  # fmt: skip


GEMM_KERNELS: tuple[LinearKernel, ...] = (
    *(dot_kernel(dot, bits) for dot in (VNNI512, VNNI256) for bits in range(1, 9)),
    *(dot_kernel(MADDUBS, bits) for bits in range(1, 8)),
    integer_kernel(MADDWD, 8, lambda whole: WORD_TILES, word_gemm_intrinsic, WordGemm),
    *(dequantized_kernel(bits, lanes) for lanes in (16, 8) for bits in range(1, 9)),
    *(float_kernel(lanes, m_tile) for lanes in (16, 8) for m_tile in FLOAT_M_TILES),
)
"""In order of preference."""

"""Default schedules and search spaces of large-M linear layers on x86, and their kernel records.

A task's panel of decoded weights stays in L1, its activations in L2; the accumulators of a tile
stay in registers. Tiles below are chosen so that accumulators, one weight vector per column vector
and one broadcast fit 32 zmm or 16 ymm registers.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, FloatLayout, InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gemm import integer_gemm
from apq_tvm.ops.gemm_float import dequantized_gemm, float_gemm
from apq_tvm.ops.gemm_task import STAGES, GemmBlocking
from apq_tvm.ops.linear_spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear_checks import (
    check_dequantized,
    check_features,
    check_integer,
    interleaved,
)
from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.tensorize.x86_dot import INSTRUCTIONS, MADDUBS, DotInstruction
from apq_tvm.tensorize.x86_gemm import (
    Tile,
    dequantize_intrinsic,
    float_gemm_intrinsic,
    integer_gemm_intrinsic,
    splits_codes,
)
from apq_tvm.types import DeviceProfile

M_MIN = 5
"""Fewest rows of x of the kernels that decode a panel: measured; no tile of theirs is higher."""

FLOAT_M_TILES = (4, 2, 1)
"""Tiles of the float kernels; each needs that many rows."""


_TILE_STAGES = ("load", "wait", "start", "sum", "spill", "store")

_Tiles = tuple[tuple[int, int], ...]


def _even_block(k: int, step: int, target: int) -> int:
    """About `target` of K, a multiple of `step`, so that K falls into blocks of nearly one size."""
    steps = -(-k // step)
    blocks = -(-steps // max(1, target // step))
    return -(-steps // blocks) * step


def _integer_tiles(instruction: DotInstruction, whole: bool, bits: int) -> _Tiles:
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


def integer_blocking(
    spec: LinearSpec, layout: InterleavedLayout, instruction: DotInstruction, decide: Decide
) -> GemmBlocking:
    """The decisions of an integer GEMM.

    ``tile``, ``k_block``, ``k_step``, ``m_tiles`` (rows of a task), ``prefetch``.
    """
    group, kp = layout.group_width(spec.k), layout.padded_k(spec.k)
    whole = group == kp
    m_tile, vectors = decide("tile", _integer_tiles(instruction, whole, layout.bits))
    step = UNIT_K if whole else max(UNIT_K, group)
    k_block = _even_block(kp, step, decide("k_block", (256, 512, 384, 1024, 2048)))
    steps = [s for s in (32, 64, 128) if k_block % s == 0 and (whole or group % s == 0)]
    k_step = decide("k_step", tuple(steps) if steps else (min(group, UNIT_K),))
    if whole and kp % k_step:
        k_step = UNIT_K
    m_tiles, ahead = decide("m_tiles", (32, 16, 64, 8)), decide("prefetch", (True, False))
    return GemmBlocking(m_tile, vectors, k_step, k_block, m_tiles, ahead)


def _float_k_step(k: int, k_block: int, decide: Decide) -> int:
    return decide("k_step", tuple(s for s in (8, 4, 2, 1) if k % s == 0 and k_block % s == 0))


def dequantized_blocking(
    spec: LinearSpec, layout: InterleavedLayout, decide: Decide
) -> GemmBlocking:
    """The decisions of a GEMM with float activations and integer weights."""
    m_tile, vectors = decide("tile", ((4, 3), (5, 2), (3, 4)))
    k_block = _even_block(layout.padded_k(spec.k), UNIT_K, decide("k_block", (128, 64, 256, 512)))
    k_step = _float_k_step(spec.k, k_block, decide)
    return GemmBlocking(m_tile, vectors, k_step, k_block, decide("m_tiles", (32, 16, 64, 8)))


def float_blocking(spec: LinearSpec, lanes: int, m_tile: int, decide: Decide) -> GemmBlocking:
    """The decisions of a float GEMM whose M tile is fixed by the kernel."""
    blocks = -(-spec.n // lanes)
    wanted = decide("vectors", {4: (3, 2, 1), 2: (6, 4, 3), 1: (8, 4, 6, 12)}[m_tile])
    target = spec.k if m_tile == 1 else decide("k_block", (256, 128, 512, 1024))
    k_step = decide("k_step", tuple(s for s in (8, 4, 2, 1) if spec.k % s == 0))
    k_block = _even_block(spec.k, k_step, target)
    m_tiles = 1 if m_tile == 1 else decide("m_tiles", (32, 16, 64, 8))
    return GemmBlocking(m_tile, min(wanted, blocks), k_step, k_block, m_tiles)


def _schedule_stages(sch: Any) -> None:
    """Parallel tasks; every stage a vector wide, those of a tile unrolled into registers."""
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    stages = [str(name) for name in sch.get(sch.get_sblock("root")).annotations[STAGES]]
    for name in stages:
        *_, lane = loops = sch.get_loops(sch.get_sblock(name))
        sch.vectorize(lane)
        if name.startswith(_TILE_STAGES):
            for loop in loops[:-1]:
                sch.unroll(loop)
        elif name.startswith("decode"):
            sch.unroll(loops[-2])


def _micro_kernel(sch: Any, intrinsic: str, axes: int) -> None:
    loops = sch.get_loops(sch.get_sblock("dot"))
    sch.tensorize(loops[-axes], intrinsic)


def integer_kernel(instruction: DotInstruction, bits: int) -> LinearKernel:
    """The record of one integer GEMM."""
    lanes = instruction.rows

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer(spec, profile, bits, instruction.features, lanes)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = interleaved(spec, lanes)
        blocking = integer_blocking(spec, layout, instruction, decide)
        return integer_gemm(spec, layout, blocking, splits_codes(instruction, bits))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        bl = integer_blocking(spec, interleaved(spec, lanes), instruction, decide)
        _schedule_stages(sch)
        tile = Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)
        _micro_kernel(sch, integer_gemm_intrinsic(instruction, tile, bits), 5)

    name = f"gemm_W{bits}A8_{instruction.name}_r{lanes}"
    return LinearKernel(
        name, M_MIN, -1, check, lambda spec, _: interleaved(spec, lanes), func, schedule, bits
    )


_FMA = {8: ("fma", "avx2"), 16: ("avx512f", "avx512vnni")}


def dequantized_kernel(bits: int, lanes: int) -> LinearKernel:
    """The record of one GEMM with float activations and integer weights."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_dequantized(spec, profile, bits, _FMA[lanes], lanes)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = interleaved(spec, lanes)
        return dequantized_gemm(spec, layout, dequantized_blocking(spec, layout, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        bl = dequantized_blocking(spec, interleaved(spec, lanes), decide)
        _schedule_stages(sch)
        halves = interleaved(spec, lanes).group_size == 16
        for block in ("convert0", "convert1") if halves else ("convert0",):
            sch.tensorize(sch.get_loops(sch.get_sblock(block))[-2], dequantize_intrinsic(lanes))
        _micro_kernel(sch, float_gemm_intrinsic(Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)), 4)

    name = f"gemm_W{bits}A16_fma_r{lanes}"
    return LinearKernel(
        name, M_MIN, -1, check, lambda spec, _: interleaved(spec, lanes), func, schedule, bits
    )


def float_kernel(lanes: int, m_tile: int) -> LinearKernel:
    """The record of one float32 linear kernel."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        if spec.scheme is not None:
            raise NotApplicable(f"is for float32 weights, not {spec.scheme}")
        check_features(profile, _FMA[lanes], lanes)

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        return float_gemm(spec, FloatLayout(lanes), float_blocking(spec, lanes, m_tile, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        bl = float_blocking(spec, lanes, m_tile, decide)
        _schedule_stages(sch)
        _micro_kernel(sch, float_gemm_intrinsic(Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)), 4)

    return LinearKernel(
        f"gemm_F32_fma_r{lanes}m{m_tile}",
        m_tile,
        -1,
        check,
        lambda spec, _: FloatLayout(lanes),
        func,
        schedule,
    )


GEMM_KERNELS: tuple[LinearKernel, ...] = (
    *(integer_kernel(instruction, bits) for instruction in INSTRUCTIONS for bits in range(1, 9)),
    *(dequantized_kernel(bits, lanes) for lanes in (16, 8) for bits in range(1, 9)),
    *(float_kernel(lanes, m_tile) for lanes in (16, 8) for m_tile in FLOAT_M_TILES),
)
"""In order of preference."""

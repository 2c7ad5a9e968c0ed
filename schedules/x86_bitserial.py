"""Bit-serial linear layers on x86: their schedules, preparation and kernel records.

The loops are those of `apq_tvm.schedules.x86_gemv`; the decisions ``streams``, ``ahead`` and
``unroll`` mean the same there.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.bitserial import bitserial_blocking, bitserial_linear
from apq_tvm.ops.linear import Blocking, LinearSpec, unit_of
from apq_tvm.ops.quantize_planes import quantize_planes
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear_checks import check_integer, interleaved
from apq_tvm.schedules.linear_kernel import LinearKernel, Preparation
from apq_tvm.schedules.quantize import ELEMENTS_PER_TASK, group_suffixes, schedule_group
from apq_tvm.schedules.x86_gemv import schedule_gemv
from apq_tvm.tensorize.x86_bitserial import (
    INSTRUCTIONS,
    PopcountInstruction,
    bitserial_intrinsic,
)
from apq_tvm.tensorize.x86_dot import INSTRUCTIONS as DOT_INSTRUCTIONS
from apq_tvm.tensorize.x86_pack_planes import pack_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share the planes of weights."""

FASTER_UP_TO: dict[tuple[str, int], dict[int, int]] = {
    ("vpopcntd", 1): {1: 4},
    ("vpopcntd", 2): {1: 4, 2: 4},
    ("vpopcntd", 4): {1: 4, 2: 2},
    ("pshufb", 1): {1: 3, 2: 1},
    ("pshufb", 2): {1: 2, 2: 1},
    ("pshufb", 4): {1: 2, 2: 1},
}
"""(instruction, row tile) -> {q: largest p that is faster than the integer dot product}.

Time of the integer dot product over ours, both with the quantization of activations; 4096x4096, one
scale per row, out of cache, one thread of a Zen 5, vpopcntd beside vpdpbusd on 512 bits and pshufb
beside vpmaddubsw (code for Zen 3):

    =====  ========  ====================  ====================
    q      M         vpopcntd, p = 1 .. 4  pshufb, p = 1 .. 4
    =====  ========  ====================  ====================
    1      1         1.3  1.2  1.2  1.2    2.6  2.7  1.3  1.0
    1      2         4.5  5.0  4.7  4.0    2.7  2.4  1.0  0.8
    1      8         4.8  3.6  2.0  1.5    2.5  2.2  0.8  0.6
    1      64        4.6  3.2  1.7  1.3    2.4  2.1  0.8  0.6
    2      1         0.8  1.0  0.2  0.3    1.0  0.9  0.5  0.4
    2      2         2.1  2.2  1.8  1.5    1.1  1.0  0.5  0.4
    2      8         1.6  1.6  0.9  0.6    1.2  1.1  0.4  0.2
    2      64        2.0  1.8  0.8  0.3    1.6  0.8  0.3  0.3
    =====  ========  ====================  ====================

W3 was measured on a busy machine only: M = 8, p = 1 gave 0.9 to 1.4 and 0.7, p = 2 less than 1.
"""

_M_MAX = {1: 1, 2: 3, 4: -1}
"""Row tile -> most rows of x: beyond, the next tile or the integer dot product takes over."""

_MANY_PAIRS = 16
"""Pairs of planes from which on one unit is code enough for an intrinsic."""

_TASKS = 8
_PARALLEL = 1 << 16


def check_possible(
    spec: LinearSpec, profile: DeviceProfile, instruction: PopcountInstruction, bits: int
) -> None:
    """Decline what bit-serial kernels with `instruction` cannot compute on the device.

    Raises
    ------
    NotApplicable
    """
    check_integer(spec, profile, bits, instruction.features, instruction.rows)
    assert spec.scheme is not None
    if spec.scheme.group_size == 16:
        raise NotApplicable("groups of 16 are half of the 32 bits that are counted at once")
    # All kernels of a layer read one layout: that of the device's integer dot product.
    dot = next(
        (
            d
            for d in DOT_INSTRUCTIONS
            if profile.features & set(d.features) and profile.vector_bytes >= 4 * d.rows
        ),
        None,
    )
    if dot is not None and dot.rows != instruction.rows:
        raise NotApplicable(
            f"counts in {instruction.rows} rows; {dot.name} wants the weights in {dot.rows}"
        )


def check_faster(spec: LinearSpec, instruction: PopcountInstruction, m_tile: int) -> None:
    """Decline where the integer dot product of the same layout was measured to be faster.

    Raises
    ------
    NotApplicable
    """
    assert spec.scheme is not None
    q, p = spec.scheme.bits, spec.scheme.act_bits
    most = FASTER_UP_TO[instruction.name, m_tile].get(q, 0)
    if p > most:
        raise NotApplicable(
            f"integer dot is faster from q*p >= {q * (most + 1)} on at W{q}, measured with "
            f"{instruction.name}; this is {q}*{p}"
        )


def _layout(spec: LinearSpec, instruction: PopcountInstruction) -> InterleavedLayout:
    return interleaved(spec, instruction.rows)


def _units(spec: LinearSpec, layout: InterleavedLayout, instruction: PopcountInstruction) -> int:
    """Units one intrinsic sums: the most that divide a group, one of many planes."""
    assert spec.scheme is not None
    units = Blocking.of(layout, spec.n, spec.k, 1, 1).units
    most = instruction.units if spec.scheme.bits * spec.scheme.act_bits <= _MANY_PAIRS else 1
    return max(u for u in range(1, most + 1) if units % u == 0)


def _streams(decide: Decide, layout: InterleavedLayout, spec: LinearSpec, m_tile: int) -> int:
    if m_tile == 1:
        choices: tuple[int, ...] = (2, 1, 4)
    else:
        choices = (1, 2)
    blocks = layout.row_blocks(spec.n)
    possible = [s for s in choices if s <= blocks]
    # Narrow layers keep work for every core rather than many streams.
    return decide("streams", tuple(sorted(possible, key=lambda s: blocks < _TASKS * s)))


def prepare_planes(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
    """``(planes, xs, xsum)`` of `apq_tvm.ops.quantize_planes`."""
    scheme = spec.scheme
    assert scheme is not None
    groups = (scheme.act_group, scheme.group_size)
    named = "_".join(f"g{group}" if group > 0 else "row" for group in groups)
    rows = max(1, ELEMENTS_PER_TASK // spec.k)
    func = quantize_planes(spec.k, *groups, rows, scheme.act_bits)
    return Preparation(f"quantize_planes_k{spec.k}_{named}_A{scheme.act_bits}", func)


def schedule_planes(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule the quantization to planes: one group at a time in registers."""
    sch = s_tir.Schedule(func)
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    bits = int(func.params[1].shape[1])
    unroll = decide("unroll", (4, 2, 1))
    for suffix in group_suffixes(sch):
        pack = sch.get_sblock(f"pack{suffix}")
        loops = sch.get_loops(pack)[-2 if bits > 1 else -1 :]
        init = sch.decompose_reduction(pack, loops[0])
        if bits > 1:
            sch.unroll(sch.get_loops(init)[-1])
        sch.tensorize(loops[0], pack_intrinsic(bits))
        schedule_group(sch, suffix, unroll, ("sign",) if bits == 1 else ())
    return sch.mod["main"]


def bitserial_kernel(
    instruction: PopcountInstruction, bits: int, m_tile: int, forced: bool = False
) -> LinearKernel:
    """The record of one kernel for M >= m_tile and activations of any integer bits.

    Parameters
    ----------
    instruction : PopcountInstruction
    bits : int
        Of a weight.
    m_tile : int
    forced : bool
        True takes every layer it can, also where another kernel is faster.
    """

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_possible(spec, profile, instruction, bits)
        if not forced:
            check_faster(spec, instruction, m_tile)

    def blocking(spec: LinearSpec, decide: Decide) -> tuple[Blocking, int]:
        layout = _layout(spec, instruction)
        units = _units(spec, layout, instruction)
        streams = _streams(decide, layout, spec, m_tile)
        return bitserial_blocking(spec, layout, m_tile, streams, units), units

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        bl, units = blocking(spec, decide)
        return bitserial_linear(spec, _layout(spec, instruction), m_tile, bl.streams, units)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        assert spec.scheme is not None
        bl, units = blocking(spec, decide)
        unit = unit_of(_layout(spec, instruction))
        # 512-bit vectors pass so fast that the hardware's own prefetches do better.
        wide = instruction.rows == 16 and m_tile == 1
        ahead = decide("ahead", (0, 4096, 2048, 8192) if wide else (4096, 0, 2048, 8192))
        intrinsic = bitserial_intrinsic(
            instruction, unit, spec.scheme.act_bits, units, m_tile, ahead
        )
        unrolls = (1, 2, 4) if wide else (4, 2, 1)
        unroll = decide("unroll", tuple(u for u in unrolls if bl.units % u == 0))
        whole, parallel = spec.n % instruction.rows == 0, spec.n * spec.k >= _PARALLEL
        schedule_gemv(sch, bl, intrinsic, whole, unroll, parallel)

    return LinearKernel(
        f"bitserial_W{bits}_{instruction.name}_r{instruction.rows}m{m_tile}",
        m_tile,
        _M_MAX[m_tile],
        check,
        lambda spec, _: _layout(spec, instruction),
        func,
        schedule,
        bits,
        prepare=prepare_planes,
    )


def _kernels(forced: bool) -> tuple[LinearKernel, ...]:
    return tuple(
        bitserial_kernel(instruction, bits, m_tile, forced)
        for instruction in INSTRUCTIONS
        for bits in range(1, 9)
        for m_tile in M_TILES
    )


BITSERIAL_KERNELS: tuple[LinearKernel, ...] = _kernels(False)
"""In order of preference, before the integer dot products: they decline where those are faster."""

FORCED_KERNELS: tuple[LinearKernel, ...] = _kernels(True)
"""The same by name, for every layer they can compute: to measure them, or because a user asks."""

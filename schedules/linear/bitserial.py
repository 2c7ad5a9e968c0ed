"""Bit-serial linear layers: their schedules, preparation and kernel records, for any CPU.

The loops are those of `apq_tvm.schedules.x86.gemv`; the decisions ``streams``, ``ahead`` and
``unroll`` mean the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tvm import s_tir

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.planes import quantize_planes
from apq_tvm.ops.few_rows.bitserial import bitserial_blocking, bitserial_linear
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_integer, interleaved
from apq_tvm.schedules.linear.gemv import schedule_gemv
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation, legacy
from apq_tvm.schedules.linear.quantize import ELEMENTS_PER_TASK, group_suffixes, schedule_group
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.tensorize.arm import bitserial as arm_bitserial
from apq_tvm.tensorize.x86 import pack_planes as x86_pack_planes
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS as DOT_INSTRUCTIONS
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share the planes of weights."""

_M_MAX = {1: 1, 2: 3, 4: -1}
"""Row tile -> most rows of x: beyond, the next tile or the integer dot product takes over."""

_MANY_PAIRS = 16
"""Pairs of planes from which on one unit is code enough for an intrinsic."""

_PARALLEL = 1 << 16


class Popcount(Protocol):
    """How set bits are counted: an instruction of `apq_tvm.tensorize`."""

    @property
    def name(self) -> str:
        """First part of the intrinsics' names."""

    @property
    def rows(self) -> int:
        """R of the layout."""

    @property
    def features(self) -> tuple[str, ...]:
        """LLVM features it needs, any one of them."""

    @property
    def units(self) -> int:
        """Most units that one intrinsic call should sum."""


Intrinsic = Callable[..., str]
"""(instruction, unit, planes, units, m, ahead) → registered name."""


def check_possible(
    spec: LinearSpec, profile: DeviceProfile, instruction: Popcount, bits: int
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


def _layout(spec: LinearSpec, instruction: Popcount) -> InterleavedLayout:
    return interleaved(spec, instruction.rows)


def _units(spec: LinearSpec, layout: InterleavedLayout, instruction: Popcount) -> int:
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
    return choose_streams(decide, choices, layout.row_blocks(spec.n))


def prepare_planes(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
    """``(planes, xs, xsum)`` of `apq_tvm.ops.activations.planes`."""
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
    arm = profile.arch == "aarch64"
    pack = arm_bitserial.pack_intrinsic if arm else x86_pack_planes.pack_intrinsic
    for suffix in group_suffixes(sch):
        block = sch.get_sblock(f"pack{suffix}")
        loops = sch.get_loops(block)[-2 if bits > 1 else -1 :]
        init = sch.decompose_reduction(block, loops[0])
        if bits > 1:
            sch.unroll(sch.get_loops(init)[-1])
        sch.tensorize(loops[0], pack(bits))
        schedule_group(sch, suffix, unroll, ("sign",) if bits == 1 else ())
    return sch.mod["main"]


def bitserial_kernel(
    instruction: Popcount,
    intrinsic: Intrinsic,
    bits: int,
    m_tile: int,
    aheads: tuple[int, ...],
    faster: Callable[[LinearSpec], None] | None = None,
) -> LinearKernel:
    """The record of one kernel for M >= m_tile and activations of any integer bits.

    Parameters
    ----------
    instruction : Popcount
    intrinsic : callable
        Registers what it makes of a few units.
    bits : int
        Of a weight.
    m_tile : int
    aheads : tuple of int
        Software prefetch distances to try, in bytes.
    faster : callable, optional
        Declines layers for which another kernel is faster; without it every possible one is taken.
    """

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_possible(spec, profile, instruction, bits)
        if faster is not None:
            faster(spec)

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
        unit = _layout(spec, instruction).unit
        wide = instruction.rows == 16 and m_tile == 1
        ahead = decide("ahead", aheads)
        product = intrinsic(instruction, unit, spec.scheme.act_bits, units, m_tile, ahead)
        unrolls = (1, 2, 4) if wide or instruction.rows == 4 else (4, 2, 1)
        unroll = decide("unroll", tuple(u for u in unrolls if bl.units % u == 0))
        whole, parallel = spec.n % instruction.rows == 0, spec.n * spec.k >= _PARALLEL
        schedule_gemv(sch, bl, product, whole, unroll, parallel)

    return legacy(
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

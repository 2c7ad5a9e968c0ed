"""Bit-serial linear layers: their schedules, preparation and kernel records, for any CPU.

The loops are those of `apq_tvm.schedules.x86.gemv`; the decisions ``streams``, ``ahead`` and
``unroll`` mean the same there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.schedules.linear.quantize import group_suffixes, schedule_group, task_rows
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.tensorize.pairs.bitserial import Popcount
from apq_tvm.types import DeviceProfile

_MANY_PAIRS = 16
"""Pairs of planes from which on one unit is code enough for an intrinsic."""

Check = Callable[[LinearSpec, DeviceProfile], None]


def check_possible(spec: LinearSpec, profile: DeviceProfile, instruction: Popcount) -> None:
    """Decline what bit-serial kernels with `instruction` cannot compute on the device.

    Raises
    ------
    NotApplicable
    """
    check_integer(spec, profile, instruction.features, instruction.rows)
    assert spec.scheme is not None
    if spec.scheme.group_size == 16:
        raise NotApplicable("groups of 16 are half of the 32 bits that are counted at once")
    if _layout(spec, instruction).whole:
        raise NotApplicable("planes are cut from fields of bits; these codes lie whole in bytes")


def _layout(spec: LinearSpec, instruction: Popcount) -> InterleavedLayout:
    return interleaved(spec, instruction.rows)


def _units(spec: LinearSpec, layout: InterleavedLayout, instruction: Popcount) -> int:
    """Units one intrinsic sums: the most that divide a group, one of many planes."""
    assert spec.scheme is not None
    units = Blocking.of(layout, spec.n, spec.k, 1, 1).units
    most = instruction.units if spec.scheme.bits * spec.scheme.act_bits <= _MANY_PAIRS else 1
    return max(u for u in range(1, most + 1) if units % u == 0)


def prepare_planes(choice: Choice, instruction: Popcount) -> Preparation:
    """``(planes, xs, xsum)`` of `apq_tvm.ops.activations.planes`."""
    spec, scheme = choice.spec, choice.spec.scheme
    assert scheme is not None
    groups = (scheme.act_group, scheme.group_size)
    named = "_".join(f"g{group}" if group > 0 else "row" for group in groups)
    bits = scheme.act_bits

    def make(decide: Decide) -> Any:
        return quantize_planes(spec.k, *groups, task_rows(spec.k, decide), bits)

    key = f"quantize_planes_k{spec.k}_{named}_A{bits}"
    return Preparation(key, make, schedule=planes_schedule(instruction))


def planes_schedule(instruction: Popcount) -> Callable[[Any, DeviceProfile, Decide], Any]:
    """The schedule of the quantization to planes, packed by an instruction set."""

    def schedule(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
        """One group at a time in registers."""
        sch = s_tir.Schedule(func)
        (task,) = sch.get_loops(sch.get_sblock("task"))
        sch.parallel(task)
        bits = int(func.params[1].shape[1])
        unroll = decide("unroll", (4, 2, 1))
        for suffix in group_suffixes(sch):
            block = sch.get_sblock(f"pack{suffix}")
            loops = sch.get_loops(block)[-2 if bits > 1 else -1 :]
            init = sch.decompose_reduction(block, loops[0])
            if bits > 1:
                sch.unroll(sch.get_loops(init)[-1])
            sch.tensorize(loops[0], instruction.pack(bits))
            schedule_group(sch, suffix, unroll, ("sign",) if bits == 1 else ())
        return sch.mod["main"]

    return schedule


def bitserial_kernel(
    instruction: Popcount,
    bits: int,
    m_tile: int,
    aheads: tuple[int, ...],
    check: Check | None = None,
) -> LinearKernel:
    """The record of one kernel for M >= m_tile and activations of any integer bits.

    `apq_tvm.schedules.linear.thresholds` knows where the integer dot product is faster.

    Parameters
    ----------
    instruction : Popcount
    bits : int
        Of a weight.
    m_tile : int
    aheads : tuple of int
        Software prefetch distances to try, in bytes.
    check : callable, optional
        Declines more layers.
    """

    def declines(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_possible(spec, profile, instruction)
        if spec.asymmetric:
            raise NotApplicable("planes of activations have no zero point; is for fewer bits")
        if check is not None:
            check(spec, profile)

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> tuple[Blocking, int]:
        layout = _layout(spec, instruction)
        units = _units(spec, layout, instruction)
        choices = (2, 1, 4) if m_tile == 1 else (1, 2)
        streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
        bl = bitserial_blocking(spec, layout, m_tile, streams, units)
        decide("ahead", aheads)
        wide = instruction.rows == 16 and m_tile == 1
        unrolls = (1, 2, 4) if wide or instruction.rows == 4 else (4, 2, 1)
        decide("unroll", tuple(u for u in unrolls if bl.units % u == 0))
        return bl, units

    def func(choice: Choice) -> Any:
        layout = _layout(choice.spec, instruction)
        return bitserial_linear(choice.spec, layout, *choice.plan)

    def schedule(sch: Any, choice: Choice) -> None:
        spec, (bl, units) = choice.spec, choice.plan
        assert spec.scheme is not None
        unit = _layout(spec, instruction).unit
        product = instruction.dot(unit, spec.scheme.act_bits, units, m_tile, choice["ahead"])
        schedule_gemv(sch, choice, bl, product, spec.n % instruction.rows == 0)

    return LinearKernel(
        "bitserial",
        f"W{bits}",
        0,
        Instruction(instruction.name, instruction.features, instruction.rows),
        m_tile,
        check=declines,
        layout=lambda spec, _: _layout(spec, instruction),
        func=func,
        schedule=schedule,
        ask=ask,
        prepare=lambda choice: prepare_planes(choice, instruction),
        bits=bits,
        m_named=m_tile,
    )

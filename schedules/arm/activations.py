"""Default schedule of the quantization of activations on 64-bit Arm."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.quantize import has_block, schedule_normalization
from apq_tvm.tensorize.arm.round import round_intrinsic, sum_intrinsic, tree_intrinsic
from apq_tvm.tensorize.pairs.reduce import reduce_intrinsic
from apq_tvm.types import DeviceProfile

_SUFFIXES = ("", "_rest", "_tail")


def schedule_bundles(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.activations.bundles.quantize_bundles`: a rule of `schedules.rules`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``unroll``: vectors of codes per iteration where a group has several.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    sch = s_tir.Schedule(func)
    unroll = decide("unroll", (4, 2, 1, 8))
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    schedule_normalization(sch)
    bits = int(func.attrs["apq.bits"])
    for suffix in _SUFFIXES:
        if has_block(sch, f"largest{suffix}"):
            _schedule_scales(sch, suffix, unroll)
            _schedule_codes(sch, suffix, unroll, bits, "dotprod" in profile.features)
    return sch.mod["main"]


def _schedule_scales(sch: Any, suffix: str, unroll: int) -> None:
    largest = sch.get_sblock(f"largest{suffix}")
    chunk, group, lane = sch.get_loops(largest)[-3:]
    many, lanes = int(sch.get(group).extent), int(sch.get(lane).extent)
    sch.vectorize(lane)  # before its init leaves it: then it is no reduction block any more
    init = sch.decompose_reduction(largest, chunk)
    for block in (largest, init):
        sch.unroll(sch.get_loops(block)[-2])
    _unroll_part(sch, chunk, max(1, 2 * unroll // many))
    _tensorize_tree(sch, f"top{suffix}", "max", many, lanes)
    factors = sch.get_loops(sch.get_sblock(f"factors{suffix}"))[-1]
    if many > 1:
        sch.vectorize(sch.split(factors, [None, many])[1])


def _schedule_codes(sch: Any, suffix: str, unroll: int, bits: int, dotprod: bool) -> None:
    *_, group, lane = sch.get_loops(sch.get_sblock(f"clear{suffix}"))
    many = int(sch.get(group).extent)
    sch.vectorize(lane)
    sch.unroll(group)
    sch.tensorize(sch.get_loops(sch.get_sblock(f"round{suffix}"))[-1], round_intrinsic(bits))
    dot = sch.get_sblock(f"dot{suffix}")
    sch.tensorize(sch.get_loops(dot)[-2], sum_intrinsic(dotprod))
    _tensorize_tree(sch, f"total{suffix}", "add", many, 4)
    chunk, group = sch.get_loops(sch.get_sblock(f"chunk{suffix}"))
    sch.unroll(group)
    _unroll_part(sch, chunk, unroll)


def _tensorize_tree(sch: Any, name: str, operation: str, many: int, lanes: int) -> None:
    block = sch.get_sblock(name)
    loop = sch.get_loops(block)[-1]
    if many > 1:
        sch.tensorize(loop, tree_intrinsic(operation))
    else:
        sch.decompose_reduction(block, loop)
        sch.tensorize(loop, reduce_intrinsic(operation, lanes))


def _unroll_part(sch: Any, loop: Any, most: int) -> None:
    """Unroll the largest divisor up to `most` of a loop."""
    extent = int(sch.get(loop).extent)
    sch.unroll(sch.split(loop, [None, max(f for f in range(1, most + 1) if extent % f == 0)])[1])

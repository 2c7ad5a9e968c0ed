"""Default schedule of the quantization of activations: one group at a time in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import s_tir

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.bundles import quantize_bundles
from apq_tvm.ops.activations.group_bundles import (
    GroupBundles,
    quantize_group_bundles,
    takes_group_bundles,
)
from apq_tvm.ops.activations.normalize import OP, Normalize
from apq_tvm.ops.activations.quantize import quantize_activations
from apq_tvm.ops.activations.row_bundles import RowBundles, quantize_row_bundles, takes_bundles
from apq_tvm.ops.activations.windows import SCRATCH
from apq_tvm.ops.activations.windows_lines import LineWindows
from apq_tvm.ops.activations.windows_strips import StripWindows
from apq_tvm.schedules.decide import Decide, Defaults
from apq_tvm.tensorize.pairs.reduce import reduce_intrinsic
from apq_tvm.tensorize.pairs.tree import tree_of_rows
from apq_tvm.types import DeviceProfile

TASKS = (16384, 4096, 65536)
"""Activations in a parallel task: a few microseconds, what a launch costs at least."""

WINDOWS = (SCRATCH, 2048, 8192, 16384)
"""float32 of windows in a parallel task."""

LANES = (32, 16)
"""Columns in a vector."""


def task_rows(k: int, decide: Decide) -> int:
    """Rows of `k` activations in a parallel task; ``task``: how many activations it has."""
    return max(1, decide("task", TASKS) // k)


def in_bundles(profile: DeviceProfile, bits: int, asymmetric: bool) -> bool:
    """Whether activations are quantized by `apq_tvm.ops.activations.bundles`."""
    return profile.arch == "aarch64" and bits > 1 and not asymmetric


def quantize_func(
    k: int,
    act_group: int,
    weight_group: int,
    profile: DeviceProfile,
    decide: Decide,
    bits: int = 8,
    asymmetric: bool = False,
    normalize: Normalize | None = None,
    unsigned: bool = False,
) -> Any:
    """The unscheduled PrimFunc with this device's choices.

    Parameters
    ----------
    k, act_group, weight_group : int
        As in `apq_tvm.ops.activations.quantize.quantize_activations`.
    profile : DeviceProfile
    decide : Decide
        ``lanes``: columns in a vector; ``task``: activations in a parallel task.
    bits : int
        Of one activation.
    asymmetric : bool
        Whether rows have zero points.
    normalize : Normalize or None
        What makes x, in the same function.
    unsigned : bool
        Of rows with zero points, on x86: codes are 1 to 215.
    """
    rows = task_rows(k, decide)
    if in_bundles(profile, bits, asymmetric):
        return quantize_bundles(k, act_group, weight_group, rows, bits, normalize)
    together = profile.vector_bytes // 4
    grouped = takes_group_bundles(k, act_group, weight_group, bits, together)
    if profile.arch == "x86_64" and grouped:
        return quantize_group_bundles(k, act_group, together, rows, bits, normalize)
    if profile.arch == "x86_64" and takes_bundles(k, act_group, weight_group, bits, asymmetric):
        rows = -(-rows // together) * together
        return quantize_row_bundles(k, together, rows, normalize, unsigned)
    lanes = decide("lanes", LANES)
    sizes = (k, act_group, weight_group, lanes, rows, bits)
    return quantize_activations(*sizes, asymmetric, normalize, unsigned)


def quantize_behind(producer: Any, profile: DeviceProfile, make: Callable[..., Any]) -> Any:
    """The function that makes x and quantizes it, `make`, by the one that makes x alone.

    Raises
    ------
    NotApplicable
        That is no normalization, or none of whole vectors of rows.
    """
    op = str(producer.attrs.get("apq.op", ""))
    if op != "layernorm":
        raise NotApplicable(f"{op or 'a function of Relax'} and the quantization of x are apart")
    return make(Defaults(), Normalize(producer, profile.vector_bytes // 4))


def schedule_quantize(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule `apq_tvm.ops.activations.quantize` and what stores codes in another way.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    profile : DeviceProfile
    decide : Decide
        ``unroll``: vectors per iteration where a group has several.

    Returns
    -------
    tvm.tirx.PrimFunc
    """
    sch = s_tir.Schedule(func)
    unroll = decide("unroll", (4, 2, 1, 8))
    op = str(func.attrs["apq.op"]).removeprefix(OP)
    if op in (StripWindows.name, LineWindows.name):
        return schedule_strips(sch)
    (task,) = sch.get_loops(sch.get_sblock("task"))
    sch.parallel(task)
    schedule_normalization(sch)
    if op in (RowBundles.name, GroupBundles.name):
        schedule_trees(sch)
    for suffix in group_suffixes(sch):
        schedule_group(sch, suffix, unroll)
    return sch.mod["main"]


def schedule_normalization(sch: Any) -> None:
    """Sums of `apq_tvm.ops.activations.normalize`, where it is there."""
    for name in ("mean_sum", "variance_sum"):
        if has_block(sch, name):
            _reduce(sch, sch.get_sblock(name), "add", "float32")


def schedule_trees(sch: Any) -> None:
    """Reductions of bundles of rows (`apq_tvm.ops.activations.row_bundles`)."""
    for name, operation in (("top", "max"), ("low", "max"), ("total", "add")):
        if not has_block(sch, f"{name}_tree"):
            continue
        (loop,) = sch.get_loops(sch.get_sblock(f"{name}_tree"))
        sch.tensorize(loop, tree_of_rows(operation, int(sch.get(loop).extent)))


def schedule_strips(sch: Any) -> Any:
    """Schedule `apq_tvm.ops.activations.windows_strips`, whose vectors are there."""
    sch.parallel(sch.fuse(*sch.get_loops(sch.get_sblock("task"))))
    low = [("lowest", "max")] if has_block(sch, "lowest") else []
    total = [("total", "add")] if has_block(sch, "total") else []
    for name, operation in (("largest", "max"), *low, *total):
        _reduce(sch, sch.get_sblock(name), operation, "int32")
    schedule_trees(sch)
    return sch.mod["main"]


def _reduce(sch: Any, block: Any, operation: str, dtype: str) -> None:
    (loop,) = sch.get_loops(block)
    lanes = int(sch.get(loop).extent)
    sch.decompose_reduction(block, loop)
    sch.tensorize(loop, reduce_intrinsic(operation, lanes, dtype))


def group_suffixes(sch: Any) -> list[str]:
    """Suffixes of the blocks of the kinds of groups there are: whole ones, those past K."""
    return [s for s, block in (("", "group"), ("_tail", "tail_group")) if _has(sch, block)]


def _has(sch: Any, block: str) -> bool:
    children = sch.get_child_blocks(sch.get_sblock("row"))
    return any(str(sch.get(child).name_hint) == block for child in children)


def has_block(sch: Any, name: str) -> bool:
    """Whether there is a block of this name."""
    try:
        sch.get_sblock(name)
    except s_tir.ScheduleError:
        return False
    return True


def schedule_group(
    sch: Any, suffix: str, unroll: int, stores: tuple[str, ...] = ("store",)
) -> None:
    """Vectorize the steps of one kind of group; `stores` are the blocks that keep its codes."""
    largest = sch.get_sblock(f"largest{suffix}")
    chunks, lane = sch.get_loops(largest)
    sch.vectorize(lane)  # before its init leaves it: then it is no reduction block any more
    sch.decompose_reduction(largest, chunks)
    summed = has_block(sch, f"total{suffix}")
    for name in ("clear", "code", *stores, "add") if summed else ("code", *stores):
        sch.vectorize(sch.get_loops(sch.get_sblock(f"{name}{suffix}"))[-1])
    # The scale of signs is a mean: a float32 sum.
    dtype = str(sch.get(sch.get_sblock(f"top{suffix}")).writes[0].source.dtype)
    top = ("top", "add" if dtype == "float32" else "max", dtype)
    low = [("low", "max", "int32")] if has_block(sch, f"low{suffix}") else []
    total = [("total", "add", "int32")] if summed else []
    for name, operation, dtype in (top, *low, *total):
        _reduce(sch, sch.get_sblock(f"{name}{suffix}"), operation, dtype)
    (chunk,) = sch.get_loops(sch.get_sblock(f"chunk{suffix}"))
    extent = int(sch.get(chunk).extent)
    factor = max(f for f in range(1, unroll + 1) if extent % f == 0)
    if factor > 1:
        sch.unroll(sch.split(chunk, [None, factor])[1])

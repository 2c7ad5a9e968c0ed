"""What linear layers on GPUs want done to x: codes four to a word, threads sharing a group."""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.ops.gpu.quantize import QuantizeWords
from apq_tvm.ops.gpu.rows import RowFactors
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.cuda.graph import WARP
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import Preparation, zero_point
from apq_tvm.types import DeviceProfile

WIDE = 256
"""Threads that share a row, where a scale is of the whole row."""


def quantize_words(spec: LinearSpec, factors: RowFactors) -> Preparation:
    """``(xq, xs, start)`` of `apq_tvm.ops.gpu.rows`."""
    scheme, padded = spec.scheme, factors.padded
    assert scheme is not None
    width, sum_width, steps = factors.width, factors.sum_width, factors.steps
    named = "_".join("row" if w == padded else f"g{w}" for w in (width, sum_width))
    bits = "" if scheme.act_bits == 8 else f"_A{scheme.act_bits}"
    zeros = "z" if steps.layout.zero_points else ""
    shifts = "".join(map(str, steps.exponents)) if factors.ready or factors.folded else ""

    def make(decide: Decide) -> Any:
        wide = width == sum_width == padded and padded > 4 * WARP
        threads = decide("threads", (WIDE, 128, 512)) if wide else min(WARP, max(8, sum_width // 4))
        return QuantizeWords(factors, scheme.act_bits, threads).build()

    return Preparation(
        f"quantize_words_k{spec.k}_{padded}_{named}{bits}_W{steps.layout.bits}{zeros}"
        f"{'_s' + shifts if shifts else ''}{zero_point(spec)}",
        make,
        schedule=schedule_quantize_words,
    )


def schedule_quantize_words(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Groups of all rows in turn; as many to a block as make it 256 threads."""
    sch = s_tir.Schedule(func)
    group = sch.get_sblock("group")
    threads = 0
    (part,) = (b for b in sch.get_child_blocks(group) if str(sch.get(b).name_hint) == "part")
    for block in (*sch.get_child_blocks(group), *sch.get_child_blocks(part)):
        name = str(sch.get(block).name_hint)
        if name == "part":
            continue
        lane = sch.get_loops(block)[-2 if name in ("top", "low") else -1]
        threads = int(sch.get(lane).extent)
        sch.bind(lane, "threadIdx.x")
    row, number = sch.get_loops(group)
    grid, together = sch.split(sch.fuse(row, number), [None, max(1, 256 // threads)])
    sch.bind(grid, "blockIdx.x")
    sch.bind(together, "threadIdx.y")
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)

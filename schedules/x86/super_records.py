"""Default schedules of super-blocks on x86, in records, and their kernel records.

What the decisions mean, and why their defaults come first (measured on Zen 5, 4096 x 4096 W2s out
of cache, small pages, one thread; the shape of the loop in C):

- one array: 144 us with everything in one stream a row block; 154 with the scales apart, 174 with
  sub-scales and minima apart too;
- ``streams``: row blocks read at once. Two took 144 us, one 160: while one waits for the first line
  of a page the other goes on;
- ``ahead``: software prefetch distance in bytes. 4 KB took 144 us, 3 KB and 6 KB 149, 8 KB 154.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from apq_tvm.codegen.layouts.super_records import SuperRecordsLayout
from apq_tvm.formats import superblock
from apq_tvm.ops.activations.factors import quantize_factors
from apq_tvm.ops.few_rows.spans import SpanBlocking
from apq_tvm.ops.few_rows.super_records import RecordsGemm, records_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import Choice, LinearKernel, Preparation
from apq_tvm.schedules.linear.quantize import task_rows
from apq_tvm.schedules.linear.spans import schedule_spans
from apq_tvm.schedules.linear.streams import M_TILES, choose_streams
from apq_tvm.schedules.x86.codebook import gemm_kernel, span_layout, span_record
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.super_records import CHUNK, RecordDot
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, DotInstruction
from apq_tvm.tensorize.x86.super_records import (
    powers,
    records_dot_intrinsic,
    records_scale_intrinsic,
)
from apq_tvm.types import DeviceProfile


def _layout(spec: LinearSpec, lanes: int) -> SuperRecordsLayout:
    layout = span_layout(spec, lanes)
    assert isinstance(layout, SuperRecordsLayout)
    return layout


def _prepare(choice: Choice, instruction: DotInstruction) -> Preparation:
    spec, layout = choice.spec, _layout(choice.spec, instruction.rows)
    twos = powers(instruction, layout.bits)
    named = "_".join(str(int(1 / two)) for two in twos)
    return Preparation(
        f"quantize_k{spec.k}_g{layout.group}_by_{named}",
        lambda decide: quantize_factors(spec.k, layout.group, twos, task_rows(spec.k, decide)),
    )


def records_kernel(instruction: DotInstruction, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""
    lanes = instruction.rows

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> SpanBlocking:
        choices = (2, 1, 4) if m_tile == 1 else (1, 2)
        blocks = _layout(spec, lanes).row_blocks(spec.n)
        decide("ahead", (4096, 2048, 0, 8192))
        return SpanBlocking(m_tile, choose_streams(decide, choices, blocks))

    def schedule(sch: Any, choice: Choice) -> None:
        records, ahead = _layout(choice.spec, lanes).records, choice["ahead"]

        def intrinsic(block: str) -> str:
            if block.startswith("scale"):
                return records_scale_intrinsic(records, m_tile, ahead)
            k = CHUNK if block.startswith("dot") else UNIT_K
            return records_dot_intrinsic(instruction, RecordDot(records, m_tile, k), ahead)

        schedule_spans(sch, choice, intrinsic)

    return span_record(
        superblock.NAME, instruction, m_tile, ask=ask, schedule=schedule,
        func=lambda choice: records_linear(choice.spec, _layout(choice.spec, lanes), choice.plan),
        prepare=partial(_prepare, instruction=instruction),
    )  # fmt: skip


SUPER_KERNELS: tuple[LinearKernel, ...] = (
    *(gemm_kernel(superblock.NAME, instruction, RecordsGemm) for instruction in INSTRUCTIONS),
    *(records_kernel(instruction, m_tile) for instruction in INSTRUCTIONS for m_tile in M_TILES),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

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

from typing import Any

from apq_tvm.codegen.layouts import default_layout
from apq_tvm.codegen.layouts.super_records import SuperRecordsLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import superblock
from apq_tvm.ops.activations.factors import quantize_factors
from apq_tvm.ops.few_rows.spans import SpanBlocking
from apq_tvm.ops.few_rows.super_records import records_gemm, records_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.gemm_stages import schedule_stages
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation, legacy
from apq_tvm.schedules.linear.quantize import ELEMENTS_PER_TASK
from apq_tvm.schedules.linear.spans import PARALLEL, schedule_spans
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.schedules.x86.codebook import span_gemm_blocking, sum_bits
from apq_tvm.schedules.x86.tiles import M_MIN, micro_kernel
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.super_records import CHUNK, RecordDot
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, DotInstruction
from apq_tvm.tensorize.x86.gemm import Tile, integer_gemm_intrinsic
from apq_tvm.tensorize.x86.super_records import (
    powers,
    records_dot_intrinsic,
    records_scale_intrinsic,
)
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share codes; a kernel is for at least that many rows."""


def records_layout(spec: LinearSpec, lanes: int) -> SuperRecordsLayout:
    """The layout of a layer whose kernel works on `lanes` rows at once."""
    layout = default_layout(spec.scheme, spec.details, 4 * lanes)
    assert isinstance(layout, SuperRecordsLayout)
    return layout


def _check(spec: LinearSpec, profile: DeviceProfile, instruction: DotInstruction) -> None:
    scheme = spec.scheme
    if scheme is None or scheme.family != superblock.NAME:
        raise NotApplicable(f"is for super-blocks, not {scheme or 'float32 weights'}")
    if not scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {scheme}")
    check_features(profile, instruction.features, instruction.rows)


def _blocking(spec: LinearSpec, layout: SuperRecordsLayout, m: int, decide: Decide) -> SpanBlocking:
    choices = (2, 1, 4) if m == 1 else (1, 2)
    streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
    return SpanBlocking(m, streams)


def records_kernel(instruction: DotInstruction, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""
    lanes = instruction.rows

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = records_layout(spec, lanes)
        return records_linear(spec, layout, _blocking(spec, layout, m_tile, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = records_layout(spec, lanes)
        _blocking(spec, layout, m_tile, decide)  # asked as `func` did
        ahead = decide("ahead", (4096, 2048, 0, 8192))

        def intrinsic(block: str) -> str:
            if block.startswith("scale"):
                return records_scale_intrinsic(layout.records, m_tile, ahead)
            k = CHUNK if block.startswith("dot") else UNIT_K
            return records_dot_intrinsic(instruction, RecordDot(layout.records, m_tile, k), ahead)

        schedule_spans(sch, intrinsic, spec.n * spec.k >= PARALLEL)

    def prepare(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
        layout = records_layout(spec, lanes)
        twos = powers(instruction, layout.bits)
        rows = max(1, ELEMENTS_PER_TASK // spec.k)
        func = quantize_factors(spec.k, layout.group, twos, rows)
        named = "_".join(str(int(1 / two)) for two in twos)
        return Preparation(f"quantize_k{spec.k}_g{layout.group}_by_{named}", func)

    return legacy(
        name=f"super_A8_{instruction.name}_r{lanes}m{m_tile}",
        m_min=m_tile,
        m_max=-1,
        check=lambda spec, profile: _check(spec, profile, instruction),
        layout=lambda spec, _: records_layout(spec, lanes),
        func=func,
        schedule=schedule,
        family=superblock.NAME,
        prepare=prepare,
    )


def gemm_kernel(instruction: DotInstruction) -> LinearKernel:
    """The record of one GEMM."""
    lanes = instruction.rows

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = records_layout(spec, lanes)
        return records_gemm(spec, layout, span_gemm_blocking(spec, layout, instruction, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = records_layout(spec, lanes)
        bl = span_gemm_blocking(spec, layout, instruction, decide)
        schedule_stages(sch)
        tile = Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)
        micro_kernel(sch, integer_gemm_intrinsic(instruction, tile, sum_bits(layout)), 5)

    return legacy(
        name=f"gemm_super_A8_{instruction.name}_r{lanes}",
        m_min=M_MIN,
        m_max=-1,
        check=lambda spec, profile: _check(spec, profile, instruction),
        layout=lambda spec, _: records_layout(spec, lanes),
        func=func,
        schedule=schedule,
        family=superblock.NAME,
    )


SUPER_KERNELS: tuple[LinearKernel, ...] = (
    *map(gemm_kernel, INSTRUCTIONS),
    *(records_kernel(instruction, m_tile) for instruction in INSTRUCTIONS for m_tile in M_TILES),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

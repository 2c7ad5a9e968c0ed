"""Default schedules of layers with codebooks and non-uniform tables, few rows of x and many.

Decisions, as in `apq_tvm.schedules.x86.gemv`, and why their defaults come first (measured on Zen 5,
4096 x 4096 out of cache, 512-bit vectors, one thread):

- ``streams``: row blocks read at once.
- ``ahead``: software prefetch distance of the codes in bytes. nl4 is as fast as uniform 4-bit codes
  and likes what they like: four streams without prefetches took 246 us, two with 4 KB 251, two
  without 310.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import NonlinearLayout, SpanLayout, default_layout
from apq_tvm.codegen.layouts.codebook import CodebookLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import codebook, nonlinear
from apq_tvm.ops.few_rows.spans import SpanBlocking, lookup_of, span_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.spans import span_gemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.schedules.linear.kernel import LinearKernel, legacy
from apq_tvm.schedules.linear.spans import PARALLEL, schedule_spans
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.schedules.x86.tiles import M_MIN, integer_tiles, micro_kernel
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, DotInstruction
from apq_tvm.tensorize.x86.gemm import Tile, integer_gemm_intrinsic
from apq_tvm.tensorize.x86.lookup import MOST_ENTRIES, decode_intrinsic, lookup_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share a decoded weight vector; a kernel is for at least that many rows."""

FAMILIES = (codebook.NAME, nonlinear.NAME)
"""Families whose values are looked up."""


def span_layout(spec: LinearSpec, lanes: int) -> SpanLayout:
    """The layout of a layer whose kernel works on `lanes` rows at once."""
    layout = default_layout(spec.scheme, spec.details, 4 * lanes)
    assert isinstance(layout, SpanLayout)
    return layout


def _blocking(spec: LinearSpec, layout: SpanLayout, m_tile: int, decide: Decide) -> SpanBlocking:
    choices: tuple[int, ...] = (2, 1, 4) if m_tile == 1 else (1, 2)
    if _fast(layout, m_tile):
        choices = (4, 2, 1)
    streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
    step = max(1, layout.group // UNIT_K)
    if isinstance(layout, CodebookLayout) and layout.index_bits == 2:
        step = max(step, 2)  # a byte of indices is that of two units: constant shifts
    return SpanBlocking(m_tile, streams, step)


def _fast(layout: SpanLayout, m_tile: int) -> bool:
    """Whether units pass faster than prefetches pay, as in `apq_tvm.schedules.x86.gemv`."""
    return isinstance(layout, NonlinearLayout) and layout.rows == 16 and m_tile == 1


def _ahead(layout: SpanLayout, m_tile: int, decide: Decide) -> int:
    fast = _fast(layout, m_tile)
    return decide("ahead", (0, 4096, 2048, 8192) if fast else (4096, 2048, 0, 8192))


def _check(spec: LinearSpec, profile: DeviceProfile, instruction: DotInstruction) -> None:
    """Decline what no kernel of this file computes on the device."""
    scheme, lanes = spec.scheme, instruction.rows
    assert scheme is not None
    if not scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {scheme}")
    check_features(profile, instruction.features, lanes)
    entries = span_layout(spec, lanes).entries
    if entries > MOST_ENTRIES:
        raise NotApplicable(f"{scheme} has {entries} centroids; registers hold {MOST_ENTRIES}")


def span_kernel(family: str, instruction: DotInstruction, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""
    lanes = instruction.rows

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = span_layout(spec, lanes)
        return span_linear(spec, layout, _blocking(spec, layout, m_tile, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = span_layout(spec, lanes)
        _blocking(spec, layout, m_tile, decide)  # asked as `func` did
        ahead = _ahead(layout, m_tile, decide)
        vbmi, top = "avx512vbmi" in profile.features, 2 * layout.offset
        chosen = lookup_intrinsic(instruction, lookup_of(layout, m_tile), top, vbmi, ahead)
        schedule_spans(sch, lambda _: chosen, spec.n * spec.k >= PARALLEL)

    return legacy(
        name=f"{family}_A8_{instruction.name}_r{lanes}m{m_tile}",
        m_min=m_tile,
        m_max=-1,
        check=lambda spec, profile: _check(spec, profile, instruction),
        layout=lambda spec, _: span_layout(spec, lanes),
        func=func,
        schedule=schedule,
        family=family,
    )


def span_gemm_blocking(
    spec: LinearSpec, layout: SpanLayout, instruction: DotInstruction, decide: Decide
) -> GemmBlocking:
    """The decisions of a GEMM on spans, as in `apq_tvm.schedules.x86.gemm.integer_blocking`."""
    tiles = integer_tiles(instruction, False, _top(layout).bit_length())
    m_tile, vectors = decide("tile", tiles)
    step, kp = max(UNIT_K, layout.group), layout.padded_k(spec.k)
    k_block = even_block(kp, step, decide("k_block", (256, 512, 384, 1024)))
    k_step = min(layout.group, decide("k_step", (64, 32)))
    m_tiles, ahead = decide("m_tiles", (32, 16, 64, 8)), decide("prefetch", (True, False))
    return GemmBlocking(m_tile, vectors, k_step, k_block, m_tiles, ahead)


def _top(layout: SpanLayout) -> int:
    """Largest value that is multiplied."""
    return 2 * layout.offset if layout.entries else (1 << layout.bits) - 1


def sum_bits(layout: SpanLayout) -> int:
    """Bits of codes that vpmaddubsw can sum as often: 64 counts like 63 (4 * 64 * 127 = 32512)."""
    return (_top(layout) - 1 if layout.entries else _top(layout)).bit_length()


def gemm_kernel(family: str, instruction: DotInstruction) -> LinearKernel:
    """The record of one GEMM."""
    lanes = instruction.rows

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = span_layout(spec, lanes)
        return span_gemm(spec, layout, span_gemm_blocking(spec, layout, instruction, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = span_layout(spec, lanes)
        bl = span_gemm_blocking(spec, layout, instruction, decide)
        schedule_stages(sch)
        vbmi = "avx512vbmi" in profile.features
        lookup = sch.get_loops(sch.get_sblock("lookup"))[-4]
        sch.tensorize(lookup, decode_intrinsic(lookup_of(layout, 1), vbmi))
        for name in ("empty", *(["book"] if layout.entries > 1 << layout.bits else [])):
            for loop in sch.get_loops(sch.get_sblock(name))[2:-1]:
                sch.unroll(loop)
        tile = Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)
        micro_kernel(sch, integer_gemm_intrinsic(instruction, tile, sum_bits(layout)), 5)

    return legacy(
        name=f"gemm_{family}_A8_{instruction.name}_r{lanes}",
        m_min=M_MIN,
        m_max=-1,
        check=lambda spec, profile: _check(spec, profile, instruction),
        layout=lambda spec, _: span_layout(spec, lanes),
        func=func,
        schedule=schedule,
        family=family,
    )


CODEBOOK_KERNELS: tuple[LinearKernel, ...] = (
    *(gemm_kernel(family, instruction) for family in FAMILIES for instruction in INSTRUCTIONS),
    *(
        span_kernel(family, instruction, m_tile)
        for family in FAMILIES
        for instruction in INSTRUCTIONS
        for m_tile in M_TILES
    ),
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

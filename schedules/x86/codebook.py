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
from apq_tvm.formats import codebook, half, nonlinear
from apq_tvm.ops.few_rows.spans import SpanBlocking, lookup_of, span_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.spans import SpanGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features, check_integer_acts
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.schedules.linear.spans import WEIGHTS, schedule_spans
from apq_tvm.schedules.linear.streams import M_TILES, choose_streams
from apq_tvm.schedules.x86.tiles import TALLEST, integer_tiles, micro_kernel
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS, DotInstruction
from apq_tvm.tensorize.x86.gemm import Tile, integer_gemm_intrinsic
from apq_tvm.tensorize.x86.lookup import MOST_ENTRIES, decode_intrinsic, lookup_intrinsic
from apq_tvm.types import DeviceProfile

FAMILIES = (codebook.NAME, nonlinear.NAME, half.NAME)
"""Families whose values are looked up."""


def span_layout(spec: LinearSpec, lanes: int) -> SpanLayout:
    """The layout of a layer whose kernel works on `lanes` rows at once."""
    layout = default_layout(spec.scheme, spec.details, lanes)
    assert isinstance(layout, SpanLayout)
    return layout


def span_record(
    family: str, instruction: DotInstruction, m_tile: int, **functions: Any
) -> LinearKernel:
    """The record of a kernel on spans; for many rows of x where `m_tile` is 0."""
    lanes = instruction.rows

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        check_integer_acts(spec)
        check_features(profile, instruction.features, lanes)
        entries = span_layout(spec, lanes).entries
        if entries > MOST_ENTRIES:
            has = f"{spec.scheme} has {entries} centroids"
            raise NotApplicable(f"{has}; registers hold {MOST_ENTRIES}")

    return LinearKernel(
        "gemv" if m_tile else "gemm",
        WEIGHTS[family],
        8,
        Instruction(instruction.name, instruction.features, lanes),
        m_tile or TALLEST,
        check=check,
        layout=lambda spec, _: span_layout(spec, lanes),
        family=family,
        m_named=m_tile,
        **functions,
    )


def span_kernel(family: str, instruction: DotInstruction, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""
    lanes = instruction.rows

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> SpanBlocking:
        layout = span_layout(spec, lanes)
        # Whether units pass faster than prefetches pay, as in `apq_tvm.schedules.x86.gemv`.
        fast = isinstance(layout, NonlinearLayout) and lanes == 16 and m_tile == 1
        choices: tuple[int, ...] = (2, 1, 4) if m_tile == 1 else (1, 2)
        if fast:
            choices = (4, 2, 1)
        streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
        decide("ahead", (0, 4096, 2048, 8192) if fast else (4096, 2048, 0, 8192))
        step = max(1, layout.group // UNIT_K)
        if isinstance(layout, CodebookLayout) and layout.index_bits == 2:
            step = max(step, 2)  # a byte of indices is that of two units: constant shifts
        return SpanBlocking(m_tile, streams, step)

    def schedule(sch: Any, choice: Choice) -> None:
        layout = span_layout(choice.spec, lanes)
        vbmi, top = "avx512vbmi" in choice.profile.features, 2 * layout.offset
        dot = lookup_of(layout, m_tile)
        chosen = lookup_intrinsic(instruction, dot, top, vbmi, choice["ahead"])
        schedule_spans(sch, choice, lambda _: chosen)

    return span_record(
        family, instruction, m_tile, ask=ask, schedule=schedule,
        func=lambda choice: span_linear(
            choice.spec, span_layout(choice.spec, lanes), choice.plan
        ),
    )  # fmt: skip


def _top(layout: SpanLayout) -> int:
    """Largest value that is multiplied."""
    return 2 * layout.offset if layout.entries else (1 << layout.bits) - 1


def _sum_bits(layout: SpanLayout) -> int:
    """Bits of codes that vpmaddubsw can sum as often: 64 counts like 63 (4 * 64 * 127 = 32512)."""
    return (_top(layout) - 1 if layout.entries else _top(layout)).bit_length()


def gemm_kernel(
    family: str, instruction: DotInstruction, gemm: type[SpanGemm] = SpanGemm
) -> LinearKernel:
    """The record of one GEMM."""
    lanes = instruction.rows

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
        """As `apq_tvm.schedules.x86.gemm.integer_blocking`."""
        layout = span_layout(spec, lanes)
        tiles = integer_tiles(instruction, False)
        m_tile, vectors = decide("tile", tiles)
        step, kp = max(UNIT_K, layout.group), layout.padded_k(spec.k)
        k_block = even_block(kp, step, decide("k_block", (256, 512, 384, 1024)))
        k_step = min(layout.group, decide("k_step", (64, 32)))
        m_tiles, ahead = decide("m_tiles", (32, 16, 64, 8)), decide("prefetch", (True, False))
        return GemmBlocking(m_tile, vectors, k_step, k_block, m_tiles, ahead)

    def schedule(sch: Any, choice: Choice) -> None:
        layout, bl = span_layout(choice.spec, lanes), choice.plan
        schedule_stages(sch)
        if layout.entries:
            vbmi = "avx512vbmi" in choice.profile.features
            lookup = sch.get_loops(sch.get_sblock("lookup"))[-4]
            sch.tensorize(lookup, decode_intrinsic(lookup_of(layout, 1), vbmi))
            books = ("book",) if layout.entries > 1 << layout.bits else ()
            for name in ("empty", *books):
                for loop in sch.get_loops(sch.get_sblock(name))[2:-1]:
                    sch.unroll(loop)
        tile = Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)
        micro_kernel(sch, integer_gemm_intrinsic(instruction, tile, _sum_bits(layout)))

    return span_record(
        family, instruction, 0, ask=ask, schedule=schedule,
        func=lambda choice: gemm(choice.spec, span_layout(choice.spec, lanes), choice.plan).build(),
    )  # fmt: skip


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

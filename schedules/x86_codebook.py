"""Default schedules of layers with codebooks, non-uniform tables and super-blocks, few rows of x.

Decisions, as in `apq_tvm.schedules.x86_gemv`, and why their defaults come first (measured on Zen 5,
4096 x 4096 W2s out of cache, 512-bit vectors, one thread):

- ``streams``: row blocks read at once. Two took 172 us, one 198, four 183.
- ``ahead``: software prefetch distance of the codes in bytes. 4 KB took 172 us, none 216.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import SpanLayout, default_layout
from apq_tvm.codegen.layouts.codebook import CodebookLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import codebook, nonlinear, superblock
from apq_tvm.ops.codebook_linear import DOTS, STAGES, SpanBlocking, lookup_of, span_linear
from apq_tvm.ops.linear import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear_checks import check_features
from apq_tvm.schedules.linear_kernel import LinearKernel
from apq_tvm.tensorize.unit import UNIT_K
from apq_tvm.tensorize.x86_dot import INSTRUCTIONS, DotInstruction, dot_intrinsic
from apq_tvm.tensorize.x86_lookup import MOST_ENTRIES, lookup_intrinsic
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share a decoded weight vector; a kernel is for at least that many rows."""

FAMILIES = (codebook.NAME, nonlinear.NAME, superblock.NAME)
"""Families whose layouts are `SpanLayout`."""

_TASKS = 8
"""Bundles of row blocks a layer should have, so that threads can share it evenly."""

_PARALLEL = 1 << 16
"""Weights from which on a second thread pays."""


def span_layout(spec: LinearSpec, lanes: int) -> SpanLayout:
    """The layout of a layer whose kernel works on `lanes` rows at once."""
    layout = default_layout(spec.scheme, spec.details, 4 * lanes)
    assert isinstance(layout, SpanLayout)
    return layout


def _blocking(spec: LinearSpec, layout: SpanLayout, m_tile: int, decide: Decide) -> SpanBlocking:
    choices = (2, 1, 4) if m_tile == 1 else (1, 2)
    blocks = layout.row_blocks(spec.n)
    possible = [s for s in choices if s <= blocks]
    # Narrow layers keep work for every core rather than many streams.
    streams = decide("streams", tuple(sorted(possible, key=lambda s: blocks < _TASKS * s)))
    step = max(1, layout.group // UNIT_K)
    if isinstance(layout, CodebookLayout) and layout.index_bits == 2:
        step = max(step, 2)  # a byte of indices is that of two units: constant shifts
    return SpanBlocking(m_tile, streams, step)


def _ahead(decide: Decide) -> int:
    return decide("ahead", (4096, 2048, 0, 8192))


def schedule_spans(sch: Any, intrinsic: str, parallel: bool) -> None:
    """Schedule a PrimFunc of `apq_tvm.ops.codebook_linear`.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
    intrinsic : str
        Registered name.
    parallel : bool
        Whether bundles are shared among threads.
    """
    annotations = sch.get(sch.get_sblock("root")).annotations
    (task,) = sch.get_loops(sch.get_sblock("task"))
    if parallel:
        sch.parallel(task)
    for name in map(str, annotations[STAGES]):
        *outer, lane = sch.get_loops(sch.get_sblock(name))
        sch.vectorize(lane)
        for loop in outer:
            sch.unroll(loop)
    for name in map(str, annotations[DOTS]):
        sch.tensorize(sch.get_loops(sch.get_sblock(name))[0], intrinsic)


def span_kernel(family: str, instruction: DotInstruction, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile."""
    lanes = instruction.rows

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        scheme = spec.scheme
        assert scheme is not None
        if not scheme.integer_acts:
            raise NotApplicable(f"is for integer activations, not {scheme}")
        check_features(profile, instruction.features, lanes)
        entries = span_layout(spec, lanes).entries
        if entries > MOST_ENTRIES:
            raise NotApplicable(f"{scheme} has {entries} centroids; registers hold {MOST_ENTRIES}")

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = span_layout(spec, lanes)
        return span_linear(spec, layout, _blocking(spec, layout, m_tile, decide))

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = span_layout(spec, lanes)
        _blocking(spec, layout, m_tile, decide)  # asked as `func` did
        ahead = _ahead(decide)
        if layout.entries:
            vbmi = "avx512vbmi" in profile.features
            top = 2 * layout.offset
            chosen = lookup_intrinsic(instruction, lookup_of(layout, m_tile), top, vbmi, ahead)
        else:
            chosen = dot_intrinsic(instruction, layout.unit, m_tile, ahead)
        schedule_spans(sch, chosen, spec.n * spec.k >= _PARALLEL)

    return LinearKernel(
        name=f"{family}_A8_{instruction.name}_r{lanes}m{m_tile}",
        m_min=m_tile,
        m_max=-1,
        check=check,
        layout=lambda spec, _: span_layout(spec, lanes),
        func=func,
        schedule=schedule,
        family=family,
    )


CODEBOOK_KERNELS: tuple[LinearKernel, ...] = tuple(
    span_kernel(family, instruction, m_tile)
    for family in FAMILIES
    for instruction in INSTRUCTIONS
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

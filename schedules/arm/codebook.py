"""Default schedules on 64-bit Arm of codebooks, non-uniform tables and super-blocks, few rows of x.

Decisions:

- ``streams``: row blocks read at once;
- ``step``: groups of a non-uniform table in an iteration.

N1 is out of issue slots before it is out of vector pipes: two streams take fewer. V1 and V2 are out
of vector pipes: one stream has no copies.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir

from apq_tvm.codegen.layouts import (
    CodebookLayout,
    NonlinearLayout,
    SpanLayout,
    SuperBlockLayout,
    default_layout,
)
from apq_tvm.codegen.layouts.codebook_quads import CodebookQuads
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import codebook, nonlinear, superblock
from apq_tvm.ops.activations.extra import quantize_extra
from apq_tvm.ops.few_rows.lookup_spans import Lookup, lookup_spans
from apq_tvm.ops.few_rows.spans import SpanBlocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.arm.activations import schedule_bundles
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features, check_integer_acts
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.schedules.linear.quantize import task_rows
from apq_tvm.schedules.linear.spans import WEIGHTS, schedule_spans
from apq_tvm.schedules.linear.streams import M_TILES, choose_streams
from apq_tvm.tensorize.arm.spans.codebook import book_units_intrinsic
from apq_tvm.tensorize.arm.spans.codebook_quads import books_intrinsic, books_scaling
from apq_tvm.tensorize.arm.spans.nonlinear import (
    UNITS_ACTS,
    UNITS_FACTOR,
    UNITS_UNIT,
    units_intrinsic,
)
from apq_tvm.tensorize.arm.spans.super_blocks import super_intrinsic
from apq_tvm.tensorize.arm.written.codebook import is_written, written_intrinsic
from apq_tvm.tensorize.arm.written.codebook_asm import Style
from apq_tvm.tensorize.meaning.codebook_quads import QUAD, BookDot
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.spans.kinds import BookUnitsDot, SuperDot, UnitsDot
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, SpanDot
from apq_tvm.types import DeviceProfile


def _layout(spec: LinearSpec) -> SpanLayout:
    layout = default_layout(spec.scheme, spec.details, ROWS)
    assert isinstance(layout, SpanLayout)
    return layout


def _lookup(layout: SpanLayout, profile: DeviceProfile) -> Lookup:
    """How a layout is computed."""
    if isinstance(layout, CodebookQuads):
        books = books_scaling("sve" in profile.features)
        return Lookup(layout, BookDot, QUAD, books.unit, books.acts, books.factor)
    if isinstance(layout, CodebookLayout):
        books, step = books_scaling(False), max(UNIT_K, layout.group)
        return Lookup(layout, BookUnitsDot, step, books.unit, books.acts, books.factor)
    if isinstance(layout, SuperBlockLayout):
        return Lookup(layout, SuperDot, UNIT_K, 1.0, 1.0, None)
    return Lookup(layout, UnitsDot, UNIT_K, UNITS_UNIT, UNITS_ACTS, UNITS_FACTOR)


def _intrinsic(dot: SpanDot, choice: Choice) -> str:
    profile = choice.profile
    fused, sve = "dotprod" in profile.features, "sve" in profile.features
    longer = sve and "sve2" not in profile.features  # cores with SVE 2 have vectors of 16 bytes
    if fused and is_written(dot):
        style = Style(sve, _scarce(profile), profile.in_order, longer)
        return written_intrinsic(dot, style)
    if isinstance(dot, BookDot):
        return books_intrinsic(dot, fused, sve, longer)
    if isinstance(dot, BookUnitsDot):
        return book_units_intrinsic(dot, fused)
    if isinstance(dot, SuperDot):
        return super_intrinsic(dot, fused, sve)
    assert isinstance(dot, UnitsDot)
    return units_intrinsic(dot, fused, sve)


def _check(spec: LinearSpec, profile: DeviceProfile, fused: bool) -> None:
    check_integer_acts(spec)
    if fused:
        check_features(profile, ("dotprod",), ROWS)
    elif "dotprod" in profile.features:
        raise NotApplicable(f"is for devices without dot products; {profile.name} has them")


def _scarce(profile: DeviceProfile) -> bool:
    """Whether a core is out of issue slots before it is out of vector pipes, as N1 is."""
    return not profile.in_order and profile.vector_pipes == 2


def _ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide, m_tile: int) -> SpanBlocking:
    layout, scarce = _layout(spec), _scarce(profile) and m_tile == 1
    is_table = isinstance(layout, NonlinearLayout)
    # Two streams share the loads of x, and copy what their sums begin at.
    choices = (2, 1) if is_table and scarce else (1, 2)
    streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
    if not is_table:
        return SpanBlocking(m_tile, streams)
    return SpanBlocking(m_tile, streams, decide("step", (2, 1, 4)))


def _prepare(choice: Choice) -> Preparation:
    spec, layout = choice.spec, _layout(choice.spec)
    lookup, padded = _lookup(layout, choice.profile), layout.padded_k(spec.k)
    acts, factor, short = lookup.acts, lookup.factor, lookup.factor == UNITS_FACTOR

    def make(decide: Decide) -> Any:
        rows = task_rows(spec.k, decide)
        return quantize_extra(spec.k, padded, layout.group, acts, factor, rows, short)

    named = f"{layout.family}{'_sve' if factor == 0 else ''}"
    key = f"quantize_{named}_k{spec.k}p{padded}g{layout.group}"
    return Preparation(key, make, schedule=schedule_extra)


def schedule_extra(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """Schedule a PrimFunc of `apq_tvm.ops.activations.extra`, as `schedule_bundles`."""
    sch = s_tir.Schedule(schedule_bundles(func, profile, decide))
    for half in range(2):
        sch.vectorize(sch.get_loops(sch.get_sblock(f"spread{half}"))[-1])
    return sch.mod["main"]


def lookup_kernel(family: str, fused: bool, m_tile: int) -> LinearKernel:
    """The record of one kernel for M >= m_tile.

    Parameters
    ----------
    family : str
    fused : bool
        Whether by ``sdot``, else by ``smull``.
    m_tile : int
    """

    def func(choice: Choice) -> Any:
        spec, layout = choice.spec, _layout(choice.spec)
        return lookup_spans(spec, _lookup(layout, choice.profile), choice.plan)

    def schedule(sch: Any, choice: Choice) -> None:
        layout = _layout(choice.spec)
        lookup = _lookup(layout, choice.profile)
        short = layout.padded_k(choice.spec.k) % layout.span

        def intrinsic(block: str) -> str:
            k = short if block.startswith("tail") else layout.span
            return _intrinsic(lookup.dot(m_tile, k), choice)

        schedule_spans(sch, choice, intrinsic)

    return LinearKernel(
        "gemv",
        WEIGHTS[family],
        8,
        Instruction("sdot" if fused else "smull", ("dotprod",) if fused else (), ROWS),
        m_tile,
        check=lambda spec, profile: _check(spec, profile, fused),
        layout=lambda spec, _: _layout(spec),
        func=func,
        schedule=schedule,
        ask=lambda spec, profile, decide: _ask(spec, profile, decide, m_tile),
        family=family,
        m_named=m_tile,
        prepare=_prepare,
    )


FAMILIES = (codebook.NAME, nonlinear.NAME, superblock.NAME)
"""Families whose values these kernels look up."""

LOOKUP_KERNELS: tuple[LinearKernel, ...] = tuple(
    lookup_kernel(family, fused, m_tile)
    for family in FAMILIES
    for fused in (True, False)
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

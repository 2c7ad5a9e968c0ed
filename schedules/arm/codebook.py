"""Default schedules on 64-bit Arm of codebooks, non-uniform tables and super-blocks, few rows of x.

Decisions:

- ``streams``: row blocks read at once;
- ``step``: groups of a non-uniform table in an iteration;
- ``together``: whether one ``ld1`` loads four vectors of its codes.

N1 is out of issue slots before it is out of vector pipes: two streams and ``ld1`` take fewer. V1
and V2 are out of vector pipes: one stream has no copies. Cores that issue in order take as many
groups of a non-uniform table at once as `apq_tvm.tensorize.arm.written.nonlinear` has an order for.
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
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.kernel import LinearKernel, Preparation, legacy
from apq_tvm.schedules.linear.quantize import ELEMENTS_PER_TASK
from apq_tvm.schedules.linear.spans import PARALLEL, schedule_spans
from apq_tvm.schedules.linear.streams import choose_streams
from apq_tvm.tensorize.arm.codebook import book_units_intrinsic
from apq_tvm.tensorize.arm.codebook_quads import books_intrinsic, books_scaling
from apq_tvm.tensorize.arm.nonlinear import UNITS_ACTS, UNITS_FACTOR, UNITS_UNIT, units_intrinsic
from apq_tvm.tensorize.arm.super_span import super_intrinsic
from apq_tvm.tensorize.arm.written.codebook import is_written, written_intrinsic
from apq_tvm.tensorize.arm.written.codebook_asm import Style
from apq_tvm.tensorize.arm.written.nonlinear import (
    in_order_units_intrinsic,
    is_in_order,
    written_groups,
)
from apq_tvm.tensorize.meaning.codebook_quads import QUAD, BookDot
from apq_tvm.tensorize.meaning.codebook_span import BookUnitsDot
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.lookup_span import ROWS, SpanDot
from apq_tvm.tensorize.meaning.nonlinear_span import UnitsDot
from apq_tvm.tensorize.meaning.super_span import SuperDot
from apq_tvm.types import DeviceProfile

M_TILES = (4, 2, 1)
"""Rows of x that share looked up vectors; a kernel is for at least that many rows."""

_FACTORS: dict[type[SpanDot], float | None] = {
    BookUnitsDot: books_scaling(False).factor,
    UnitsDot: UNITS_FACTOR,
    SuperDot: None,
}
"""What `extra` multiplies `xs` by; None for the sums of the activations' codes."""

_FACTOR_NAMES = {BookDot: "books", BookUnitsDot: "books", UnitsDot: "units", SuperDot: "sums"}


def _layout(spec: LinearSpec) -> SpanLayout:
    layout = default_layout(spec.scheme, spec.details, 4 * ROWS)
    assert isinstance(layout, SpanLayout)
    return layout


def _lookup(layout: SpanLayout, profile: DeviceProfile) -> Lookup:
    """How a layout that `_check` accepts is computed."""
    group, entries, offset, bits = layout.group, layout.entries, layout.offset, layout.bits
    if isinstance(layout, CodebookQuads):
        scaling = books_scaling("sve" in profile.features)

        def quads(m: int, k: int) -> BookDot:
            return BookDot(m, k, group, entries, offset, scaling.unit, bits)

        return Lookup(quads, QUAD, scaling.acts)

    if isinstance(layout, CodebookLayout):
        scaling = books_scaling(False)

        def books(m: int, k: int) -> BookUnitsDot:
            return BookUnitsDot(m, k, group, entries, offset, scaling.unit, bits)

        return Lookup(books, max(UNIT_K, group), scaling.acts)

    if isinstance(layout, SuperBlockLayout):

        def supers(m: int, k: int) -> SuperDot:
            return SuperDot(m, k, group, entries, offset, 1.0, bits)

        return Lookup(supers, UNIT_K, 1.0)

    def units(m: int, k: int) -> UnitsDot:
        return UnitsDot(m, k, group, entries, offset, UNITS_UNIT)

    return Lookup(units, UNIT_K, UNITS_ACTS)


def _intrinsic(dot: SpanDot, profile: DeviceProfile, decide: Decide) -> str:
    fused, sve = "dotprod" in profile.features, "sve" in profile.features
    longer = sve and "sve2" not in profile.features  # cores with SVE 2 have vectors of 16 bytes
    if fused and is_written(dot):
        longer = longer and isinstance(dot, BookDot) and dot.bits == 3
        style = Style(sve and isinstance(dot, BookDot), _scarce(profile), profile.in_order, longer)
        return written_intrinsic(dot, style)
    if isinstance(dot, BookDot):
        return books_intrinsic(dot, fused, sve, longer)
    if isinstance(dot, BookUnitsDot):
        return book_units_intrinsic(dot, fused)
    if isinstance(dot, SuperDot):
        return super_intrinsic(dot, fused, sve)
    assert isinstance(dot, UnitsDot)
    if fused and profile.in_order and is_in_order(dot):
        return in_order_units_intrinsic(dot)
    # LLVM moves the loads of longer groups up, and they do not fit the registers.
    scarce = _scarce(profile) and dot.m == 1 and dot.units <= 2
    together = decide("together", (scarce, not scarce))
    return units_intrinsic(dot, fused, sve, together)


def _check(spec: LinearSpec, profile: DeviceProfile, family: str, fused: bool) -> None:
    scheme = spec.scheme
    if scheme is None or scheme.family != family:
        raise NotApplicable(f"is for {family}, not {scheme or 'float32'}")
    if not scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {scheme}")
    if fused:
        check_features(profile, ("dotprod",), ROWS)
    elif "dotprod" in profile.features:
        raise NotApplicable(f"is for devices without dot products; {profile.name} has them")


def _scarce(profile: DeviceProfile) -> bool:
    """Whether a core is out of issue slots before it is out of vector pipes, as N1 is."""
    return not profile.in_order and profile.vector_pipes == 2


def _blocking(
    spec: LinearSpec, layout: SpanLayout, profile: DeviceProfile, m_tile: int, decide: Decide
) -> SpanBlocking:
    # Two streams share the loads of x, and copy what their sums begin at.
    short = m_tile == 1 and isinstance(layout, NonlinearLayout)
    choices = (2, 1) if short and _scarce(profile) else (1, 2)
    streams = choose_streams(decide, choices, layout.row_blocks(spec.n))
    run = _run(spec, layout, profile) if m_tile == 1 else 1
    several = isinstance(layout, NonlinearLayout) and run == 1
    step = decide("step", (2, 1, 4)) if several else 1
    return SpanBlocking(m_tile, streams, step, run)


def _run(spec: LinearSpec, layout: SpanLayout, profile: DeviceProfile) -> int:
    """Groups of a non-uniform table that written assembly computes at once, or 1."""
    in_order = profile.in_order and "dotprod" in profile.features
    if not in_order or not isinstance(layout, NonlinearLayout):
        return 1
    run = written_groups(layout.group // UNIT_K, layout.groups(spec.k))
    dot = _lookup(layout, profile).dot(1, run * layout.span)
    return run if is_in_order(dot) else 1


def _prepare(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Preparation:
    layout = _layout(spec)
    lookup, padded = _lookup(layout, profile), layout.padded_k(spec.k)
    kind = type(lookup.dot(1, layout.span))
    sve = kind is BookDot and "sve" in profile.features
    factor = books_scaling(sve).factor if kind is BookDot else _FACTORS[kind]
    rows = max(1, ELEMENTS_PER_TASK // spec.k)
    short = kind is UnitsDot
    func = quantize_extra(spec.k, padded, layout.group, lookup.acts, factor, rows, short)
    name = (
        f"quantize_{_FACTOR_NAMES[kind]}{'_sve' if sve else ''}_k{spec.k}p{padded}g{layout.group}"
    )
    return Preparation(name, func)


def schedule_extra(func: Any, profile: DeviceProfile, decide: Decide) -> Any:
    """The rule of `apq_tvm.ops.activations.extra`, as `schedule_bundles`."""
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

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        layout = _layout(spec)
        blocking = _blocking(spec, layout, profile, m_tile, decide)
        return lookup_spans(spec, layout, _lookup(layout, profile), blocking)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        layout = _layout(spec)
        run = _blocking(spec, layout, profile, m_tile, decide).run  # asked as `func` did
        lookup = _lookup(layout, profile)
        short = layout.padded_k(spec.k) % layout.span

        def intrinsic(block: str) -> str:
            k = short if block.startswith("tail") else layout.span * run
            return _intrinsic(lookup.dot(m_tile, k), profile, decide)

        schedule_spans(sch, intrinsic, spec.n * spec.k >= PARALLEL)

    return legacy(
        name=f"{family}_A8_{'sdot' if fused else 'smull'}_r{ROWS}m{m_tile}",
        m_min=m_tile,
        m_max=-1,
        check=lambda spec, profile: _check(spec, profile, family, fused),
        layout=lambda spec, _: _layout(spec),
        func=func,
        schedule=schedule,
        family=family,
        prepare=_prepare,
    )


LOOKUP_KERNELS: tuple[LinearKernel, ...] = tuple(
    lookup_kernel(family, fused, m_tile)
    for family in (codebook.NAME, nonlinear.NAME, superblock.NAME)
    for fused in (True, False)
    for m_tile in M_TILES
)
"""In order of preference: where several fit, larger M tiles take over as M grows."""

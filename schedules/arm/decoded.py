"""Kernels on Arm for many rows of x and formats whose weights decode to int8, a panel a call.

Decisions are those of `apq_tvm.schedules.arm.gemm`. What is exact in an int8 depends on the format:

- values of a fixed table, centroids of any-precision weights, digits of ``W2*``: one scale a group;
- codes of super-blocks times their sub-scales, at most 105: sub-scales are in the panel, and minima
  are taken off in a loop of their own, as floats times what activations mean;
- centroids of codebooks, whose product with a sub-scale would not fit: sub-scales are factors;
- codes of ``mixed24`` less their zero points, each group of 16 with a factor;
- signs of binary codes, plane by plane.

Scales of activations by groups of 16 are what costs codebooks and super-blocks most: a subtraction
and two products of floats for every two smmla.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import (
    UNIT_K,
    BalanceLayout,
    BcqLayout,
    CodebookLayout,
    MixedLayout,
    NonlinearLayout,
    PlanesLayout,
    SuperBlockLayout,
    WeightLayout,
    default_layout,
)
from apq_tvm.codegen.layouts.codebook_quads import CodebookQuads
from apq_tvm.errors import NotApplicable
from apq_tvm.formats import codebook, nonlinear, superblock
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.panel_formats import (
    BalancePanel,
    BooksPanel,
    NonlinearPanel,
    PlanesPanel,
    SignsPanel,
    SuperPanel,
)
from apq_tvm.ops.many_rows.panel_mixed import MixedPanel, mixed_gemm
from apq_tvm.ops.many_rows.panels import PanelFormat, panel_gemm
from apq_tvm.schedules.arm.gemm import (
    LANES,
    GemmPlan,
    TileShape,
    blocking,
    prepare_rows,
    schedule_centred,
    tensorize,
    tuning,
)
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.schedules.linear.spans import WEIGHTS
from apq_tvm.tensorize.arm.decoded import decode_intrinsic
from apq_tvm.tensorize.arm.gemm import SDOT, SMMLA, GemmInstruction, centred_intrinsic
from apq_tvm.tensorize.arm.gemm_panel import scales_intrinsic
from apq_tvm.tensorize.meaning.codebook_quads import QUAD
from apq_tvm.types import DeviceProfile

_INT32_MAX = 2**31 - 1
_ACT_MAX = 127

Formats = Callable[[Any, LinearSpec, int], PanelFormat]


def _planes_panel(layout: PlanesLayout, spec: LinearSpec, width: int) -> PanelFormat:
    assert spec.scheme is not None
    return PlanesPanel(layout, spec.k, width, spec.scheme.act_group)


_FORMATS: dict[type[WeightLayout], Formats] = {
    NonlinearLayout: lambda layout, spec, width: NonlinearPanel(layout, spec.k),
    BalanceLayout: lambda layout, spec, width: BalancePanel(layout, spec.k),
    PlanesLayout: _planes_panel,
    MixedLayout: lambda layout, spec, width: MixedPanel(layout, spec.k),
    BcqLayout: lambda layout, spec, width: SignsPanel(layout, spec.k),
    SuperBlockLayout: lambda layout, spec, width: SuperPanel(layout, spec.k),
    CodebookQuads: lambda layout, spec, width: BooksPanel(layout, spec.k),
    CodebookLayout: lambda layout, spec, width: BooksPanel(layout, spec.k),
}


def _layout(spec: LinearSpec) -> WeightLayout:
    return default_layout(spec.scheme, spec.details, 4 * LANES)


def _panel(spec: LinearSpec, width: int) -> PanelFormat:
    layout = _layout(spec)
    return _FORMATS[type(layout)](layout, spec, width)


def _tile(instruction: GemmInstruction, panel: PanelFormat) -> TileShape:
    """As `apq_tvm.schedules.arm.gemm` has them; 12 rows that share their codes stay together."""
    vectors, whole = panel.units[0].vectors, panel.weights.whole
    if instruction is SMMLA:
        if not whole:
            return TileShape(8, 3, 2) if 3 % vectors == 0 else TileShape(8, 6, 4)
        return TileShape(8, max(2, vectors))
    return TileShape(4, max(2, vectors))


def _unit_k(panel: PanelFormat) -> int:
    return max(UNIT_K, panel.units[0].k)


def _check(
    spec: LinearSpec,
    profile: DeviceProfile,
    family: str,
    width: int,
    instruction: GemmInstruction,
) -> None:
    scheme = spec.scheme
    if scheme is None or scheme.family != family:
        raise NotApplicable(f"is for {family}, not {scheme or 'float32'}")
    if not scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {scheme}")
    if width and width not in scheme.widths:
        raise NotApplicable(f"is for {width} bits, not {scheme}")
    check_features(profile, instruction.features, LANES)
    layout = _layout(spec)
    if type(layout) not in _FORMATS:
        raise NotApplicable(f"weights in layout {layout.name} are not decoded to int8")
    if isinstance(layout, CodebookLayout):
        _check_books(layout, spec)
    if isinstance(layout, MixedLayout) and not layout.one_stream:
        raise NotApplicable(f"is for a quarter of 4-bit groups, not {scheme}")
    if isinstance(layout, PlanesLayout) and layout.padded_k(spec.k) % max(1, scheme.act_group):
        raise NotApplicable(f"K={spec.k}: a group of {scheme.act_group} activations is not full")
    panel = _panel(spec, width)
    if isinstance(panel, SignsPanel) and panel.weights.groups == 1:
        raise NotApplicable(f"K={spec.k}: is for planes whose rows have several groups")
    weights = panel.weights
    if weights.group * weights.largest * _ACT_MAX > _INT32_MAX:
        raise NotApplicable(f"K={spec.k}: the sum of {weights.group} products may exceed int32")


def _check_books(layout: CodebookLayout, spec: LinearSpec) -> None:
    if not BooksPanel.holds(layout):
        raise NotApplicable(f"is for four codebooks in groups of 16, not {spec.scheme}")
    if layout.padded_k(spec.k) % QUAD:
        raise NotApplicable(f"decodes {QUAD} columns at once; K={spec.k} has half of that left")


def panel_kernel(
    family: str, instruction: GemmInstruction, m_min: int, width: int = 0
) -> LinearKernel:
    """The record of one GEMM.

    Parameters
    ----------
    family : str
    instruction : GemmInstruction
    m_min : int
        Fewest rows of x.
    width : int
        Bits that are chosen at run time, else 0.
    """

    def ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmPlan:
        panel = _panel(spec, width)
        shape, weights = _tile(instruction, panel), panel.weights
        bl = blocking(spec, weights, profile, shape, decide, _unit_k(panel))
        tuned = tuning(weights, profile, instruction.pairs, shape.parts, decide)
        tile = shape.tile(bl.k_step, instruction.pairs)
        return GemmPlan(bl, tuned, tile, centred_intrinsic(instruction, tile, weights.largest))

    def func(choice: Choice) -> Any:
        spec, plan = choice.spec, choice.plan
        panel = _panel(spec, width)
        if isinstance(panel, MixedPanel):
            return mixed_gemm(spec, panel, plan.blocking, plan.tuning)
        return panel_gemm(spec, panel, plan.blocking, plan.tuning)

    def schedule(sch: Any, choice: Choice) -> None:
        panel, tile = _panel(choice.spec, width), choice.plan.tile
        for plane, unit in enumerate(panel.units):
            decode = decode_intrinsic(unit, tile.pairs, "sve" in choice.profile.features)
            tensorize(sch, f"unpack{plane}", decode, len(unit.loops(tile.pairs)))
        schedule_centred(sch, tile, choice.plan.micro, "float32")
        if panel.minima and tile.pairs:
            tensorize(sch, "spread_least", scales_intrinsic("float32"), 2)

    def prepare(choice: Choice) -> Preparation:
        spec = choice.spec
        copy = "outliers" in _layout(spec).shapes(spec.n, spec.k)
        return prepare_rows(spec, 2 if instruction.pairs else 4, _panel(spec, width).minima, copy)

    tile = 8 if instruction is SMMLA else 4
    return LinearKernel(
        "gemm",
        f"{_NAMES[family]}{width or ''}",
        8,
        Instruction(instruction.name, instruction.features, LANES),
        tile - 1 if instruction.pairs else 1,
        check=lambda spec, profile: _check(spec, profile, family, width, instruction),
        layout=lambda spec, _: _layout(spec),
        func=func,
        schedule=schedule,
        ask=ask,
        prepare=prepare,
        family=family,
        width=width,
        m_named=tile,
        m_min=m_min,
    )


_NAMES = {**WEIGHTS, "balance": "W2star", "anyprec": "anyprec", "mixed": "mixed24", "bcq": "bcq"}
"""Weights of each family in the names of its kernels."""

M_MIN = {SMMLA: 8, SDOT: 9}
"""Fewest rows of x, where kernels that decode for a few rows at a time take more cycles. By smull
those take fewer for any number (nl4 on Cortex-A72, llvm-mca 22: 5.8 MACs a cycle against 4.4)."""

_DEAR = 12
"""The same by smmla for ``mixed24``, which takes long to decode."""

_PLANES = 16
"""The same by smmla for binary codes, which take a pass over x for every plane: Neoverse V2 needs
as many cycles for 16 rows as by lookups."""

FAMILIES = (nonlinear.NAME, "balance", codebook.NAME, superblock.NAME)

DECODED_KERNELS: tuple[LinearKernel, ...] = (
    *(
        panel_kernel(family, instruction, m_min)
        for family in FAMILIES
        for instruction, m_min in M_MIN.items()
    ),
    *(
        panel_kernel("anyprec", instruction, m_min, width)
        for instruction, m_min in M_MIN.items()
        for width in range(1, 9)
    ),
    panel_kernel("mixed", SMMLA, _DEAR),
    panel_kernel("mixed", SDOT, M_MIN[SDOT]),
    panel_kernel("bcq", SMMLA, _PLANES),
)
"""In order of preference; before kernels for few rows.

By smmla two planes of binary codes are twice as fast as lookups (g = 128, 128 rows of x, Neoverse
V1: 47.3 MACs a cycle against 21.7); sdot would need as many cycles as lookups take.
"""

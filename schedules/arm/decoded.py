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
from apq_tvm.ops.many_rows.panel_mixed import MixedPanel
from apq_tvm.ops.many_rows.panels import PanelFormat
from apq_tvm.schedules.arm.gemm import LANES, panel_kernel
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.generic import generic_kernels
from apq_tvm.schedules.linear.kernel import LinearKernel
from apq_tvm.schedules.linear.spans import WEIGHTS
from apq_tvm.tensorize.arm.gemm import SDOT, SMMLA, GemmInstruction
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
    return default_layout(spec.scheme, spec.details, LANES)


def _panel(spec: LinearSpec, width: int) -> PanelFormat:
    layout = _layout(spec)
    return _FORMATS[type(layout)](layout, spec, width)


def _check(
    spec: LinearSpec,
    profile: DeviceProfile,
    width: int,
    instruction: GemmInstruction,
) -> None:
    scheme = spec.scheme
    assert scheme is not None
    if not scheme.integer_acts:
        raise NotApplicable(f"is for integer activations, not {scheme}")
    check_features(profile, instruction.features, LANES)
    layout = _layout(spec)
    if isinstance(layout, CodebookLayout):
        _check_books(layout, spec)
    if isinstance(layout, MixedLayout) and not layout.one_stream:
        raise NotApplicable(f"is for a quarter of 4-bit groups, not {scheme}")
    if isinstance(layout, PlanesLayout) and layout.divides(width):
        raise NotApplicable(f"is for tables; cells of 5 bits are divided at {width}")
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


def _kernel(family: str, instruction: GemmInstruction, width: int = 0) -> LinearKernel:
    """Of a family; `width` bits are chosen at run time, else 0."""
    return panel_kernel(
        f"{_NAMES[family]}{width or ''}", instruction, 8 if instruction is SMMLA else 4,
        lambda spec, profile: _check(spec, profile, width, instruction),
        lambda spec: _panel(spec, width), _layout, family=family, width=width,
    )  # fmt: skip


_NAMES = {**WEIGHTS, "balance": "W2star", "anyprec": "anyprec", "mixed": "mixed24", "bcq": "bcq"}
"""Weights of each family in the names of its kernels."""

FAMILIES = (nonlinear.NAME, "balance", codebook.NAME, superblock.NAME)

DECODED_KERNELS: tuple[LinearKernel, ...] = (
    *(_kernel(family, instruction) for family in FAMILIES for instruction in (SMMLA, SDOT)),
    *(
        _kernel("anyprec", instruction, width)
        for instruction in (SMMLA, SDOT)
        for width in range(1, 9)
    ),
    _kernel("mixed", SMMLA),
    _kernel("mixed", SDOT),
    _kernel("bcq", SMMLA),
)
"""In order of preference; before kernels for few rows.

By smmla two planes of binary codes are twice as fast as lookups (g = 128, 128 rows of x, Neoverse
V1: 47.3 MACs a cycle against 21.7); sdot would need as many cycles as lookups take. By smull
kernels that decode for a few rows at a time take fewer cycles for any number of them (nl4 on
Cortex-A72, llvm-mca 22: 5.8 MACs a cycle against 4.4).
"""

GENERIC_KERNELS = generic_kernels(lambda spec, _: _layout(spec))
"""In order of preference, after all others."""

"""Linear kernels of integers on both sides by ``mma.m16n8k32``.

Compute capability 7.5 does the same, of the same fragments, by four ``mma.m8n8k16``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts.fragments import FragmentLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gpu.product import TILE, Product
from apq_tvm.ops.gpu.rows import RowFactors
from apq_tvm.ops.gpu.steps import Steps
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.cuda.quantize import quantize_words
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.tensorize.cuda.functions import call
from apq_tvm.types import DeviceProfile

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Plan:
    """Warps of a block of threads, and chunks of a round of each."""

    warps: int
    chunks: int


def _layout(spec: LinearSpec, profile: DeviceProfile) -> FragmentLayout:
    scheme = spec.scheme
    assert scheme is not None
    return FragmentLayout(scheme.bits, scheme.group_size, scheme.zero_points)


def _check(spec: LinearSpec, profile: DeviceProfile) -> None:
    scheme = spec.scheme
    assert scheme is not None
    if not 2 <= scheme.act_bits <= 8:
        raise NotApplicable(f"is for activations of 2 to 8 bits, not {scheme}")
    if scheme.group_size == 16:
        raise NotApplicable("a step is of 32 columns, and groups of 16 have a scale each")
    width, largest = _layout(spec, profile).group_width(spec.k), (1 << scheme.bits) - 1
    if 2 * width * largest * 127 > _INT32_MAX:
        raise NotApplicable(
            f"K={spec.k}: {width} products of W{scheme.bits} codes may exceed int32; use groups"
        )


def _ask(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Plan:
    """No more warps than there are chunks, no more chunks in a round than a warp has."""
    layout = _layout(spec, profile)
    chunks = layout.padded_k(spec.k) // layout.chunk_k
    warps = decide("warps", [w for w in (8, 4, 2, 1, 16) if w <= chunks] or [1])
    own = chunks // warps
    return Plan(warps, decide("chunks", [c for c in (4, 2, 1, 8) if c <= own] or [1]))


def _factors(choice: Choice, tiles: int) -> RowFactors:
    spec, scheme = choice.spec, choice.spec.scheme
    assert scheme is not None
    steps = Steps(_layout(spec, choice.profile), tiles)
    return RowFactors(steps, spec.k, scheme.act_group, spec.centres)


def _kernel(bits: int, tiles: int, least: int) -> LinearKernel:
    """The kernel of `bits` for `least` and more rows of x."""

    def func(choice: Choice) -> Any:
        plan = choice.plan
        return Product(choice.spec, _factors(choice, tiles), plan.warps, plan.chunks, call).build()

    def prepare(choice: Choice) -> Preparation:
        return quantize_words(choice.spec, _factors(choice, tiles))

    kind = "gemv" if tiles == 1 else "gemm"
    return LinearKernel(
        kind, f"W{bits}", 8, Instruction("imma16832", (), 16), least,
        check=_check, layout=_layout, func=func, schedule=lambda sch, choice: None, ask=_ask,
        prepare=prepare, bits=bits, m_named=TILE * tiles,
    )  # fmt: skip


MMA_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(bits, tiles, least) for bits in range(1, 9) for tiles, least in ((4, 9), (1, 1))
)
"""In order of preference."""

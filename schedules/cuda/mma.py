"""Linear kernels of integers on both sides by ``mma.m16n8k32``.

Compute capability 7.5 does the same, of the same fragments, by four ``mma.m8n8k16``.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gpu.product import TILE, Product
from apq_tvm.ops.gpu.rows import RowFactors
from apq_tvm.ops.gpu.steps import Steps
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.cuda.fragments import WEIGHTS, Weights, ask_plan, layout_of
from apq_tvm.schedules.cuda.quantize import quantize_words
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.tensorize.cuda.functions import call
from apq_tvm.types import DeviceProfile

_INT32_MAX = 2**31 - 1


def _check(spec: LinearSpec, profile: DeviceProfile) -> None:
    scheme = spec.scheme
    assert scheme is not None
    if not 2 <= scheme.act_bits <= 8:
        raise NotApplicable(f"is for activations of 2 to 8 bits, not {scheme}")
    if scheme.group_size == 16:
        raise NotApplicable("a step is of 32 columns, and groups of 16 have a scale each")
    layout = layout_of(spec, profile)
    width, largest = layout.group_width(spec.k), (1 << layout.bits) - 1
    if 2 * width * largest * 127 > _INT32_MAX:
        raise NotApplicable(
            f"K={spec.k}: {width} products of {layout.weights} codes may exceed int32; use groups"
        )


def _factors(choice: Choice, tiles: int) -> RowFactors:
    spec, scheme = choice.spec, choice.spec.scheme
    assert scheme is not None
    steps = Steps(layout_of(spec, choice.profile), tiles)
    return RowFactors(steps, spec.k, scheme.act_group, spec.centres)


def _kernel(weights: Weights, tiles: int, stacked: int, least: int) -> LinearKernel:
    """The kernel of such weights for `least` and more rows of x."""

    def func(choice: Choice) -> Any:
        return Product(choice.spec, _factors(choice, tiles), choice.plan, call).build()

    def prepare(choice: Choice) -> Preparation:
        return quantize_words(choice.spec, _factors(choice, tiles))

    kind = "gemv" if tiles == 1 else "gemm"
    return LinearKernel(
        kind, weights.name, 8, Instruction("imma16832", (), weights.rows * stacked), least,
        check=_check, layout=layout_of, func=func, schedule=lambda sch, choice: None,
        ask=lambda spec, profile, decide: ask_plan(spec, profile, decide, tiles, stacked),
        prepare=prepare,
        bits=weights.bits, family=weights.family, m_named=TILE * tiles,
    )  # fmt: skip


def _shares(weights: Weights) -> tuple[tuple[int, int, int], ...]:
    """Tiles of x and blocks of weights of a warp, and from how many rows of x on; thirds of a block
    share what is read of x already."""
    stacked = ((weights.many, 2, 33),) if weights.family == "int" else ()
    return (*stacked, (weights.many, 1, 9), (1, 1, 1))


MMA_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(weights, *share) for weights in WEIGHTS for share in _shares(weights)
)
"""In order of preference."""

"""Linear kernels of planes of bits on both sides by ``mma.m16n8k256``.

Any bits of weights and of activations (ABQ-LLM, section 3.4). A unit of 256 columns costs a product
for each plane of weights, times as many as rows of x have planes in eights; by int8 it costs eight.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.gpu.bit_product import COLUMNS, BitProduct
from apq_tvm.ops.gpu.planes import PlaneFactors, planes_of
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.cuda.fragments import (
    WEIGHTS,
    Weights,
    ask_plan,
    check_planes,
    layout_of,
    pays,
)
from apq_tvm.schedules.cuda.native import B1_AND
from apq_tvm.schedules.cuda.quantize import quantize_planes
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel, Preparation
from apq_tvm.tensorize.cuda.functions import call
from apq_tvm.types import DeviceProfile

_INT32_MAX = 2**31 - 1


def _kernel(weights: Weights, planes: int, tiles: int) -> LinearKernel:
    """The kernel of such weights for `planes` of x, and rows that fill so many tiles."""
    tile = COLUMNS // planes

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        scheme = spec.scheme
        assert scheme is not None
        check_planes(scheme, profile)
        if planes_of(scheme.act_bits) != planes:
            raise NotApplicable(f"is for {planes} planes of activations, not {scheme}")
        if tiles > 1 and scheme.group_size == 128 and scheme.act_bits > 1:
            raise NotApplicable("groups of 128 are scaled too often: int8 is less work")
        layout = layout_of(spec, profile)
        if layout.group_width(spec.k) * ((1 << layout.bits) - 1) << planes > _INT32_MAX:
            raise NotApplicable(f"K={spec.k}: products of {scheme} may exceed int32; use groups")

    def factors(choice: Choice) -> PlaneFactors:
        spec, scheme = choice.spec, choice.spec.scheme
        assert scheme is not None
        layout = layout_of(spec, choice.profile)
        return PlaneFactors(layout, spec.k, scheme.act_group, spec.centres, planes)

    def func(choice: Choice) -> Any:
        return BitProduct(choice.spec, factors(choice), tiles, choice.plan, call).build()

    def prepare(choice: Choice) -> Preparation:
        return quantize_planes(choice.spec, factors(choice))

    return LinearKernel(
        "bitserial", weights.name, planes, Instruction("bmma168256", (B1_AND,), weights.rows),
        1 if tiles == 1 else tile + 1,
        check=check, layout=layout_of, func=func, schedule=lambda sch, choice: None,
        ask=lambda spec, profile, decide: ask_plan(spec, profile, decide, tiles), prepare=prepare,
        bits=weights.bits, family=weights.family, m_named=tile * tiles,
    )  # fmt: skip


BIT_KERNELS: tuple[LinearKernel, ...] = tuple(
    _kernel(weights, planes, tiles)
    for weights in WEIGHTS
    for planes in (8, 4, 2)
    for tiles in (weights.many, 1)
    if pays(weights.planes, planes)
)
"""In order of preference; `apq_tvm.schedules.linear.thresholds` knows up to how many rows."""

"""Kernels for many rows of x and weights in any format: a panel decoded to float32, then FMA."""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import WeightLayout, default_layout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.float import DecodedGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.generic import generic_kernels
from apq_tvm.schedules.linear.kernel import Choice, LinearKernel
from apq_tvm.schedules.x86.instructions import FMA
from apq_tvm.schedules.x86.tiles import TALLEST, decoded_blocking, schedule_float_gemm
from apq_tvm.types import DeviceProfile


def _layout(spec: LinearSpec, profile: DeviceProfile) -> WeightLayout:
    """For the longest vectors of floats that kernels have on the device."""
    lanes = next(lanes for lanes, fma in FMA.items() if not fma.lacks(profile.features))
    return default_layout(spec.scheme, spec.details, lanes)


def _blocking(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> GemmBlocking:
    # Decoding costs more than elsewhere: as many rows as the L2 cache holds share a panel.
    return decoded_blocking(spec.k, spec.k, 8, (64, 32, 128, 16), decide)


def decoded_kernel(lanes: int, width: int) -> LinearKernel:
    """The record of one kernel for one run-time width, 0 for formats without a choice."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        if spec.scheme is None:
            raise NotApplicable("the layer's weights are float32")
        check_features(profile, FMA[lanes].features, lanes)
        rows = _layout(spec, profile).rows
        if rows % lanes:
            raise NotApplicable(f"the layout has blocks of {rows} rows, no multiple of {lanes}")

    def func(choice: Choice) -> Any:
        layout = _layout(choice.spec, choice.profile)
        return DecodedGemm(choice.spec, layout, choice.plan, lanes, width).build()

    return LinearKernel(
        "gemm", f"decoded{width or ''}", 32, FMA[lanes], TALLEST,
        check=check, layout=_layout, func=func,
        schedule=lambda sch, choice: schedule_float_gemm(sch, choice.plan, lanes),
        ask=_blocking, prepare=lambda choice: None, family="", width=width,
    )  # fmt: skip


DECODED_KERNELS: tuple[LinearKernel, ...] = tuple(
    decoded_kernel(lanes, width)
    for lanes in (16, 8)
    for width in (range(9) if lanes == 8 else (0,))  # any-precision has blocks of 8 rows
)
"""In order of preference; before `GENERIC_KERNELS`, after what families have of their own."""

GENERIC_KERNELS = generic_kernels(_layout)
"""In order of preference, after all others."""

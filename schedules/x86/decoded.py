"""Kernels for many rows of x and weights in any format: a panel decoded to float32, then FMA."""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import WeightLayout, default_layout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.decoded import decoded_gemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_features
from apq_tvm.schedules.linear.gemm_stages import even_block, schedule_stages
from apq_tvm.schedules.linear.kernel import LinearKernel, legacy
from apq_tvm.schedules.x86.tiles import float_k_step, micro_kernel
from apq_tvm.tensorize.x86.gemm import Tile, float_gemm_intrinsic
from apq_tvm.types import DeviceProfile

M_MIN = 16
"""Fewest rows of x for which decoding a panel to floats is meant to pay."""

_FMA = {8: ("fma", "avx2"), 16: ("avx512f",)}


def _layout(spec: LinearSpec, profile: DeviceProfile) -> WeightLayout:
    return default_layout(spec.scheme, spec.details, profile.vector_bytes)


def _blocking(spec: LinearSpec, decide: Decide) -> GemmBlocking:
    m_tile, vectors = decide("tile", ((4, 3), (5, 2), (3, 4)))
    k_block = even_block(spec.k, 8, decide("k_block", (128, 64, 256, 512)))
    k_step = float_k_step(spec.k, k_block, decide)
    # Decoding costs more than elsewhere: as many rows as the L2 cache holds share a panel.
    return GemmBlocking(m_tile, vectors, k_step, k_block, decide("m_tiles", (64, 32, 128, 16)))


def decoded_kernel(lanes: int, width: int) -> LinearKernel:
    """The record of one kernel for one run-time width, 0 for formats without a choice."""

    def check(spec: LinearSpec, profile: DeviceProfile) -> None:
        if spec.scheme is None:
            raise NotApplicable("the layer's weights are float32")
        check_features(profile, _FMA[lanes], lanes)
        rows = _layout(spec, profile).rows
        if rows % lanes:
            raise NotApplicable(f"the layout has blocks of {rows} rows, no multiple of {lanes}")

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        return decoded_gemm(spec, _layout(spec, profile), _blocking(spec, decide), lanes, width)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        bl = _blocking(spec, decide)
        schedule_stages(sch)
        micro_kernel(sch, float_gemm_intrinsic(Tile(bl.m_tile, bl.vectors, lanes, bl.k_step)), 4)

    return legacy(
        name=f"gemm_decoded_A32_fma_r{lanes}" + (f"_b{width}" if width else ""),
        m_min=M_MIN,
        m_max=-1,
        check=check,
        layout=_layout,
        func=func,
        schedule=schedule,
        family="",
        width=width,
        prepare=lambda spec, profile, decide: None,
    )


DECODED_KERNELS: tuple[LinearKernel, ...] = tuple(
    decoded_kernel(lanes, width) for lanes in (16, 8) for width in range(9)
)
"""In order of preference; before `GENERIC_KERNELS`, after what families have of their own."""

"""Kernels that compute any layer in any format on any target, where no other does."""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import WeightLayout, default_layout
from apq_tvm.ops.linear.decode import decode_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.kernel import LinearKernel, legacy
from apq_tvm.types import DeviceProfile


def _layout(spec: LinearSpec, profile: DeviceProfile) -> WeightLayout:
    return default_layout(spec.scheme, spec.details, profile.vector_bytes)


def schedule_decode(sch: Any) -> None:
    """A row block per task: decode it whole, then one row of x after the other."""
    store, dot, decode = (sch.get_sblock(name) for name in ("store", "dot", "decode"))
    block, row, _ = sch.get_loops(store)
    sch.parallel(block)
    sch.compute_at(dot, row)
    root = sch.get_child_blocks(sch.get_sblock("root"))
    if any(str(sch.get(child).name_hint) == "outliers" for child in root):
        sch.compute_at(sch.get_sblock("outliers"), row)
    sch.compute_at(decode, block)
    *_, lane, k = sch.get_loops(dot)
    sch.reorder(k, lane)
    sch.vectorize(lane)
    *_, lane = sch.get_loops(sch.decompose_reduction(dot, k))
    sch.vectorize(lane)


def decode_kernel(width: int) -> LinearKernel:
    """The kernel for one run-time width, 0 for formats without a choice."""

    def func(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
        return decode_linear(spec, _layout(spec, profile), width)

    def schedule(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
        schedule_decode(sch)

    return legacy(
        name=f"generic_decode_b{width}" if width else "generic_decode",
        m_min=1,
        m_max=-1,
        check=lambda spec, profile: None,
        layout=_layout,
        func=func,
        schedule=schedule,
        family="",
        width=width,
        prepare=lambda spec, profile, decide: None,
    )


GENERIC_KERNELS: tuple[LinearKernel, ...] = tuple(decode_kernel(width) for width in range(9))
"""In order of preference, after all others."""

"""Linear kernels for any CPU, where no other fits: right for every scheme, no intrinsics."""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import FloatLayout, InterleavedLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.interleaved import dense_linear, integer_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_int32, interleaved
from apq_tvm.schedules.linear.kernel import LinearKernel, legacy
from apq_tvm.types import DeviceProfile

LANES = 4
"""Rows interleaved: one 128-bit vector, which every x86-64 and every aarch64 has."""


def _integer_layout(spec: LinearSpec, profile: DeviceProfile) -> InterleavedLayout:
    return interleaved(spec, LANES)


def _check_integer(spec: LinearSpec, profile: DeviceProfile) -> None:
    if spec.scheme is None:
        raise NotApplicable("the layer's weights are float32")
    if spec.scheme.family != "int" or not spec.scheme.integer_acts:
        raise NotApplicable(f"is for integers on both sides, not {spec.scheme}")
    check_int32(spec, LANES)


def _integer(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
    return integer_linear(spec, interleaved(spec, LANES))


def _schedule_integer(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
    store, scale, dot = (sch.get_sblock(name) for name in ("store", "scale", "dot"))
    tile, bundle, *_ = sch.get_loops(store)
    sch.reorder(bundle, tile)
    sch.parallel(bundle)
    sch.compute_at(scale, tile)
    sch.compute_at(dot, tile)


def _check_dense(spec: LinearSpec, profile: DeviceProfile) -> None:
    if spec.scheme is not None:
        raise NotApplicable(f"is for float32 weights, not {spec.scheme}")


def _dense(spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> Any:
    return dense_linear(spec, FloatLayout(LANES))


def _schedule_dense(sch: Any, spec: LinearSpec, profile: DeviceProfile, decide: Decide) -> None:
    store, dot = (sch.get_sblock(name) for name in ("store", "dot"))
    row, block, lane = sch.get_loops(store)
    sch.reorder(block, row)
    sch.parallel(block)
    (sch.vectorize if spec.n % LANES == 0 else sch.unroll)(lane)
    sch.compute_at(dot, row)
    *_, lane, k = sch.get_loops(dot)
    sch.reorder(k, lane)
    sch.vectorize(lane)
    *_, lane = sch.get_loops(sch.decompose_reduction(dot, k))
    sch.vectorize(lane)


PLAIN_KERNELS: tuple[LinearKernel, ...] = (
    legacy(
        "plain_A8_r4", 1, -1, _check_integer, _integer_layout, _integer, _schedule_integer
    ),
    legacy(
        "plain_F32_r4",
        1,
        -1,
        _check_dense,
        lambda spec, profile: FloatLayout(LANES),
        _dense,
        _schedule_dense,
    ),
)
"""In order of preference."""

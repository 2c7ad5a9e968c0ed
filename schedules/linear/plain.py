"""Linear kernels for any CPU, where no other fits: right for every scheme, no intrinsics."""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import FloatLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.interleaved import dense_linear, packed_linear
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.checks import check_float, check_int32, interleaved
from apq_tvm.schedules.linear.generic import vectorize_dot
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.types import DeviceProfile

LANES = 4
"""Rows interleaved: one 128-bit vector, which every x86-64 and every aarch64 has."""

_ANY = Instruction("", (), LANES)


def _check_integer(spec: LinearSpec, profile: DeviceProfile) -> None:
    if spec.scheme is None:
        raise NotApplicable("the layer's weights are float32")
    if spec.scheme.family != "int" or not spec.scheme.integer_acts:
        raise NotApplicable(f"is for integers on both sides, not {spec.scheme}")
    check_int32(spec, LANES)


def _integer(choice: Choice) -> Any:
    spec, layout = choice.spec, interleaved(choice.spec, LANES)
    blocking = Blocking.of(layout, spec.n, spec.k, 1, 1)
    return packed_linear(spec, layout, blocking, UnitDot(layout.unit, 1, "int8"))


def _schedule_integer(sch: Any, choice: Choice) -> None:
    store, scale, dot = (sch.get_sblock(name) for name in ("store", "scale", "dot"))
    tile, bundle, *_ = sch.get_loops(store)
    sch.reorder(bundle, tile)
    sch.parallel(bundle)
    sch.compute_at(scale, tile)
    sch.compute_at(dot, tile)


def _schedule_dense(sch: Any, choice: Choice) -> None:
    store, dot = (sch.get_sblock(name) for name in ("store", "dot"))
    row, block, lane = sch.get_loops(store)
    sch.reorder(block, row)
    sch.parallel(block)
    (sch.vectorize if choice.spec.n % LANES == 0 else sch.unroll)(lane)
    sch.compute_at(dot, row)
    vectorize_dot(sch, dot)


PLAIN_KERNELS: tuple[LinearKernel, ...] = (
    LinearKernel(
        "plain", "", 8, _ANY, 1,
        check=_check_integer, layout=lambda spec, profile: interleaved(spec, LANES),
        func=_integer, schedule=_schedule_integer,
    ),
    LinearKernel(
        "plain", "F32", 0, _ANY, 1,
        check=lambda spec, profile: check_float(spec),
        layout=lambda spec, profile: FloatLayout(LANES),
        func=lambda choice: dense_linear(choice.spec, FloatLayout(LANES)),
        schedule=_schedule_dense,
    ),
)  # fmt: skip
"""In order of preference."""

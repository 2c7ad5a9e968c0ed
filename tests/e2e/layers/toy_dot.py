"""An instruction that no machine has, for `test_new_instruction`: the file that it takes.

``toydot`` multiplies like any dot product of unsigned codes with signed activations; it is written
with vector operations of LLVM, so that it runs anywhere.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.decide import Decide
from apq_tvm.schedules.linear.checks import check_integer
from apq_tvm.schedules.linear.gemv import gemv_kernel
from apq_tvm.schedules.linear.kernel import Instruction
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.meaning.scaffold import Bound
from apq_tvm.tensorize.pairs.packed_dot import decoded, unit_dot_intrinsic
from apq_tvm.tensorize.x86.dot import four_k
from apq_tvm.types import DeviceProfile

LANES = 8


def add_group(o: Bound, group: int) -> None:
    """Add the products of one group of a unit to its sums: what the instruction does."""
    unit = o.dot.unit
    at = o.sums_at(group, 0)
    total = o.acc[tuple(at)]
    for vector in range(group * unit.vectors, (group + 1) * unit.vectors):
        wide = f"int32x{4 * LANES}"
        codes = tirx.Cast(wide, decoded(unit, o.codes, vector))
        products = codes * tirx.Cast(wide, four_k(o, 0, 4 * vector, unit.rows))
        for k in range(4):
            total = total + _every_fourth(products, k)
    b.buffer_store(o.acc, total, at)


def _every_fourth(vector: Expr, first: int) -> Expr:
    return tirx.Shuffle([vector], [tirx.const(4 * i + first, "int32") for i in range(LANES)])


def _intrinsic(dot: UnitDot, ahead: int) -> str:
    return unit_dot_intrinsic("toydot", dot, add_group, ahead)


def _check(spec: LinearSpec, profile: DeviceProfile) -> None:
    check_integer(spec, profile, ("avx2",), LANES)


def _meaning(layout: InterleavedLayout) -> UnitDot:
    return UnitDot(layout.unit, 1, "int8", 0)


def _streams(decide: Decide, *_: Any) -> int:
    return decide("streams", (1,))


TOY_KERNELS = (
    gemv_kernel(
        Instruction("toydot", ("avx2",), LANES), 4, 8, 1, _check, _meaning, _intrinsic, _streams,
        lambda layout, m_tile: (),
    ),
)  # fmt: skip

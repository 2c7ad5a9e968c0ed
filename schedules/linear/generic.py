"""Kernels that compute any layer in any format on any target, where no other does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.codegen.layouts import WeightLayout
from apq_tvm.ops.linear.decode import decode_linear
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.schedules.linear.kernel import Choice, Instruction, LinearKernel
from apq_tvm.types import DeviceProfile

Layouts = Callable[[LinearSpec, DeviceProfile], WeightLayout]


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
    vectorize_dot(sch, dot)


def vectorize_dot(sch: Any, dot: Any) -> None:
    """Keep the sums of a vector of lanes in a register along K."""
    *_, lane, k = sch.get_loops(dot)
    sch.reorder(k, lane)
    sch.vectorize(lane)
    *_, lane = sch.get_loops(sch.decompose_reduction(dot, k))
    sch.vectorize(lane)


def decode_kernel(width: int, layout: Layouts) -> LinearKernel:
    """The kernel for one run-time width, 0 for formats without a choice."""

    def func(choice: Choice) -> Any:
        return decode_linear(choice.spec, layout(choice.spec, choice.profile), width)

    return LinearKernel(
        "generic", f"decode{width or ''}", 0, Instruction("", (), 0), 1,
        check=lambda spec, profile: None, layout=layout, func=func,
        schedule=lambda sch, choice: schedule_decode(sch), prepare=lambda choice: None,
        family="", width=width,
    )  # fmt: skip


def generic_kernels(layout: Layouts) -> tuple[LinearKernel, ...]:
    """Those of one instruction set, whose table says how weights lie that no other kernel reads."""
    return tuple(decode_kernel(width, layout) for width in range(9))

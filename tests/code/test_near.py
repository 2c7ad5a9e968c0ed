"""Sums of some registers' size stay on the stack: `apq_tvm.codegen.build.near`."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.build.near import keep_near
from apq_tvm.schedules.graph.exprs import collect


def kept(elements: int, at: int | None) -> bool:
    """Whether a buffer of float32 that is used at `at`, or wherever a loop is, stays near."""
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("main")
        y = b.match_buffer(b.arg("y", b.handle()), (64,), "float32")
        sums = b.alloc_buffer((elements,), "float32")
        with b.serial(0, 64) as i:
            index: Any = i if at is None else at
            b.buffer_store(sums, tirx.const(1.0, "float32"), [index])
            b.buffer_store(y, sums[index], [i])
    (alloc,) = collect(keep_near(builder.get()).body, tirx.AllocBuffer)
    return "disable_lower_builtin" in dict(alloc.annotations)


@pytest.mark.parametrize(
    ("elements", "near"), [(255, False), (256, True), (512, True), (513, False)]
)
def test_only_what_tvm_would_take_workspace_for_and_registers_hold(
    elements: int, near: bool
) -> None:
    assert kept(elements, 3) is near


def test_only_where_every_index_is_constant() -> None:
    assert not kept(320, None)

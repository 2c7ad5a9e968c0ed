"""Conditions in loops keep their meaning, whatever TVM does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.build.pipeline import build

Put = Callable[[int], None]


def i32(value: int) -> Any:
    return tirx.const(value, "int32")


def branch(condition: Any, then: Callable[[], None], other: Callable[[], None] | None) -> None:
    with b.If(condition):
        with b.Then():
            then()
        if other is not None:
            with b.Else():
                other()


def inner_in_else(c: Any, i: Any, put: Put) -> None:
    branch(c < 3, lambda: put(1), lambda: branch(tirx.EQ(c, i32(3)), lambda: put(2), None))


def inner_in_then(c: Any, i: Any, put: Put) -> None:
    branch(c < 3, lambda: branch(c < 2, lambda: put(1), None), lambda: put(5))


def inner_beside(c: Any, i: Any, put: Put) -> None:
    def both() -> None:
        put(1)
        branch(c < 2, lambda: put(10), None)

    branch(c < 3, both, None)


def both_whole(c: Any, i: Any, put: Put) -> None:
    branch(c < 2, lambda: put(1), lambda: branch(c < 3, lambda: put(10), lambda: put(4)))


def outer_of_the_loop(c: Any, i: Any, put: Put) -> None:
    branch(i < 4, lambda: put(1), lambda: branch(c < 3, lambda: put(10), None))


WANT: dict[Callable[[Any, Any, Put], None], Callable[[int, int], int]] = {
    inner_in_else: lambda c, i: 1 if c < 3 else 2 if c == 3 else 0,
    inner_in_then: lambda c, i: (1 if c < 2 else 0) if c < 3 else 5,
    inner_beside: lambda c, i: (11 if c < 2 else 1) if c < 3 else 0,
    both_whole: lambda c, i: 1 if c < 2 else 10 if c < 3 else 4,
    outer_of_the_loop: lambda c, i: 1 if i < 4 else 10 if c < 3 else 0,
}


@pytest.mark.parametrize("write", list(WANT), ids=lambda write: write.__name__)
def test_conditions_that_a_loop_does_not_change(write: Callable[[Any, Any, Put], None]) -> None:
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("f")
        b.func_attr({"global_symbol": "f"})
        c = b.arg("c", tirx.Var("c", "int32"))
        y = b.arg("y", b.buffer((8,), "int32"))
        with b.serial(0, 8) as i:
            write(c, i, lambda value: b.buffer_store(y, y[i] + i32(value), [i]))
    call = build(tvm.IRModule({"f": builder.get()}), tvm.target.Target("llvm"))["f"]
    for value in range(5):
        found = tvm.runtime.tensor(np.zeros(8, np.int32))
        call(value, found)
        assert found.numpy().tolist() == [WANT[write](value, i) for i in range(8)]

"""Calls are compared with the kernels they call, once, when a module is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tvm.script import tirx as T

from apq_tvm.codegen.graph.check_calls import check_call
from apq_tvm.codegen.graph.plain import Place, Tensor
from apq_tvm.errors import BuildError


@T.prim_func(s_tir=True)
def scale(a: T.handle, factor: T.int64, b: T.handle) -> None:
    m = T.int64()
    x = T.match_buffer(a, (m, 4), "float32")
    y = T.match_buffer(b, (m, 4), "float32")
    for i, j in T.grid(m, 4):
        with T.sblock("scale"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = x[vi, vj] * T.Cast("float32", factor)


def tensor(dims: Sequence[str] = ("s_m", "4"), dtype: str = "float32") -> Tensor:
    return Tensor(Place.INPUT, 0, dtype, tuple(dims))


@pytest.mark.parametrize("rows", ("s_m", "7", "s_a * s_b"))
def test_what_fits(rows: str) -> None:
    check_call("scale", scale, (tensor((rows, "4")), "3", tensor()))


@pytest.mark.parametrize(
    "args,message",
    (
        ((tensor(), "3"), "takes 3 arguments, not 2"),
        ((tensor(), tensor(), tensor()), "argument 1: a tensor and an integer differ"),
        ((tensor(), "3", "4"), "argument 2: a tensor and an integer differ"),
        ((tensor(("s_m", "5")), "3", tensor()), r"argument 0: wants float32 \[any, 4\], .*, 5\]"),
        ((tensor(), "3", tensor(("4",))), r"argument 2: wants .*, gets float32 \[4\]"),
        ((tensor(dtype="int32"), "3", tensor()), r"argument 0: .* gets int32 \[s_m, 4\]"),
    ),
)
def test_what_does_not(args: Sequence[Tensor | str], message: str) -> None:
    with pytest.raises(BuildError, match=f"kernel scale.*{message}"):
        check_call("scale", scale, args)

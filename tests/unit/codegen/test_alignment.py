"""Kernels of modules take what lies where numpy has it, at multiples of 16 bytes."""

from __future__ import annotations

import re

import pytest
import tvm
from tvm import tirx

from apq_tvm.codegen.build.alignment import ALIGNMENT
from apq_tvm.codegen.build.pipeline import build
from apq_tvm.schedules.devices import find_profile


def more_by_one() -> tirx.PrimFunc:
    """Of 64 floats, by way of scratch."""
    x, y = (tirx.decl_buffer((64,), "float32", name) for name in "xy")
    scratch, i = tirx.decl_buffer((16,), "float32", "scratch"), tirx.Var("i", "int32")
    at, here = (tirx.Ramp(start, tirx.const(1, "int32"), 16) for start in (i * 16, i * 0))
    one = tirx.Broadcast(tirx.const(1, "float32"), 16)
    body = [
        tirx.BufferStore(scratch, tirx.BufferLoad(x, [at]) + one, [here]),
        tirx.BufferStore(y, tirx.BufferLoad(scratch, [here]), [at]),
    ]
    loop = tirx.For(i, tirx.const(0), tirx.const(4), tirx.ForKind.SERIAL, tirx.stmt_seq(*body))
    func = tirx.PrimFunc([x, y], tirx.stmt_seq(tirx.AllocBuffer(scratch), loop))
    return func.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)


@pytest.mark.parametrize(("in_module", "aligned"), [(True, ALIGNMENT), (False, 64)])
def test_vectors_of_arguments(in_module: bool, aligned: int) -> None:
    target = tvm.target.Target(dict(find_profile("znver4").target))
    made = build(tvm.IRModule({"main": more_by_one()}), target, False, in_module)
    code = made.inspect_source("ll")
    found = re.findall(r"(?:load|store) <16 x float>[^\n]*?align (\d+)", code)
    assert found and {*map(int, found)} <= {aligned, 64}
    assert aligned in map(int, found)

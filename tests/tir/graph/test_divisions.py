"""Divisions by variables round down, whatever the signs, and TVM's pass is not asked about them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from built import built
from tvm import tirx
from tvm.script import tirx as T

from apq_tvm.codegen.build.divisions import hide_divisions, lower_hidden
from apq_tvm.schedules.graph.exprs import call_name, collect

VALUES = [*range(-9, 10), 64, -64, 1000]


def divisions(dtype: str) -> Any:
    """Quotients and remainders of two arrays."""
    n = len(VALUES) ** 2

    @T.prim_func(s_tir=True, private=True)
    def func(
        a: T.Buffer((n,), dtype),
        b: T.Buffer((n,), dtype),
        quotients: T.Buffer((n,), dtype),
        rests: T.Buffer((n,), dtype),
    ):
        for i in range(n):
            quotients[i] = a[i] // b[i]
            rests[i] = a[i] % b[i]

    return func


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_round_down(dtype: str) -> None:
    pairs = [(a, b) for a in VALUES for b in VALUES if b]
    pairs += [(0, 1)] * (len(VALUES) ** 2 - len(pairs))
    a, b = np.array(pairs, dtype).T.copy()
    quotients, rests = np.zeros_like(a), np.zeros_like(a)
    built(divisions(dtype), "llvm")(a, b, quotients, rests)
    np.testing.assert_array_equal(quotients, a // b)
    np.testing.assert_array_equal(rests, a % b)


def test_what_tvm_sees_and_what_becomes_of_it() -> None:
    """Of variables nothing is left; of constants and what is surely positive everything."""
    n, m = (tirx.Var(name, "int64") for name in "nm")
    buffer = tirx.decl_buffer((4,), "int64", "b")
    # A call whose argument has a value, too: an expression that no text may be compared with.
    vector = tirx.Broadcast(tirx.const(1, "int32"), 4)
    cast = tirx.reinterpret("int64x2", vector)
    values = (n // m, n % m, n // 5, n // (m % 3 + 1))
    stores = [tirx.BufferStore(buffer, value, [i]) for i, value in enumerate(values)]
    func = tirx.PrimFunc([n, m, buffer], tirx.SeqStmt([*stores, tirx.Evaluate(cast)]))
    hidden = hide_divisions(func)
    kinds = (tirx.FloorDiv, tirx.FloorMod)
    assert [len(collect(hidden.body, kind)) for kind in kinds] == [2, 1]
    lowered = lower_hidden(hidden)
    assert "call_pure_extern" not in {call_name(c) for c in collect(lowered.body, tvm.ir.Call)}
    assert len(collect(lowered.body, tirx.Div)) == 1

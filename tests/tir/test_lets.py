"""Let expressions become slots, with the same results, and only where that is sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import te, tirx  # noqa: E402

from apq_tvm.ops import math  # noqa: E402
from apq_tvm.schedules.graph.lets import spill_lets  # noqa: E402


def nested(value: Any) -> Any:
    return math.tanh(math.gelu(math.silu(math.tanh(value))))


def kernel(of: Any) -> Any:
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), "float32", "x")
    return te.create_prim_func([x, te.compute((n,), lambda i: of(x(i)), "y")])


def run(func: Any, x: np.ndarray) -> np.ndarray:
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    y = tvm.runtime.tensor(np.zeros_like(x))
    tvm.compile(module, target="llvm")["main"](tvm.runtime.tensor(x), y)
    result: np.ndarray = y.numpy()
    return result


def test_nested_functions_keep_their_value() -> None:
    func = spill_lets(kernel(nested))
    assert "T.Let" not in func.script()
    x = np.linspace(-6, 6, 37, dtype=np.float32)
    t = np.tanh(x.astype(np.float64))
    silu = t / (1 + np.exp(-t))
    erf = np.vectorize(__import__("math").erf)(silu / np.sqrt(2))
    np.testing.assert_allclose(run(func, x), np.tanh(silu / 2 * (1 + erf)), atol=2e-6)


def test_a_guarded_let_stays_behind_its_guard() -> None:
    func = kernel(lambda v: tirx.if_then_else(v > 0, math.exp(v), v))
    assert spill_lets(func).script() == func.script()


def test_loops_still_to_be_vectorized_are_left_alone() -> None:
    from tvm import s_tir

    sch = s_tir.Schedule(kernel(math.erf))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    sch.vectorize(sch.split(loop, [None, 8])[1])
    func = sch.mod["main"]
    assert spill_lets(func).script() == func.script()


def test_masked_stores_have_slots_too() -> None:
    """Their values, put back in every pass, kept the compiler busy for minutes."""
    func = kernel(nested)
    x, y = func.params
    at = tirx.Ramp(tirx.const(0, "int64"), tirx.const(1, "int64"), 16)
    mask = tirx.Broadcast(tirx.const(True, "bool"), 16)
    sum_, load = tirx.Var("sum", "float32x16"), x.vload([0], "float32x16")
    stored = tirx.op.masked_store(y, tirx.Let(sum_, load + load, sum_ * sum_), at, mask)
    text = spill_lets(func.with_body(tirx.Evaluate(stored))).script()
    assert "masked_store" in text and "T.Let" not in text

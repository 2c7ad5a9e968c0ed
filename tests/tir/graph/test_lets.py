"""Let expressions become slots, with the same results, and only where that is sound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import te, tirx  # noqa: E402
from tvm.script.ir_builder import IRBuilder  # noqa: E402
from tvm.tirx.script.builder import ir as b  # noqa: E402

from apq_tvm.ops import math  # noqa: E402
from apq_tvm.ops.blocks import argument  # noqa: E402
from apq_tvm.schedules.graph.exprs import collect  # noqa: E402
from apq_tvm.schedules.graph.rewrites.lets import hide_binds, spill_lets  # noqa: E402


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


def guarded(v: Any) -> Any:
    """Guards in guards, and values that both cases of one need."""
    both = nested(v)
    inner = tirx.if_then_else(v < 3, math.exp(both), math.tanh(both) + both)
    return math.silu(tirx.if_then_else(v > 0, math.tanh(inner), inner * both))


def test_a_guarded_let_stays_behind_its_guard() -> None:
    func = spill_lets(kernel(lambda v: tirx.if_then_else(v > 0, math.exp(v), v)))
    text = func.script()
    assert "T.Let" not in text
    assert text.index("if T.float32(0.0) < x[") < text.index("T.float32(89.0)")  # of exp


def test_guards_in_guards_keep_their_value() -> None:
    """Put back in every pass, such a value kept LLVM's front busy for half a minute."""
    func = spill_lets(kernel(guarded))
    assert "T.Let" not in func.script() and len(func.script()) < 20_000
    x = np.linspace(-6, 6, 37, dtype=np.float32)
    t = np.tanh(x.astype(np.float64))
    silu = t / (1 + np.exp(-t))
    erf = np.vectorize(__import__("math").erf)(silu / np.sqrt(2))
    both = np.tanh(silu / 2 * (1 + erf))
    inner = np.where(x < 3, np.exp(both), np.tanh(both) + both)
    outer = np.where(x > 0, np.tanh(inner), inner * both)
    np.testing.assert_allclose(run(func, x), outer / (1 + np.exp(-outer)), atol=5e-6)


def test_a_guard_of_lanes_is_left_alone() -> None:
    func = kernel(nested)
    x, y = func.params
    sum_, load = tirx.Var("sum", "float32x16"), x.vload([0], "float32x16")
    positive = load > tirx.Broadcast(tirx.const(0.0, "float32"), 16)
    let = tirx.Let(sum_, load + load, sum_ * sum_)
    func = func.with_body(y.vstore([0], tirx.if_then_else(positive, let, load)))
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


def flipped(*shape: Any) -> Any:
    """Rows of [n, m] in reverse, by numbers that are bound to a quotient and a sum."""
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("main")
        x, y = (argument(name, shape, "float32") for name in "xy")
        with b.serial(0, shape[0] * shape[1]) as i:
            row = b.bind(i // shape[1])
            turned = b.bind(shape[0] - 1 - row)
            b.buffer_store(y, x[turned, i % shape[1]], [row, i % shape[1]])
    return builder.get()


def test_costly_numbers_of_unknown_sizes_come_out_of_slots() -> None:
    n, m = (tirx.Var(name, "int64") for name in "nm")
    func = flipped(n, m)
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    for unknown in (func, flipped(tirx.const(5, "int64"), m)):
        hidden = hide_binds(unknown)
        assert len(collect(hidden.body, tirx.AllocBuffer)) == 1  # the sum costs nothing
        np.testing.assert_array_equal(run(hidden, x), x[::-1])
    for kept in (func.with_attr("apq.op", "linear"), flipped(n, tirx.const(3, "int64"))):
        assert hide_binds(kept).script() == kept.script()

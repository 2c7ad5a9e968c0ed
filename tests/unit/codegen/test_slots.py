"""Integers that are bound: which come out of slots before LLVM code generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import tirx

from apq_tvm.codegen.build.slots import bind_slots
from apq_tvm.schedules.graph.exprs import collect

BOUND: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "of any value": (lambda m, n: m + n, 1),
    "known to be even": (lambda m, n: m * 16, 0),
    "even, of a quotient": (lambda m, n: (m // n) * 16, 1),
    # In front of the guard it would divide by zero.
    "even, of a guarded quotient": (
        lambda m, n: tirx.if_then_else(n > 0, m // n, tirx.const(0, "int64")) * 16,
        0,
    ),
    "short": (lambda m, n: m, 0),
}


@pytest.mark.parametrize("kind", BOUND)
def test_values(kind: str) -> None:
    value, slots = BOUND[kind]
    m, n, v = (tirx.Var(name, "int64") for name in "mnv")
    body = tirx.SeqStmt([tirx.Bind(v, value(m, n)), tirx.Evaluate(v)])
    made = bind_slots(tirx.PrimFunc([m, n], body)).body
    assert len(collect(made, tirx.AllocBuffer)) == slots
    (bind,) = collect(made, tirx.Bind)
    assert bind.var.same_as(v)

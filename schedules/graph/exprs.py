"""Questions about and small changes to TIR expressions."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from apq_tvm.tensorize.exprs import Expr


def lanes_of(expr: Expr) -> int:
    """Vector lanes of an expression, 1 for a scalar."""
    return int(tvm_ffi.dtype(str(expr.ty)).lanes)


def call_name(call: Any) -> str:
    """Operator of a call without its dialect, e.g. ``exp``; empty for calls of other things."""
    return str(getattr(call.op, "name", "")).rpartition(".")[2]


def collect(node: Any, kind: Any) -> list[Any]:
    """Every node of a kind, children first."""
    found: list[Any] = []

    def keep(value: Any) -> Any:
        found.append(value)
        return value

    tvm_ffi.structural_map(node, (kind, keep))
    return found


def uses(node: Any, var: Any) -> bool:
    """True if `var` occurs in `node`."""
    return any(found.same_as(var) for found in collect(node, tirx.Var))


def substitute(node: Any, var: Any, value: Expr) -> Any:
    """`node` with every use of the scalar `var` replaced."""
    return tvm_ffi.structural_map(node, (tirx.Var, lambda v: value if v.same_as(var) else v))

"""Questions about and small changes to TIR expressions."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from apq_tvm.ops.graph.shapes import substituted
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


def signature(func: Any) -> str:
    """What a function takes, in order: ``float32 [rows, 4], int64``."""

    def kind(param: Any) -> str:
        if not tirx.is_buffer_var(param):
            return str(param.ty)
        dims = [int(dim) if isinstance(dim, tirx.IntImm) else dim for dim in param.shape]
        return f"{param.dtype} {dims}"

    return ", ".join(map(kind, func.params))


def uses(node: Any, var: Any) -> bool:
    """True if `var` occurs in `node`."""
    return any(found.same_as(var) for found in collect(node, tirx.Var))


def substitute(node: Any, var: Any, value: Expr) -> Any:
    """`node` with every use of the scalar `var` replaced."""
    return substituted(node, [(var, value)])


def masked_select(mask: Any, loaded: Any, other: Any) -> Any:
    """``Select(mask, loaded, other)``, where `loaded` is made of loads under `mask`; for x86.

    LLVM 22 holds `mask` for true all over the first value of such a selection, also as the mask of
    a load there, which then reads the whole vector: past the end of the tensor. So the condition is
    written as another value: a lane is also on if it is less than the CRC32 of 0, which is 0.
    LLVM does not compute that, and moves it out of loops.
    """
    lanes, zero, one = lanes_of(mask), tirx.const(0, "int32"), tirx.const(1, "int32")
    crc = tirx.call_llvm_pure_intrin("int32", "llvm.x86.sse42.crc32.32.32", zero, zero)
    never = tirx.LT(tirx.Ramp(zero, one, lanes), tirx.Broadcast(crc, lanes))
    return tirx.Select(tirx.Or(mask, never), loaded, other)

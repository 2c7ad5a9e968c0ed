"""How long a kernel call takes, roughly: decides whether it is worth a team of threads.

The estimate is a C expression of the dimensions, in nanoseconds on one thread: bytes at memory
speed plus arithmetic. Arithmetic comes from the PrimFunc attribute ``apq.work`` or, without it,
from the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tvm import tirx
from tvm.sym import Analyzer

from apq_tvm.codegen.graph.c_expr import c_expr
from apq_tvm.errors import UnsupportedModel

# Rough speeds of one core; only their order of magnitude matters (see NANOSECONDS_PER_THREAD
# in runtime/cpu/launch.c). Bytes lie between a cache (0.01) and memory (0.1).
NS_PER_BYTE = 0.04
NS_PER_FLOP = 0.03
NS_PER_STATEMENT = 0.5
_VECTOR_LANES = 8


def work_of(func: Any, names: Mapping[Any, str], outputs_elements: str, tensor_bytes: str) -> str:
    """Estimate one call.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Attribute ``apq.work`` (int or PrimExpr over the function's own symbols) gives its
        arithmetic operations per element of its last argument; where it has ``apq.work_along`` (an
        argument and an axis), for each entry along that.
    names : mapping of tvm.tirx.Var to str
        C expressions of the function's symbols at this call.
    outputs_elements, tensor_bytes : str
        C expressions: elements of the last argument, bytes of all tensors the call touches.

    Returns
    -------
    str
        A C expression of type double, in nanoseconds.
    """
    memory = f"{NS_PER_BYTE} * (double)({tensor_bytes})"
    attrs = func.attrs or {}
    if "apq.work" in attrs:
        per_element = c_expr(attrs["apq.work"], names)
        return f"{memory} + {NS_PER_FLOP} * (double)({outputs_elements}) * (double)({per_element})"
    statements = c_expr_or_zero(_statements(func), names)
    return f"{memory} + {NS_PER_STATEMENT} * (double)({statements})"


def c_expr_or_zero(expr: Any, names: Mapping[Any, str]) -> str:
    """`c_expr`, or "0" where an extent depends on a loop variable (memory alone then decides)."""
    try:
        return c_expr(expr, names)
    except UnsupportedModel:
        return "0"


def _statements(func: Any) -> Any:
    """How often leaf statements run, vector loops counted by the vector."""
    total: Any = tirx.IntImm("int64", 0)
    for times in _leaves(func.body, tirx.IntImm("int64", 1)):
        total = total + times
    return Analyzer().simplify(total)


def _leaves(stmt: Any, times: Any) -> Iterator[Any]:
    if isinstance(stmt, tirx.For):
        extent = tirx.Cast("int64", stmt.extent)
        if stmt.kind == tirx.ForKind.VECTORIZED:
            extent = tirx.floordiv(extent + _VECTOR_LANES - 1, _VECTOR_LANES)
        yield from _leaves(stmt.body, times * extent)
    elif isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _leaves(part, times)
    elif isinstance(stmt, tirx.IfThenElse):
        yield from _leaves(stmt.then_case, times)
    elif hasattr(stmt, "block"):  # SBlockRealize
        yield from _leaves(stmt.block.body, times)
    elif isinstance(getattr(stmt, "body", None), tirx.Stmt):
        yield from _leaves(stmt.body, times)
    elif isinstance(stmt, tirx.BufferStore | tirx.Evaluate):
        yield times

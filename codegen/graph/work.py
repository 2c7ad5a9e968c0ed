"""How long a kernel call takes, roughly: decides whether it is worth a team of threads.

The estimate is a C expression of the dimensions, in nanoseconds on one thread: bytes at memory
speed plus arithmetic. Arithmetic comes from the PrimFunc attribute ``apq.work`` or, without it,
from the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from tvm import DataType, tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_map

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


def nanoseconds(func: Any, shapes: Sequence[Sequence[int]]) -> float:
    """What `work_of` comes to for a function whose arguments, all tensors, have these shapes."""
    known = {
        dim: tirx.const(size, "int64")
        for buffer, shape in zip(func.params, shapes, strict=True)
        for dim, size in zip(buffer.shape, shape, strict=True)
        if isinstance(dim, tirx.Var)
    }

    def number(expr: Any) -> int:
        value = Analyzer().simplify(structural_map(expr, (tirx.Var, lambda v: known.get(v, v))))
        return int(value) if isinstance(value, tirx.IntImm) else 0

    sizes = [prod(shape) for shape in shapes]
    items = [int(DataType(buffer.dtype).itemsize) for buffer in func.params]
    nbytes = sum(size * item for size, item in zip(sizes, items, strict=True))
    attrs = func.attrs or {}
    if "apq.work" not in attrs:
        return NS_PER_BYTE * nbytes + NS_PER_STATEMENT * number(_statements(func))
    each, along = attrs["apq.work"], 1
    if "apq.work_along" in attrs:
        argument, axis = (int(i) for i in attrs["apq.work_along"])
        along = shapes[argument][axis]
    times = each if isinstance(each, int) else number(each)
    return NS_PER_BYTE * nbytes + NS_PER_FLOP * sizes[-1] * times * along


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

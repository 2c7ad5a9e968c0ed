"""How many multiply-adds a kernel call does: what profiles hold against the machine's arithmetic.

Counted in the function as it was before it was scheduled: rounds of reductions that multiply, such
as sums of products. A linear layer's are told by its sizes instead (`apq_tvm.bench.profile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import ir, tirx
from tvm.sym import Analyzer

from apq_tvm.codegen.graph.c_expr import c_expr
from apq_tvm.codegen.graph.calls import symbols_at
from apq_tvm.codegen.graph.plain import Tensor
from apq_tvm.errors import UnsupportedModel
from apq_tvm.schedules.graph.attention.maker import shape_at
from apq_tvm.schedules.graph.exprs import collect

_REDUCE = 2  # IterVar.iter_type


class Products:
    """Counts the multiply-adds of calls; what a function does is found once.

    Parameters
    ----------
    mod : tvm.IRModule
        Unscheduled.
    """

    def __init__(self, mod: Any) -> None:
        self._functions = {v.name_hint: f for v, f in mod.functions.items()}
        self._counts: dict[str, Any] = {}

    def of(self, name: str, args: Sequence[Tensor | str]) -> str:
        """Count those of one call.

        Parameters
        ----------
        name : str
            Of the function.
        args : sequence of Tensor or str
            Of the call.

        Returns
        -------
        str
            A C integer expression; ``"0"`` where extents depend on data or on other loops, and of a
            function that the module does not have.
        """
        func = self._functions.get(name)
        if func is None:
            return "0"
        if func.attrs and "apq.work_along" in func.attrs:
            return _of_attention(func, args)
        if name not in self._counts:
            total: Any = tirx.IntImm("int64", 0)
            for times in _rounds(func.body, tirx.IntImm("int64", 1)):
                total = total + times
            self._counts[name] = Analyzer().simplify(total)
        try:
            return c_expr(self._counts[name], symbols_at(func, args))
        except UnsupportedModel:
            return "0"


def _of_attention(func: Any, args: Sequence[Tensor | str]) -> str:
    """Of each number of q and of y, one with every key (`apq_tvm.ops.graph.attention`)."""
    number, axis = (int(i) for i in func.attrs["apq.work_along"])
    along, y = args[number], args[-1]
    assert isinstance(along, Tensor) and isinstance(y, Tensor)
    symbols = symbols_at(func, args)
    q = [c_expr(extent, symbols) for extent in shape_at(func, 0)]
    sizes = (" * ".join(f"(int64_t){dim}" for dim in dims) for dims in (q, y.dims))
    return f"({' + '.join(sizes)}) * {along.dims[axis]}"


def _rounds(stmt: Any, times: Any) -> Iterator[Any]:
    """How often each reduction that multiplies runs."""
    if isinstance(stmt, tirx.For):
        yield from _rounds(stmt.body, times * tirx.Cast("int64", stmt.extent))
    elif isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _rounds(part, times)
    elif isinstance(stmt, tirx.IfThenElse):
        yield from _rounds(stmt.then_case, times)
    elif hasattr(stmt, "block"):  # SBlockRealize
        if any(int(axis.iter_type) == _REDUCE for axis in stmt.block.iter_vars):
            if _multiplies(stmt.block.body):
                yield times
        else:
            yield from _rounds(stmt.block.body, times)
    elif isinstance(getattr(stmt, "body", None), tirx.Stmt):
        yield from _rounds(stmt.body, times)


def _multiplies(body: Any) -> bool:
    """Whether a value that is stored holds a product, not only the indices of what it loads."""
    for store in collect(body, tirx.BufferStore):
        indices = [collect(load, tirx.Mul) for load in collect(store.value, ir.TensorLoad)]
        if len(collect(store.value, tirx.Mul)) > sum(map(len, indices)):
            return True
    return False

"""Integer expressions of symbolic dimensions, from TVM to C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import ir, tirx

from apq_tvm.errors import UnsupportedModel

_INFIX = {
    tirx.Add: "+",
    tirx.Sub: "-",
    tirx.Mul: "*",
    tirx.EQ: "==",
    tirx.NE: "!=",
    tirx.LT: "<",
    tirx.LE: "<=",
    tirx.GT: ">",
    tirx.GE: ">=",
    tirx.And: "&&",
    tirx.Or: "||",
    tirx.LShift: "<<",
    tirx.RShift: ">>",
}
_CALLS = {
    tirx.FloorDiv: "apq_floordiv",
    tirx.FloorMod: "apq_floormod",
    tirx.Div: "apq_truncdiv",
    tirx.Mod: "apq_truncmod",
    tirx.Min: "apq_min",
    tirx.Max: "apq_max",
}


def c_expr(expr: Any, names: Mapping[Any, str]) -> str:
    """Write an integer expression in C, every operand an ``int64_t``.

    Parameters
    ----------
    expr : tvm.tirx.PrimExpr or int
        What shapes are made of: constants, symbols, arithmetic, comparisons, selects.
    names : mapping of tvm.tirx.Var to str
        C expression of every symbol.

    Returns
    -------
    str
        Parenthesised where needed. Division is by the runtime's ``apq_floordiv`` and its siblings,
        which do not trap.

    Raises
    ------
    UnsupportedModel
        An operator or a symbol that no input binds: the shape depends on data.
    """
    if isinstance(expr, int):
        return str(expr)
    if isinstance(expr, tirx.IntImm):
        return str(int(expr.value))
    if isinstance(expr, tirx.Var):
        if expr not in names:
            raise UnsupportedModel(
                f"the dimension '{expr.name}' does not follow from the shapes of the graph inputs; "
                "shapes that depend on data cannot be compiled"
            )
        return names[expr]
    kind = type(expr)
    if kind in _INFIX:
        return f"({c_expr(expr.a, names)} {_INFIX[kind]} {c_expr(expr.b, names)})"
    if kind in _CALLS:
        return f"{_CALLS[kind]}({c_expr(expr.a, names)}, {c_expr(expr.b, names)})"
    if isinstance(expr, tirx.Cast):
        return c_expr(expr.value, names)
    if isinstance(expr, tirx.Not):
        return f"(!{c_expr(expr.a, names)})"
    if isinstance(expr, tirx.Select):
        parts = (expr.condition, expr.true_value, expr.false_value)
        return "({} ? {} : {})".format(*(c_expr(p, names) for p in parts))
    if isinstance(expr, ir.expr.Call) and getattr(expr.op, "name", "") == "prim.if_then_else":
        return "({} ? {} : {})".format(*(c_expr(a, names) for a in expr.args))
    raise UnsupportedModel(f"the shape expression {expr} cannot be written in C")

"""Loops whose elements come from different places, cut where the place changes.

Concatenation and padding are legalized as ``if_then_else(j < 48, x[j], z[j - 48])`` in one loop
over j. Cut at 48 each part is a plain copy.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from apq_tvm.schedules.graph.exprs import call_name, collect, substitute, uses
from apq_tvm.schedules.graph.rewrites.loops import is_straight
from apq_tvm.tensorize.exprs import Expr, Stmt

_MOST = 3  # cuts of one loop: each doubles nothing, but adds a copy of the body


def is_guard(call: Any) -> bool:
    """Whether a call reads something under a condition alone."""
    return call_name(call) == "if_then_else"


def _conjuncts(condition: Expr) -> list[Expr]:
    if isinstance(condition, tirx.And | tirx.Or):
        return _conjuncts(condition.a) + _conjuncts(condition.b)
    return [condition]


def _cut(test: Expr, var: Any) -> tuple[Expr, bool] | None:
    """Where ``test`` changes along `var`, and its truth from there on."""
    if isinstance(test, tirx.LE | tirx.LT):
        small, large = test.a, test.b
    elif isinstance(test, tirx.GE | tirx.GT):
        small, large = test.b, test.a
    else:
        return None
    found = sym.detect_linear_equation(large - small, [var])
    if not found or not isinstance(found[0], tirx.IntImm) or uses(found[1], var):
        return None
    slope, rest = int(found[0]), found[1]
    strict = isinstance(test, tirx.LT | tirx.GT)
    one = tirx.const(1, str(rest.ty))
    if slope == 1:  # j + rest >= 0 (or > 0)
        return (one - rest if strict else -rest), True
    if slope == -1:  # rest - j >= 0 (or > 0)
        return (rest if strict else rest + one), False
    return None


def _decide(body: Stmt, test: Expr, truth: bool) -> Stmt:
    """`body` with `test` known; conditions and branches that follow are folded."""
    known = tirx.const(truth, "bool")

    def compare(node: Any) -> Any:
        return known if tvm_ffi.structural_equal(node, test) else node

    def both(node: Any) -> Any:
        for here, other in ((node.a, node.b), (node.b, node.a)):
            if isinstance(here, tirx.IntImm):
                return other if bool(int(here)) == isinstance(node, tirx.And) else here
        return node

    def branch(call: Any) -> Any:
        if is_guard(call) and isinstance(call.args[0], tirx.IntImm):
            return call.args[1] if int(call.args[0]) else call.args[2]
        return call

    kinds = (tirx.LE, tirx.LT, tirx.GE, tirx.GT)
    entries = [*((kind, compare) for kind in kinds), (tirx.And, both), (tirx.Or, both)]
    return tvm_ffi.structural_map(body, (*entries, (ir.Call, branch)))


def _split(loop: Any, cuts: int) -> Stmt:
    """Cut `loop` at the first comparison that depends on its variable, then its parts."""
    var, dtype = loop.loop_var, str(loop.loop_var.ty)
    guards = [call.args[0] for call in collect(loop.body, ir.Call) if is_guard(call)]
    tests = [test for guard in guards for test in _conjuncts(guard)]
    for test in tests:
        cut = _cut(test, var) if cuts else None
        if cut is None:
            continue
        simplify = sym.Analyzer().simplify
        point = simplify(tirx.max(tirx.const(0, dtype), tirx.min(cut[0], loop.extent)))
        low = _decide(loop.body, test, not cut[1])
        moved = tirx.Var(var.name, dtype)
        high = substitute(_decide(loop.body, test, cut[1]), var, moved + point)
        parts = ((var, point, low), (moved, simplify(loop.extent - point), high))
        return tirx.stmt_seq(
            *(
                _split(tirx.For(v, tirx.const(0, dtype), n, loop.kind, body), cuts - 1)
                for v, n, body in parts
            )
        )
    return loop


def split_guards(stmt: Stmt) -> Stmt:
    """Cut every innermost serial loop at the guards of its loads.

    Parameters
    ----------
    stmt : Stmt
        Lowered, flat buffers.
    """

    def visit(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.SERIAL or not is_straight(loop.body):
            return loop
        return _split(loop, _MOST)

    return tvm_ffi.structural_map(stmt, (tirx.For, visit))

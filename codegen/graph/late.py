"""What must wait until a run has computed a size.

To TVM a size of data is a parameter of ``main``, known from the start: its passes put what needs it
anywhere. Only what reads the tensor that the size comes from stands behind it for certain; and what
reads a result stands behind the call that fills it, which may be waiting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import ir, relax, tirx

from apq_tvm.codegen.graph.plain import Graph
from apq_tvm.schedules.graph.exprs import collect
from apq_tvm.types import REGION

Filled = Mapping[int, Sequence[Any]]
"""Tensors that a binding's call fills, by the binding's `id`."""

ALLOCATION = "relax.builtin.alloc_tensor"


def filled(bindings: Sequence[Any]) -> Filled:
    """What each call fills: an allocated tensor is first the argument of the call that makes it."""
    calls = [each for each in bindings if isinstance(each.value, ir.expr.Call)]
    empty = {call.var for call in calls if getattr(call.value.op, "name", "") == ALLOCATION}
    made: dict[int, list[Any]] = {}
    for call in calls:
        mine = [arg for arg in call.value.args if isinstance(arg, relax.Var) and arg in empty]
        empty.difference_update(mine)
        made[id(call)] = mine
    return made


def must_wait(
    binding: Any, waiting: Sequence[Any], fills: Filled, graph: Graph, names: Mapping[Any, str]
) -> bool:
    """Whether a binding mentions a size that no step gives as yet, or reads what has to wait.

    Parameters
    ----------
    binding : tvm.relax.Binding
    waiting : sequence of tvm.relax.Binding
        Before it, and not read as yet.
    fills : mapping
        See `filled`.
    graph : Graph
        What was read.
    names : mapping of tvm.tirx.Var to str
        C expressions of the dimensions.
    """
    args = _args(binding.value)
    others = [other for other in waiting if other is not binding]
    late = [var for other in others for var in (other.var, *fills.get(id(other), ()))]
    if any(arg.same_as(var) for arg in args for var in late):
        return True
    if is_sizes(binding.value):
        return False
    given = {name for step in graph.sizes for name in step.names}
    free = set(graph.run_sizes) - given
    return bool(free) and any(_needs(text, free, graph) for text in _dims(binding, args, names))


def is_sizes(value: Any) -> bool:
    """Whether a call stands for ``apq.Sizes``."""
    name = getattr(getattr(value, "op", None), "global_symbol", "")
    return str(name).startswith(f"{REGION}sizes/")


def _args(value: Any) -> list[Any]:
    if isinstance(value, ir.expr.Call):
        return list(value.args)
    if isinstance(value, ir.expr.TupleGetItem):
        return [value.tuple_value]
    return list(value.fields) if isinstance(value, ir.expr.Tuple) else [value]


def _dims(binding: Any, args: Sequence[Any], names: Mapping[Any, str]) -> list[str]:
    """The dimensions that a binding mentions, as C expressions."""
    kinds: list[Any] = [binding.var.ty, getattr(binding, "ty", None)]
    shapes = [getattr(kind, "shape", None) for kind in kinds]
    shapes = [shape for shape in shapes if isinstance(shape, relax.ShapeExpr)]
    found = {var for part in (*args, *shapes) for var in collect(part, tirx.Var)}
    return [names[var] for var in found if var in names]


def _needs(text: str, sizes: set[str], graph: Graph) -> bool:
    words = re.findall(r"\w+", text)
    return any(w in sizes or _needs(graph.derived.get(w, ""), sizes, graph) for w in words)

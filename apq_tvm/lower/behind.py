"""Preparations of x move into the function that makes x, where one function can do both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from apq_tvm.errors import NotApplicable
from apq_tvm.lower.mutate import rewritten
from apq_tvm.lower.operators.reshape import reshape

if TYPE_CHECKING:
    from apq_tvm.schedules.linear.kernel import Preparation


def prepare_behind(mod: tvm.IRModule, preparations: Mapping[str, Preparation]) -> tvm.IRModule:
    """Replace pairs of calls, x and what is done to it, by one call.

    Parameters
    ----------
    mod : tvm.IRModule
        As imported; ``main`` is one dataflow block, or several.
    preparations : mapping of str to Preparation
        By PrimFunc: those that every call needs.

    Returns
    -------
    tvm.IRModule
    """
    if not any(preparation.behind for preparation in preparations.values()):
        return mod
    pairs = _Pairs(mod, preparations)
    return rewritten(pairs, mod) if pairs.both else mod


@relax.expr_functor.mutator
class _Pairs(relax.PyExprMutator):  # type: ignore[misc]
    """What makes x, each with the one preparation of it."""

    def __init__(self, mod: tvm.IRModule, preparations: Mapping[str, Preparation]) -> None:
        super().__init__(mod)
        self._made: dict[Any, tuple[Any, ...]] = {}  # a preparation's variable → its outputs
        bindings = [one for block in mod["main"].body.blocks for one in block.bindings]
        values = {one.var: one.value for one in bindings}
        wanted: dict[Any, list[Any]] = {}
        for one in bindings:
            if (name := called(one.value)) in preparations:
                (x, *weights) = one.value.args[1]
                while isinstance(values.get(x), relax.Call) and _is_reshape(values[x]):
                    x = values[x].args[0]
                wanted.setdefault(x, []).append((one.var, preparations[name], weights))
        self.both: dict[Any, tuple[Any, Any]] = {}
        for x, ((var, preparation, weights), *others) in wanted.items():
            producer = mod[maker] if (maker := called(values.get(x))) else None
            if others or weights or producer is None or preparation.behind is None:
                continue
            try:
                self.both[x] = (var, preparation.behind(producer))
            except NotApplicable:
                continue
        self._prepared = {var: x for x, (var, _) in self.both.items()}

    def visit_var_binding_(self, binding: Any) -> None:
        var, value = binding.var, binding.value
        if var in self.both:
            self._emit_both(var, value)
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self._made:
            self.set_var_remap(var, self._made[value.tuple_value][int(value.index)])
        elif var not in self._prepared:
            super().visit_var_binding_(binding)

    def _emit_both(self, x: Any, value: Any) -> None:
        prepared, func = self.both[x]
        shape = list(x.ty.shape.values)
        rows, columns = reduce(mul, shape[:-1]), shape[-1]
        matrix = relax.ShapeExpr([rows, columns])
        first, *rest = (self.visit_expr(arg) for arg in value.args[1])
        if len(func.params[0].shape) != len(first.ty.shape.values):
            first = self.builder_.emit(reshape(first, matrix))
        whole = len(func.params[1 + len(rest)].shape) == len(shape)
        types = [x.ty if whole else relax.TensorType(matrix, x.ty.dtype), *_types(prepared.ty)]
        variable = self.builder_.add_func(func, str(func.attrs["apq.op"]))
        made = self.builder_.emit(relax.call_tir(variable, [first, *rest], types))
        y, *outputs = (self.builder_.emit(relax.TupleGetItem(made, i)) for i in range(len(types)))
        self._made[prepared] = tuple(outputs)
        shaped = self.builder_.emit(reshape(y, shape))
        self.set_var_remap(x, shaped)


def called(value: Any) -> str:
    """Name of the PrimFunc that is called; ``""`` where none is."""
    is_call = isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_tir")
    return str(value.args[0].name_hint) if is_call else ""


def _is_reshape(value: Any) -> bool:
    return bool(value.op == tvm.ir.Op.get("relax.reshape"))


def _types(type_: Any) -> list[Any]:
    return list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]

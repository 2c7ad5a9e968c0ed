"""Queries and new keys that are made element by element are computed where attention and caches
read them: rotary positions take no function of their own, however a file spells them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from apq_tvm.errors import NotApplicable
from apq_tvm.lower.behind import called
from apq_tvm.lower.mutate import rewritten
from apq_tvm.ops.graph.shapes import substituted
from apq_tvm.schedules.graph.attention.made import Made
from apq_tvm.schedules.graph.attention.maker import with_maker

READ = {"attention": (0, 1), "cache": (1, 2)}
"""By ``apq.op``: the argument that a function can compute by itself, and by how many it may be
read: what a cache takes up is also part of an output, which sessions leave out."""


@tvm.transform.module_pass(opt_level=0, name="apq.WhereRead")  # type: ignore[untyped-decorator]
def where_read(mod: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Replace each such call, and the one that makes what it reads, by one call.

    Parameters
    ----------
    mod : tvm.IRModule
        Fused, unscheduled.

    Returns
    -------
    tvm.IRModule
        The calls that made it are still there, and unused.
    """
    readers = _Readers(mod)
    mod = rewritten(readers, mod)
    used = {variable.name_hint for variable in relax.analysis.all_global_vars(mod["main"])}
    for name in readers.replaced - used:
        del mod[name]
    return mod


@relax.expr_functor.mutator
class _Readers(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._mod = mod
        main = mod["main"]
        bindings = [one for block in main.body.blocks for one in block.bindings]
        self._values = {one.var: one.value for one in bindings}
        uses = Counter[Any]()

        def use(node: Any) -> None:
            if isinstance(node, relax.Var):
                uses[node] += 1

        for one in bindings:
            relax.analysis.post_order_visit(one.value, use)
        relax.analysis.post_order_visit(main.body.body, use)
        self._uses = uses
        self._made: dict[tuple[Any, Any], Any] = {}  # reader, maker → the function of both
        self.replaced: set[str] = set()
        """Names of readers that some call does without."""

    def visit_call_(self, call: Any) -> Any:
        both = self._both(call)
        if both is None:
            return super().visit_call_(call)
        func, args = both
        self.replaced.add(call.args[0].name_hint)
        variable = self.builder_.add_func(func, str(func.attrs["apq.op"]))
        return relax.call_tir(variable, [self.visit_expr(arg) for arg in args], call.ty_args[0])

    def _both(self, call: Any) -> tuple[Any, list[Any]] | None:
        """The function that does both, and its arguments."""
        reader = self._function(call)
        op = str((reader.attrs or {}).get("apq.op", "")) if reader is not None else ""
        if op not in READ or len(call.args) > 2:
            return None
        args, (place, most) = list(call.args[1]), READ[op]
        making: Any = self._values.get(args[place])
        maker = self._function(making)
        if maker is None or self._uses[args[place]] > most or len(making.args) > 2:
            return None
        key = (call.args[0], making.args[0])
        if key not in self._made:
            try:
                self._made[key] = _joined(op, reader, maker)
            except NotApplicable:
                self._made[key] = None
        func = self._made[key]
        return func and (func, [*args[:place], *making.args[1], *args[place + 1 :]])

    def _function(self, value: Any) -> Any:
        """The function that is called; None of everything else."""
        name = called(value)
        return self._mod[name] if name else None


def _joined(op: str, reader: Any, maker: Any) -> Any:
    """One function of what makes and what reads."""
    (place, _), made = READ[op], Made.of(maker)
    if op == "attention":  # a declaration: its schedule computes q
        joined = with_maker(reader, place, maker)
        tensor, axis = (int(n) for n in reader.attrs["apq.work_along"])
        return joined.with_attr("apq.work_along", [tensor + len(made.inputs) - 1, axis])
    new = reader.params[place]
    rest = [*reader.params[:place], *reader.params[place + 1 :]]
    given = {extent for param in rest if tirx.is_buffer_var(param) for extent in param.shape}

    def element(load: Any) -> Any:
        return made.at(load.indices) if load.source.same_as(new) else load

    body = tvm_ffi.structural_map(reader.body, (ir.TensorLoad, element))
    pairs = zip(new.shape, made.shape, strict=True)
    sizes = [pair for pair in pairs if isinstance(pair[0], tirx.Var) and pair[0] not in given]
    return with_maker(reader, place, maker, substituted(body, sizes))

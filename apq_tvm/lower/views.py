"""Constants in the shape that they are read in.

TVM's ``FoldConstant`` compiles a function for each reshape of one, 70 ms, of which a U-Net with
InstanceNormalization has hundreds.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from apq_tvm.lower.mutate import rewritten

VIEWS = frozenset(("relax.reshape", "relax.expand_dims", "relax.squeeze"))


def view_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace each reshape of a constant, before ``LegalizeOps``, by the constant."""
    return rewritten(_Views(mod), mod)


@relax.expr_functor.mutator
class _Views(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._made: dict[Any, Any] = {}  # variable → the constant that it stands for

    def visit_var_binding_(self, binding: Any) -> None:
        var, value = binding.var, binding.value
        if getattr(getattr(value, "op", None), "name", "") in VIEWS:
            source = self._made.get(value.args[0], value.args[0])
            shape = list(getattr(var.ty.shape, "values", ["unknown"]))
            known = all(isinstance(extent, tirx.IntImm) for extent in shape)
            if known and isinstance(source, tvm.ir.GenericConst):
                data = source.value.numpy().reshape([int(extent) for extent in shape])
                made = relax.const(tvm.runtime.tensor(data))
                self._made[var] = made
                self.set_var_remap(var, self.builder_.emit(made))
                return
        super().visit_var_binding_(binding)

"""Constants in the shape that they are read in, and reshapes of reshapes as one.

TVM's ``FoldConstant`` compiles a function for each reshape of a constant, 70 ms, of which a U-Net
with InstanceNormalization has hundreds. Two reshapes of symbolic sizes it fuses to a function that
copies: of a ResNet-50 whose batch is open, the activations between any two convolutions.
"""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.sym import Analyzer

from apq_tvm.lower.mutate import rewritten

VIEWS = frozenset(("relax.reshape", "relax.expand_dims", "relax.squeeze"))


def is_view(value: Any) -> bool:
    """Whether what is bound is another shape of a tensor."""
    return getattr(getattr(value, "op", None), "name", "") in VIEWS


def fold_views(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace each reshape of a constant, before ``LegalizeOps``, by the constant, and each of a
    reshape by one of what that was given, or by that itself."""
    return rewritten(_Views(mod), mod)


@relax.expr_functor.mutator
class _Views(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._made: dict[Any, Any] = {}  # variable → the constant that it stands for

    def visit_var_binding_(self, binding: Any) -> None:
        var, value = binding.var, binding.value
        inner = isinstance(var, relax.DataflowVar)  # an output keeps its variable
        if inner and is_view(value):
            source = self._made.get(value.args[0], value.args[0])
            shape = list(getattr(var.ty.shape, "values", ["unknown"]))
            known = all(isinstance(extent, tirx.IntImm) for extent in shape)
            if known and isinstance(source, tvm.ir.GenericConst):
                data = source.value.numpy().reshape([int(extent) for extent in shape])
                made = relax.const(tvm.runtime.tensor(data))
                self._made[var] = made
                self.set_var_remap(var, self.builder_.emit(made))
                return
            given = self._given(value.args[0])
            if given is not None and (same := _alike(given, var)) is not None:
                view = given if same else self.builder_.emit(relax.op.reshape(given, var.ty.shape))
                self.set_var_remap(var, view)
                return
        super().visit_var_binding_(binding)

    def _given(self, source: Any) -> Any:
        """What a tensor is another shape of; None if it is none, or need not have its size."""
        viewed = self.visit_expr(source)
        value: Any = self.lookup_binding(viewed) if isinstance(viewed, relax.Var) else None
        if not is_view(value):
            return None
        given = value.args[0]
        return given if _alike(given, source) is not None else None


def _alike(a: Any, b: Any) -> bool | None:
    """Whether two tensors of one size have one shape too; None if nothing proves the size."""
    left, right = (getattr(one.ty.shape, "values", None) for one in (a, b))
    if left is None or right is None:
        return None
    prover, one = Analyzer(), tirx.const(1, "int64")
    if not prover.can_prove_equal(reduce(mul, left, one), reduce(mul, right, one)):
        return None
    return len(left) == len(right) and all(
        prover.can_prove_equal(x, y) for x, y in zip(left, right, strict=True)
    )

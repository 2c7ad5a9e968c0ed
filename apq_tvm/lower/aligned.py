"""Reshapes of symbolic sizes, element by element without divisions by what only a run knows.

TVM's own goes through the number of an element in memory: to find its place among axes of symbolic
sizes takes a division of 64 bits each, 20 to 40 cycles, where most axes are only split, by numbers,
or stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import tvm
from tvm import ir, relax, te, tirx, topi

from apq_tvm.lower.mutate import rewritten

Expr = Any
"""Of TVM: an extent, an index."""

VIEW = "apq.view"
"""Attribute of a PrimFunc that is a reshape and nothing else."""

Size = tuple[int, Counter[str]]
"""A number times symbols, or other expressions by their text."""


def legalize_reshape(bb: relax.BlockBuilder, call: Any, derived: Mapping[str, Expr]) -> Any:
    """``relax.reshape`` as a PrimFunc, as ``LegalizeOps`` takes it.

    `derived` has expressions of variables by their names, where those stand for some.
    """
    shape = call.args[1]
    if isinstance(shape, relax.Var):
        shape = bb.lookup_binding(shape)
    extents = list(shape.values)
    given = getattr(call.args[0].ty.shape, "values", None)
    known = all(isinstance(extent, tirx.IntImm) for extent in (*(given or ()), *extents))
    groups = None if given is None or known else alike(list(given), extents, derived)

    def reshaped(x: Any) -> Any:
        if groups is None:
            return topi.reshape(x, extents)
        return te.compute(extents, lambda *index: x(*places(index, groups, len(x.shape))))

    attrs = {VIEW: True}
    return bb.call_te(reshaped, call.args[0], primfunc_name_hint="reshape", primfunc_attrs=attrs)


@tvm.transform.module_pass(opt_level=0, name="apq.ViewsAgain")  # type: ignore[untyped-decorator]
def views_again(mod: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Calls of such PrimFuncs that were fused with nothing, as ``relax.reshape``, which moves none.

    TVM's own pass proves that a function is a reshape, which it cannot of symbolic sizes.
    """
    return rewritten(_Views(mod), mod)


@relax.expr_functor.mutator
class _Views(relax.PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._mod = mod

    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if call.op != ir.Op.get("relax.call_tir"):
            return call
        gv, args = call.args[0], call.args[1]
        if not gv.name_hint.startswith("reshape") or VIEW not in (self._mod[gv].attrs or {}):
            return call
        return relax.op.reshape(args.fields[0], call.ty_args[0].shape)


Group = tuple[list[tuple[int, Expr]], list[tuple[int, Expr]]]
"""Axes of the operand and of the result, with their extents, that hold the same elements."""


def alike(
    given: Sequence[Expr], wanted: Sequence[Expr], derived: Mapping[str, Expr]
) -> list[Group] | None:
    """The smallest groups of neighbouring axes of equal size on both sides; None if there are none.

    Axes of one element are in none.
    """
    left, right = (
        [(i, extent) for i, extent in enumerate(extents) if not _is_one(extent)]
        for extents in (given, wanted)
    )
    groups: list[Group] = []
    while left or right:
        group: Group = ([], [])
        sizes: list[Size] = [(1, Counter()), (1, Counter())]
        while not group[0] or sizes[0] != sizes[1]:
            # The side that is a part of the other gets its next axis.
            side = 0 if not group[0] or _divides(sizes[0], sizes[1]) else 1
            if side and not _divides(sizes[1], sizes[0]):
                return None
            axes = (left, right)[side]
            if not axes:
                return None
            group[side].append(axes.pop(0))
            sizes[side] = _times(sizes[side], _size(group[side][-1][1], derived))
        groups.append(group)
    return groups


def _is_one(extent: Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _size(extent: Expr, derived: Mapping[str, Expr]) -> Size:
    """Factors of an expression."""
    if isinstance(extent, tirx.IntImm):
        return int(extent), Counter()
    if isinstance(extent, tirx.Mul):
        return _times(_size(extent.a, derived), _size(extent.b, derived))
    text = str(extent)
    return _size(derived[text], {}) if text in derived else (1, Counter([text]))


def _times(a: Size, b: Size) -> Size:
    return a[0] * b[0], a[1] + b[1]


def _divides(a: Size, b: Size) -> bool:
    return a[1] <= b[1] and a[0] > 0 and b[0] % a[0] == 0


def places(index: Sequence[Expr], groups: Sequence[Group], rank: int) -> list[Expr]:
    """Where an element of the result lies in the operand."""
    found: list[Expr] = [tirx.const(0, "int64")] * rank
    for given, wanted in groups:
        flat = reduce(
            lambda number, axis: number * axis[1] + index[axis[0]], wanted, tirx.const(0, "int64")
        )
        for axis, extent in reversed(given[1:]):
            found[axis] = flat % extent
            flat = flat // extent
        found[given[0][0]] = flat
    return found

"""How far Relax fuses what is left to it: kernels stay small, however often a value is read."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

INJECTIVE, OPAQUE = 2, 8
"""``op_pattern``: up to the first, results are computed where they are read; the last is alone."""

ALONE = {"op_pattern": OPAQUE}
"""Attributes of a PrimFunc that ``FuseOps`` leaves alone: among others what reads a number beside a
symbol that only an inner buffer binds, on which ``FuseTIR`` fails."""

LARGEST = 1024
"""Operations in an expression; ``FuseTIR`` writes a value out as often as it is read, so that ten
squares, one of the other, have as many."""


def bound_fusion() -> Any:
    """The pass between the patterns' annotation and ``FuseOps``: what would end too large an
    expression stays alone."""
    return tvm.transform.module_pass(_bound, opt_level=0, name="apq.BoundFusion")


def _computed_size(call: Any) -> bool:
    """Whether a function is given a size that is no variable: TVM 0.27's FuseTIR knows none."""
    return any(
        not isinstance(size, tirx.Var)
        for arg in call.args[2:]
        if isinstance(arg, relax.ShapeExpr)
        for size in arg.values
    )


def _recast(mod: Any) -> set[str]:
    """Names of the sizes that a ``match_cast`` says are equal to something else.

    TVM 0.27's FuseTIR writes that in their place where a function is given them as sizes, and then
    fails, since they are no variables any more.
    """
    return {
        name
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding, relax.MatchCast)
        for name in _plain(binding.var) - _plain(binding.value)
    }


def _extents(value: Any) -> list[Any]:
    """Of a tensor, or of all tensors of a tuple; a number has none."""
    kinds = value.ty.fields if isinstance(value.ty, relax.TupleType) else [value.ty]
    return [size for kind in kinds for size in getattr(kind, "shape", None) or ()]


def _plain(value: Any) -> set[str]:
    """Names of the extents that are variables."""
    return {size.name for size in _extents(value) if isinstance(size, tirx.Var)}


def _given(call: Any, recast: set[str]) -> bool:
    """Whether one of these sizes would have to be given to it: no argument has it."""
    if not recast:
        return False
    known = set().union(*(_plain(arg) for arg in call.args[1]))
    needed = {v.name for size in _extents(call) for v in tirx.analysis.undefined_vars(size, [])}
    return bool((needed & recast) - known)


def _bound(mod: Any, _: Any) -> Any:
    sizes: dict[Any, int] = {}
    resized: set[Any] = set()
    recast = _recast(mod)
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call) or call.op != tvm.ir.Op.get("relax.call_tir"):
                continue
            func = mod[call.args[0]]
            pattern = int((func.attrs or {}).get("op_pattern", OPAQUE))
            size = 1 + sum(sizes.get(arg, 1) for arg in call.args[1])
            name = call.args[0].name_hint
            inside = any(arg in resized for arg in call.args[1] if arg in sizes)
            if inside or name.startswith("resize"):
                resized.add(binding.var)
            # Where to read a pixel is found once for all its channels, unless they are turned.
            turned = inside and name.startswith("transpose")
            alone = size > LARGEST or turned or _computed_size(call) or _given(call, recast)
            if alone and pattern != OPAQUE:
                mod[call.args[0]] = func.with_attr("op_pattern", OPAQUE)
            elif pattern <= INJECTIVE:
                sizes[binding.var] = size
    return mod

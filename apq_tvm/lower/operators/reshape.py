"""Reshapes to any shape, also one without elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import relax, tirx


def reshape(x: Any, extents: Iterable[Any]) -> Any:
    """`x` in another shape: where an extent is 0, TVM's own would take the operand's there."""
    shape = relax.ShapeExpr(list(extents))
    if any(isinstance(extent, tirx.IntImm) and extent.value == 0 for extent in shape.values):
        return relax.op.zeros(shape, x.ty.dtype)
    return relax.op.reshape(x, shape)

"""One unit of ``W2*`` codes in TensorIR: R = 3L rows x 32 k, three rows in 7 bits.

`apq_tvm.codegen.layouts.balance` draws the bytes. Shared by the operators, the layout's generic
expression and the plain-loop side of the intrinsics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VECTORS = 8
"""Code vectors of a unit; 7 are stored, the eighth in their top bits."""

STORED = 7

Expr = Any  # tvm is untyped


def triple(load: Callable[[Any], Expr], size: int, vector: Any, lane: Any) -> Expr:
    """7-bit code at one byte of one code vector, as an int32 expression.

    Parameters
    ----------
    load : callable
        Byte of the unit by its index, a uint8 expression.
    size : int
        Bytes of one code vector.
    vector, lane : PrimExpr
        0..7 and 0..size-1.
    """
    from tvm import tirx

    def i32(value: int) -> Expr:
        return tirx.const(value, "int32")

    stored = load(tirx.min(vector, STORED - 1) * size + lane).astype("int32")
    pooled: Expr = i32(0)
    for j in range(STORED):
        top = tirx.shift_right(load(j * size + lane).astype("int32"), i32(7))
        pooled = pooled + tirx.shift_left(top, i32(j))
    return tirx.Select(vector < STORED, tirx.bitwise_and(stored, i32(127)), pooled)


def digit(code: Expr, part: Any) -> Expr:
    """Third `part` (0..2) of a code: ``code // 5^part % 5``, int32."""
    from tvm import tirx

    def i32(value: int) -> Expr:
        return tirx.const(value, "int32")

    fifth, last = tirx.floordiv(code, i32(5)), tirx.floordiv(code, i32(25))
    low = code - fifth * i32(5)
    middle = fifth - last * i32(5)
    return tirx.Select(part == 0, low, tirx.Select(part == 1, middle, last))

"""One unit of ``W2*`` codes in TensorIR: R = 3L rows x 32 k, three rows in 7 bits.

`apq_tvm.codegen.layouts.balance` draws the bytes. Shared by the operators, the layout's generic
expression and the intrinsics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apq_tvm.tensorize.exprs import Expr, i32, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand

PARTS = 3
"""Digits of a code."""

VECTORS = 8
"""Code vectors of a unit; 7 are stored, the eighth in their top bits."""

STORED = 7


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

    stored = load(tirx.min(vector, STORED - 1) * size + lane).astype("int32")
    pooled: Expr = i32(0)
    for j in range(STORED):
        top = tirx.shift_right(load(j * size + lane).astype("int32"), i32(7))
        pooled = pooled + tirx.shift_left(top, i32(j))
    return tirx.Select(vector < STORED, tirx.bitwise_and(stored, i32(127)), pooled)


def digit(code: Expr, part: Any) -> Expr:
    """Third `part` (0..2) of a code: ``code // 5^part % 5``, int32."""
    from tvm import tirx

    fifth, last = tirx.floordiv(code, i32(5)), tirx.floordiv(code, i32(25))
    low = code - fifth * i32(5)
    middle = fifth - last * i32(5)
    return tirx.Select(part == 0, low, tirx.Select(part == 1, middle, last))


def balance_dot(lanes: int, m: int) -> Meaning:
    """``acc[i, part, r] += Σ_k digit(code[r, k], part) x[i, k]``.

    Operands codes uint8 [28L], x int8 [m, 32] and acc int32 [m, 3, L], for L `lanes`; the axis of
    rows of x is left out where there is one.
    """
    rows = (m,) if m > 1 else ()

    def term(axes: Sequence[Expr], codes: Load, x: Load) -> Expr:
        i, part, r, j, c = axes
        code = triple(codes, 4 * lanes, j, r * i64(4) + c)
        return digit(code, part) * x(i, j * i64(4) + c).astype("int32")

    operands = (
        _codes(lanes),
        Operand("x", (*rows, UNIT_K), "int8", 4, strided=m > 1),
        Operand("acc", (*rows, PARTS, lanes), "int32", 4 * lanes),
    )
    return Meaning("dot", operands, (m, PARTS, lanes), (VECTORS, 4), term)


def balance_digits(lanes: int) -> Meaning:
    """``out[part, vector, r, k % 4] = digit(code[r, k], part)``: codes, out uint8 [3, 8, L, 4]."""
    shape = (PARTS, VECTORS, lanes, 4)

    def term(axes: Sequence[Expr], codes: Load) -> Expr:
        part, vector, r, i = axes
        return digit(triple(codes, 4 * lanes, vector, r * 4 + i), part).astype("uint8")

    out = Operand("out", shape, "uint8", 4 * lanes, strided=True, compact=3)
    return Meaning("digits", (_codes(lanes), out), shape, (), term, adds=False, index="int32")


def _codes(lanes: int) -> Operand:
    return Operand("codes", (STORED * 4 * lanes,), "uint8", 4 * lanes)

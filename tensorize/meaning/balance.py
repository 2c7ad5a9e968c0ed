"""One unit of ``W2*`` codes in TensorIR: R = 3L rows x 32 k, three rows in 7 bits.

`apq_tvm.codegen.layouts.balance` draws the bytes. Shared by the operators, the layout's generic
expression and the plain-loop side of the intrinsics, whose scaffold is `BalanceUnit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand
from apq_tvm.tensorize.meaning.interleaved import UNIT_K

PARTS = 3
"""Digits of a code."""

VECTORS = 8
"""Code vectors of a unit; 7 are stored, the eighth in their top bits."""

STORED = 7

Expr = Any  # tvm is untyped
Buffer = Any


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


class BalanceUnit:
    """Emits the pair of one dot product of a unit: operands, loops of the meaning.

    ``acc[i, part, r] += Σ_k digit(code[r, k], part) x[i, k]``; the row axis is left out where there
    is one row of x.

    Parameters
    ----------
    lanes : int
        L.
    m : int
        Rows of x.
    """

    codes: Buffer
    x: Buffer
    acc: Buffer

    def __init__(self, lanes: int, m: int) -> None:
        self.lanes, self.size, self.m = lanes, 4 * lanes, m

    def instructions(self) -> None:
        """Emit the instructions."""
        raise NotImplementedError

    def member(self, instructions: bool) -> Any:
        """PrimFunc (codes uint8 [28L], x int8 [m, 32], acc int32 [m, 3, L])."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as b

        nbytes, rows = STORED * self.size, (self.m,) if self.m > 1 else ()
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("dot")
            self.codes = operand("codes", (nbytes,), "uint8", self.size, None)
            row_stride = ["row_stride", i64(1)] if rows else None
            self.x = operand("x", (*rows, UNIT_K), "int8", 4, row_stride)
            self.acc = operand("acc", (*rows, PARTS, self.lanes), "int32", self.size, None)
            with b.sblock("root"):
                whole = [
                    buffer[tuple(slice(0, extent) for extent in buffer.shape)]
                    for buffer in (self.acc, self.codes, self.x)
                ]
                b.reads(*whole)
                b.writes(whole[0])
                (self.instructions if instructions else self._loops)()
        return builder.get()

    def sums_at(self, row: int, part: int) -> list[Expr]:
        """Index of all lanes of one digit's sums."""
        from tvm import tirx

        return [*self.lead(row), i64(part), tirx.Ramp(i64(0), i64(1), self.lanes)]

    def lead(self, row: int) -> list[Expr]:
        """Index of a row of x, where there are several."""
        return [i64(row)] if self.m > 1 else []

    def _loops(self) -> None:
        from tvm.tirx.script.builder import ir as b

        extents = [*([self.m] if self.m > 1 else []), PARTS, self.lanes, VECTORS, 4]
        kinds = "S" * (len(extents) - 2) + "RR"
        with b.grid(*map(i64, extents)) as loops, b.sblock("dot"):
            *at, j, c = b.axis.remap(kinds, loops)
            *lead, part, r = at
            b.reads(
                self.acc[tuple(at)],
                self.codes[0 : STORED * self.size],
                self.x[(*lead, slice(0, UNIT_K))],
            )
            b.writes(self.acc[tuple(at)])
            code = triple(lambda byte: self.codes[byte], self.size, j, r * i64(4) + c)
            x = self.x[(*lead, j * i64(4) + c)].astype("int32")
            b.buffer_store(self.acc, self.acc[tuple(at)] + digit(code, part) * x, at)

"""The meaning of a scaled dot product of one chunk of packed codes with folded activations.

A chunk is a unit (R rows x 32 k) or several that share a scale: ``y[i, r] += scale[r] xs[i] Σ_k
(code[r, k] - zero[r]) x[i, k]``, rows i of x, with x_k made of the int8 activations as
`apq_tvm.tensorize.meaning.fold` says. What `apq_tvm.ops.activations.fold` knows of a chunk
beforehand comes as floats, four times each: ``starts`` (of the integer sum and of the product with
the scale of the activations; instructions need them, the meaning does not) and ``factors``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, whole
from apq_tvm.tensorize.meaning.fold import Fold
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS, decode

Expr = Any  # tvm is untyped
Buffer = Any

STARTS = 8
"""Floats in ``starts``."""


@dataclass(frozen=True)
class FoldedDot:
    """Shape of one product.

    Parameters
    ----------
    fold : Fold
    m : int
        Rows of x.
    units : int
        Of the chunk.
    """

    fold: Fold
    m: int
    units: int

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums: there are no axes of extent 1."""
        return (*((self.m,) if self.m > 1 else ()), self.fold.unit.rows)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Extents of the axes along k: unit, vector, k of the vector."""
        return (*((self.units,) if self.units > 1 else ()), VECTORS, 4)


@dataclass(frozen=True)
class FoldedOperands:
    """Buffers: codes u8, x i8, starts f32, factors f32, scales f16, zeros u8 or None, sums f32."""

    dot: FoldedDot
    codes: Buffer
    x: Buffer
    starts: Buffer
    factors: Buffer
    scales: Buffer
    zeros: Buffer | None
    acc: Buffer

    def lead(self, row: tuple[Expr, ...] | int, axes: int = 0) -> tuple[Expr, ...]:
        """First indices of what belongs to a row of x, with `axes` more before the last one."""
        if self.dot.m == 1:
            return ()
        return (*(row if isinstance(row, tuple) else (row,)), *([i64(0)] * axes))


def folded_pair(dot: FoldedDot, implement: Callable[[FoldedOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a chunk's product."""
    return _member(dot, _plain_loops), _member(dot, implement)


def term(
    fold: Fold,
    code: Callable[[Expr], Expr],
    x: Callable[[Expr], Expr],
    factors: Callable[[Expr], Expr],
    scale: Expr,
    zero: Expr | None,
    at: tuple[Expr, ...],
) -> Expr:
    """One summand, float32.

    Parameters
    ----------
    fold : Fold
    code : callable
        Byte of the unit's codes by its index.
    x : callable
        int8 activation of the unit by its k, 0..31.
    factors : callable
        Float of the chunk by its index.
    scale, zero : PrimExpr
        Of the row.
    at : tuple of PrimExpr
        (row of the weights, vector, k of the vector).
    """
    from tvm import tirx

    r, j, c = at
    value = decode(fold.unit, code, *fold.unit.place(r, j, c))
    if fold.doubled:
        value = value * tirx.const(2, "int32")
    middle = tirx.const(fold.middle, "int32") if zero is None else zero.astype("int32")
    activation: Expr = tirx.const(0.0, "float32")
    for above in range(fold.parts):
        other = j + i64(above * fold.vectors)
        inside = other < i64(VECTORS)
        part = x(tirx.min(other, i64(VECTORS - 1)) * i64(4) + c).astype("float32")
        part = part * tirx.const(2.0 ** (-fold.width * above), "float32")
        activation = activation + tirx.Select(inside, part, tirx.const(0.0, "float32"))
    factor = factors(r) * tirx.const(float(1 << fold.shift), "float32")
    return (value - middle).astype("float32") * activation * (scale.astype("float32") * factor)


def _member(dot: FoldedDot, body: Callable[[FoldedOperands], None]) -> Any:
    """PrimFunc (codes, x, aux, scales, [zeros,] sums) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    fold, unit = dot.fold, dot.fold.unit
    rows = (dot.m,) if dot.m > 1 else ()

    # Where there are rows, the axes between them and the floats are needed to match.
    def strided(name: str, axes: int = 0) -> Any:
        return [f"{name}{i}" for i in range(1 + axes)] + [i64(1)] if rows else None

    chunk, copy = ((1,), (1, 1)) if rows else ((), ())

    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("folded_dot")
            lead = (dot.units,) if dot.units > 1 else ()
            codes = operand("codes", (*lead, unit.nbytes), "uint8", unit.vector_bytes, None)
            x = operand("x", (*rows, UNIT_K * dot.units), "int8", 4, strided("x_stride"))
            stride = strided("start_stride", 2)
            starts = operand("starts", (*rows, *copy, STARTS), "float32", 4, stride)
            stride = strided("factor_stride", 1)
            factors = operand("factors", (*rows, *chunk, fold.factors), "float32", 4, stride)
            scales = operand("scales", (unit.rows,), "float16", 2 * unit.rows, None)
            zeros = operand("zeros", (unit.rows,), "uint8", unit.rows, None) if fold.zeros else None
            acc = operand("acc", dot.spatial, "float32", unit.vector_bytes, None)
            with b.sblock("root"):
                more = [zeros] if zeros is not None else []
                inputs = [codes, x, starts, factors, scales, *more]
                b.reads(*(whole(buffer) for buffer in (acc, *inputs)))
                b.writes(whole(acc))
                body(FoldedOperands(dot, codes, x, starts, factors, scales, zeros, acc))
    return builder.get()


def _plain_loops(o: FoldedOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    dot = o.dot
    extents = [i64(e) for e in (*dot.spatial, *dot.reduced)]
    with b.grid(*extents) as loops, b.sblock("dot"):
        kinds = "S" * len(dot.spatial) + "R" * len(dot.reduced)
        axes = b.axis.remap(kinds, loops)
        at, (*unit, j, c) = tuple(axes[: len(dot.spatial)]), axes[len(dot.spatial) :]
        row, r = at[:-1], at[-1]
        first = unit[0] * i64(UNIT_K) if unit else i64(0)
        lead = [slice(0, dot.units)] if unit else []
        b.reads(
            o.acc[at],
            o.codes[(*lead, slice(0, dot.fold.unit.nbytes))],
            o.x[(*row, slice(0, UNIT_K * dot.units))],
            o.starts[(*o.lead(row, 2), slice(0, STARTS))],
            o.factors[(*o.lead(row, 1), slice(0, dot.fold.factors))],
            o.scales[r],
            *([o.zeros[r]] if o.zeros is not None else []),
        )
        b.writes(o.acc[at])
        value = term(
            dot.fold,
            lambda byte: o.codes[(*unit, byte)],
            lambda k: o.x[(*row, first + k)],
            lambda i: o.factors[(*o.lead(row, 1), i)],
            o.scales[r],
            None if o.zeros is None else o.zeros[r],
            (r, j, c),
        )
        b.buffer_store(o.acc, o.acc[at] + value, list(at))

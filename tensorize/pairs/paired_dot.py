"""The meaning of a scaled dot product of one chunk as smmla computes it: pairs of rows, 8 k.

As `apq_tvm.tensorize.pairs.folded_dot`, for codes with runs of 8 k
(`apq_tvm.tensorize.meaning.interleaved`). smmla multiplies 2 rows of x by 2 rows of weights:
``sums[r] += Σ_i x[r // 2, i] w[r % 2, i]``. Several rows of x are taken in pairs, and sums stay in
that order. One row is taken as half of a pair whose other row is zeros, in two ways: above the
zeros it meets two rows of weights, below them the next two, and 4 sums share a vector.

Activations of the k from 8o on are 16 bytes, ``16o .. 16o + 15``: of two rows, or 8 zeros and those
of the one row, so that the bytes from ``16o + 8`` on are the row and the zeros that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, whole
from apq_tvm.tensorize.meaning.fold import Fold
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS
from apq_tvm.tensorize.pairs.folded_dot import STARTS, term

Expr = Any  # tvm is untyped
Buffer = Any

BYTES = 16
"""Of activations for 8 k."""


def activation_bytes(k: int, m: int) -> int:
    """Bytes of activations of `k` columns for tiles of `m` rows, of one row or pair."""
    return 2 * k + (BYTES if m == 1 else 0)


@dataclass(frozen=True)
class PairedDot:
    """Shape of one product.

    Parameters
    ----------
    fold : Fold
        Of a unit with runs of 8.
    m : int
        Rows of x: 1 or even.
    units : int
        Of the chunk.
    own : bool
        Whether every vector of sums has its own copy of what it starts from.
    blocks : int
        Row blocks side by side, which share the loads of one row of x.
    """

    fold: Fold
    m: int
    units: int
    own: bool = False
    blocks: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of rows of x; 1 also for one row."""
        return max(1, self.m // 2)

    @property
    def columns(self) -> int:
        """Vectors of sums of one pair."""
        return self.blocks * self.fold.unit.rows // (4 if self.m == 1 else 2)

    @property
    def copies(self) -> int:
        """Copies of what a chunk starts from."""
        return self.columns if self.own else 1

    @property
    def lead(self) -> tuple[int, ...]:
        """Axis of pairs, if there are several."""
        return (self.pairs,) if self.pairs > 1 else ()

    @property
    def beside(self) -> tuple[int, ...]:
        """Axis of row blocks, if there are several."""
        return (self.blocks,) if self.blocks > 1 else ()

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums: there are no axes of extent 1."""
        if self.m == 1:
            return (*self.beside, self.fold.unit.rows)
        return (*self.lead, self.columns, 4)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Extents of the axes along k: unit, four, k of the four."""
        return (*((self.units,) if self.units > 1 else ()), VECTORS, 4)

    def rows(self, at: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], Expr | int, Expr]:
        """(pair if there are several, row in it, row of the block) of a sum."""
        if self.m == 1:
            return (), 1, at[-1]
        *pair, column, r = at
        return tuple(pair), r // 2, column * 2 + r % 2

    def place(self, half: Expr | int, k: Expr) -> Expr:
        """Byte of the activation of column k of one row of a pair."""
        return k // 8 * BYTES + half * 8 + k % 8


@dataclass(frozen=True)
class PairedOperands:
    """Buffers: codes u8, x i8, starts f32, factors f32, scales f16, zeros u8 or None, sums f32."""

    dot: PairedDot
    codes: Buffer
    x: Buffer
    starts: Buffer
    factors: Buffer
    scales: Buffer
    zeros: Buffer | None
    acc: Buffer


def paired_pair(dot: PairedDot, implement: Callable[[PairedOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a chunk's product."""
    return _member(dot, _plain_loops), _member(dot, implement)


def paired_term(
    dot: PairedDot,
    at: tuple[Expr, ...],
    code: Callable[[Expr], Expr],
    x: Callable[[Expr], Expr],
    factors: Callable[[Expr], Expr],
    weights: Callable[[Expr], list[Expr]],
) -> Expr:
    """One summand, float32.

    Parameters
    ----------
    dot : PairedDot
    at : tuple of PrimExpr
        Axes of the sums, then four and k of the four.
    code : callable
        Byte of the unit's codes by its index.
    x : callable
        Byte of the unit's activations by its index.
    factors : callable
        Float of the chunk by its index.
    weights : callable
        Scale and, if there is one, zero point of a row of the block.
    """
    *target, j, c = at
    _, half, r = dot.rows(tuple(target))
    scale, *zero = weights(r)
    return term(
        dot.fold,
        code,
        lambda k: x(dot.place(half, k)),
        lambda _: factors(target[-1] % 4 if dot.m == 1 else target[-1]),
        scale,
        zero[0] if dot.fold.zeros else None,
        (r, j, c),
    )


def _member(dot: PairedDot, body: Callable[[PairedOperands], None]) -> Any:
    """PrimFunc (codes, x, starts, factors, scales, [zeros,] sums) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    fold, unit, lead = dot.fold, dot.fold.unit, dot.lead

    # Where there are pairs, the axes between them and the floats are needed to match.
    def strided(name: str, axes: int = 0) -> Any:
        return [f"{name}{i}" for i in range(1 + axes)] + [i64(1)] if lead else None

    chunk = (1,) if lead else ()
    copies = (dot.copies,) if lead or dot.copies > 1 else ()
    nbytes = activation_bytes(UNIT_K * dot.units, dot.m)
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("paired_dot")
            units = (dot.units,) if dot.units > 1 else ()

            def of_weights(name: str, inner: tuple[int, ...], size: int, dtype: str) -> Buffer:
                """Row blocks side by side are some distance apart."""
                shape, strides = (*inner, size), None
                if dot.blocks > 1:
                    shape = (dot.blocks, *(inner or (1,)), size)
                    strides = [f"{name}_block", f"{name}_group", i64(1)]
                align = unit.vector_bytes if name == "codes" else unit.rows
                return operand(name, shape, dtype, align, strides)

            codes = of_weights("codes", units, unit.nbytes, "uint8")
            x = operand("x", (*lead, nbytes), "int8", 4, strided("x_stride"))
            stride = strided("start_stride", 2)
            starts = operand("starts", (*lead, *chunk, *copies, STARTS), "float32", 4, stride)
            stride = strided("factor_stride", 1)
            factors = operand("factors", (*lead, *chunk, fold.factors), "float32", 4, stride)
            scales = of_weights("scales", (), unit.rows, "float16")
            zeros = of_weights("zeros", (), unit.rows, "uint8") if fold.zeros else None
            acc = operand("acc", dot.spatial, "float32", 16, None)
            with b.sblock("root"):
                more = [zeros] if zeros is not None else []
                inputs = [codes, x, starts, factors, scales, *more]
                b.reads(*(whole(buffer) for buffer in (acc, *inputs)))
                b.writes(whole(acc))
                body(PairedOperands(dot, codes, x, starts, factors, scales, zeros, acc))
    return builder.get()


def _plain_loops(o: PairedOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    dot = o.dot
    extents = [i64(e) for e in (*dot.spatial, *dot.reduced)]
    with b.grid(*extents) as loops, b.sblock("dot"):
        kinds = "S" * len(dot.spatial) + "R" * len(dot.reduced)
        axes = b.axis.remap(kinds, loops)
        at, (*unit, j, c) = tuple(axes[: len(dot.spatial)]), axes[len(dot.spatial) :]
        pair, _, r = dot.rows(at)
        chunk = [i64(0)] if pair else []
        block, group = list(at[: len(dot.beside)]), [i64(0)] if dot.beside else []
        copies = [slice(0, dot.copies)] if len(o.starts.shape) > 1 else []
        first = unit[0] * i64(2 * UNIT_K) if unit else i64(0)
        lead = [slice(0, dot.units)] if unit else group
        row = (*block, *group, r)
        weights = [o.scales[row], *([o.zeros[row]] if o.zeros is not None else [])]
        b.reads(
            o.acc[at],
            o.codes[(*block, *lead, slice(0, dot.fold.unit.nbytes))],
            o.x[(*pair, slice(0, o.x.shape[-1]))],
            o.starts[(*pair, *chunk, *copies, slice(0, STARTS))],
            o.factors[(*pair, *chunk, slice(0, dot.fold.factors))],
            *weights,
        )
        b.writes(o.acc[at])
        value = paired_term(
            dot,
            (*at, j, c),
            lambda byte: o.codes[(*block, *(unit or group), byte)],
            lambda byte: o.x[(*pair, first + byte)],
            lambda i: o.factors[(*pair, *chunk, i)],
            lambda row: weights,
        )
        b.buffer_store(o.acc, o.acc[at] + value, list(at))

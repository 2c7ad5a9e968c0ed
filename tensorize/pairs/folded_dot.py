"""The meaning of a scaled dot product of one chunk of packed codes with folded activations.

A chunk is a unit (R rows x 32 k) or several that share a scale: ``y[i, r] += scale[r] xs[i] Σ_k
(code[r, k] - zero[r]) x[i, k]``, rows i of x, with x_k made of the int8 activations as
`apq_tvm.tensorize.meaning.fold` says. What `apq_tvm.ops.activations.fold` knows of a chunk
beforehand comes as floats, four times each: ``starts`` (of the integer sum and of the product with
the scale of the activations; instructions need them, the meaning does not) and ``factors``.

`chunk_loops` are the loops of all of them: of an intrinsic's description and of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        Of a chunk.
    blocks : int
        Row blocks side by side, which share the loads of one row of x.
    chunks : int
        Of a row, where it has them all; 0 for one.
    """

    fold: Fold
    m: int
    units: int
    blocks: int = 1
    chunks: int = 0

    @property
    def in_pairs(self) -> bool:
        """Whether sums are in another order than rows of x by rows of weights."""
        return False

    @property
    def lead(self) -> tuple[int, ...]:
        """Axis of rows of x, if there are several: there are no axes of extent 1."""
        return (self.m,) if self.m > 1 else ()

    @property
    def beside(self) -> tuple[int, ...]:
        """Axis of row blocks, if there are several."""
        return (self.blocks,) if self.blocks > 1 else ()

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        return (*self.beside, *self.lead, self.fold.unit.rows)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Extents of the axes along a chunk's k: unit, vector, k of the vector."""
        return (*((self.units,) if self.units > 1 else ()), VECTORS, 4)

    @property
    def copies(self) -> int:
        """Copies of what a chunk starts from."""
        return self.blocks

    @property
    def scale_align(self) -> int:
        """Bytes that scales are aligned to."""
        return 2 * self.fold.unit.rows

    def x_bytes(self, k: int) -> int:
        """Bytes of activations of `k` columns, of one row."""
        return k

    @property
    def unit_bytes(self) -> int:
        """Bytes of activations from one unit to the next."""
        return UNIT_K

    def rows(self, at: Sequence[Expr]) -> tuple[tuple[Expr, ...], Expr | int, Expr]:
        """(index along `lead`, row in that, row of the block) of a sum."""
        return tuple(at[: len(self.lead)]), 0, at[-1]

    def place(self, row: Expr | int, k: Expr) -> Expr:
        """Byte of the activation of column k."""
        return k

    def factor(self, at: Sequence[Expr]) -> Expr:
        """Which of a chunk's factors a sum has."""
        return at[-1]


@dataclass(frozen=True)
class FoldedOperands:
    """Buffers: codes u8, x i8, starts f32, factors f32, scales f16, zeros u8 or None, sums f32."""

    dot: Any
    codes: Buffer
    x: Buffer
    starts: Buffer
    factors: Buffer
    scales: Buffer
    zeros: Buffer | None
    acc: Buffer

    def lead(self, row: tuple[Expr, ...] | int, axes: int = 0) -> tuple[Expr, ...]:
        """First indices of what belongs to a row of x, with `axes` more before the last one."""
        if not self.dot.lead:
            return ()
        return (*(row if isinstance(row, tuple) else (row,)), *([i64(0)] * axes))


@dataclass(frozen=True)
class Chunk:
    """What a product reads of its operands, at the axes at hand.

    Parameters
    ----------
    reads : tuple
        Regions, for the block.
    code, x, factor : callable
        Byte of the unit's codes, byte of its activations, float of the chunk, by index.
    weights : tuple of PrimExpr
        Scale and, if there is one, zero point.
    """

    reads: tuple[Any, ...]
    code: Callable[[Expr], Expr]
    x: Callable[[Expr], Expr]
    factor: Callable[[Expr], Expr]
    weights: tuple[Expr, ...]


def chunk_of(
    dot: FoldedDot,
    at: tuple[Expr, list[Expr]],
    codes: Callable[[Any, Any], Any],
    x: Callable[[Any], Any],
    starts: Any,
    factors: Callable[[Any], Any],
    weights: Sequence[Expr],
) -> Chunk:
    """One unit of a chunk.

    Parameters
    ----------
    dot : FoldedDot
    at : tuple of (PrimExpr, list of PrimExpr)
        Number of the chunk, and of the unit in it if there are several.
    codes : callable
        By unit of a row and byte, each an index or a slice.
    x, factors : callable
        By byte of a row, and by number in the chunk.
    starts : BufferRegion
    weights : sequence of PrimExpr
    """
    chunk, unit = at
    base, first = chunk * i64(dot.units), chunk * i64(dot.unit_bytes * dot.units)
    units = slice(base, base + i64(dot.units)) if unit else chunk
    mine = base + unit[0] if unit else chunk
    start = first + unit[0] * i64(dot.unit_bytes) if unit else first
    reads = (
        codes(units, slice(0, dot.fold.unit.nbytes)),
        x(slice(first, first + i64(dot.x_bytes(UNIT_K * dot.units)))),
        starts,
        factors(slice(0, dot.fold.factors)),
        *weights,
    )
    return Chunk(
        reads, lambda byte: codes(mine, byte), lambda i: x(start + i), factors, tuple(weights)
    )


def chunk_loops(
    dot: FoldedDot,
    acc: Buffer,
    outer: Sequence[Expr],
    spans: Sequence[int],
    view: Callable[[list[Expr], Expr, list[Expr]], Chunk],
    fresh: bool = False,
) -> None:
    """Add products to sums: block ``dot``.

    Parameters
    ----------
    dot : FoldedDot
    acc : Buffer
        Of shape ``(*outer, *dot.spatial)``.
    outer : sequence of PrimExpr
    spans : sequence of int
        Extent of the axis of chunks, if there is one.
    view : callable
        Operands at (axes of `acc`, number of the chunk, that of the unit if there are several).
    fresh : bool
        Whether sums start at 0.
    """
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    extents = [*outer, *map(i64, (*dot.spatial, *spans, *dot.reduced))]
    spatial = len(outer) + len(dot.spatial)
    with b.grid(*extents) as loops, b.sblock("dot"):
        axes = b.axis.remap("S" * spatial + "R" * (len(extents) - spatial), loops)
        target, (*along, j, c) = list(axes[:spatial]), axes[spatial:]
        number, unit = (along[0], along[1:]) if spans else (i64(0), along)
        chunk = view(target, number, unit)
        b.reads(*([] if fresh else [acc[tuple(target)]]), *chunk.reads)
        b.writes(acc[tuple(target)])
        if fresh:
            with b.init():
                b.buffer_store(acc, tirx.const(0.0, "float32"), target)
        value = _term(dot, chunk, target[len(outer) :], j, c)
        b.buffer_store(acc, acc[tuple(target)] + value, target)


def _term(dot: FoldedDot, chunk: Chunk, at: list[Expr], j: Expr, c: Expr) -> Expr:
    """One summand, float32: of vector j, k of the vector c."""
    from tvm import tirx

    fold = dot.fold
    _, row, r = dot.rows(at)
    scale, *zero = chunk.weights
    value = decode(fold.unit, chunk.code, *fold.unit.place(r, j, c))
    if fold.doubled:
        value = value * tirx.const(2, "int32")
    middle = zero[0].astype("int32") if fold.zeros else tirx.const(fold.middle, "int32")
    activation: Expr = tirx.const(0.0, "float32")
    for above in range(fold.parts):
        other = j + i64(above * fold.vectors)
        inside = other < i64(VECTORS)
        k = tirx.min(other, i64(VECTORS - 1)) * i64(4) + c
        part = chunk.x(dot.place(row, k)).astype("float32")
        part = part * tirx.const(2.0 ** (-fold.width * above), "float32")
        activation = activation + tirx.Select(inside, part, tirx.const(0.0, "float32"))
    factor = chunk.factor(dot.factor(at)) * tirx.const(float(1 << fold.shift), "float32")
    return (value - middle).astype("float32") * activation * (scale.astype("float32") * factor)


def folded_pair(dot: FoldedDot, implement: Callable[[FoldedOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a product."""
    return _member(dot, _plain_loops), _member(dot, implement)


def _member(dot: FoldedDot, body: Callable[[FoldedOperands], None]) -> Any:
    """PrimFunc (codes, x, starts, factors, scales, [zeros,] sums) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    fold, unit, lead, chunks = dot.fold, dot.fold.unit, dot.lead, max(1, dot.chunks)

    # Where there are several rows, the axes between them and the floats are needed to match.
    def strided(name: str, axes: int = 0) -> Any:
        return [f"{name}{i}" for i in range(1 + axes)] + [i64(1)] if lead else None

    def of_weights(name: str, along: int, size: int, dtype: str, align: int) -> Buffer:
        """Row blocks side by side are some distance apart, if not whole."""
        count = chunks * along
        axis = (count,) if count > 1 or dot.chunks or dot.beside else ()
        apart = [f"{name}_block", f"{name}_group", i64(1)] if dot.beside and axis else None
        shape = (*dot.beside, *axis, size)
        return operand(name, shape, dtype, align, None if dot.chunks else apart)

    chunk = (chunks,) if lead or dot.chunks else ()
    copies = (dot.copies,) if lead or dot.copies > 1 else ()
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("folded_dot")
            codes = of_weights("codes", dot.units, unit.nbytes, "uint8", unit.vector_bytes)
            nbytes = dot.x_bytes(UNIT_K * dot.units * chunks)
            x = operand("x", (*lead, nbytes), "int8", 4, strided("x_stride"))
            stride = strided("start_stride", 2)
            starts = operand("starts", (*lead, *chunk, *copies, STARTS), "float32", 4, stride)
            stride = strided("factor_stride", 1)
            factors = operand("factors", (*lead, *chunk, fold.factors), "float32", 4, stride)
            scales = of_weights("scales", 1, unit.rows, "float16", dot.scale_align)
            zeros = of_weights("zeros", 1, unit.rows, "uint8", unit.rows) if fold.zeros else None
            acc = operand("acc", dot.spatial, "float32", 16, None)
            with b.sblock("root"):
                more = [zeros] if zeros is not None else []
                inputs = [codes, x, starts, factors, scales, *more]
                b.reads(*(whole(buffer) for buffer in (acc, *inputs)))
                b.writes(whole(acc))
                body(FoldedOperands(dot, codes, x, starts, factors, scales, zeros, acc))
    return builder.get()


def _plain_loops(o: FoldedOperands) -> None:
    dot = o.dot

    def view(at: list[Expr], chunk: Expr, unit: list[Expr]) -> Chunk:
        lead, _, r = dot.rows(at)
        block, number = at[: len(dot.beside)], [chunk] if lead or dot.chunks else []
        copies: list[Any] = [slice(0, dot.copies)] if len(o.starts.shape) > 1 else []
        if dot.chunks:
            copies = block
        group = [chunk] if len(o.scales.shape) > 1 else []
        row = (*block, *group, r)
        return chunk_of(
            dot,
            (chunk, unit),
            lambda u, byte: o.codes[(*block, *([u] if len(o.codes.shape) > 1 else []), byte)],
            lambda byte: o.x[(*lead, byte)],
            o.starts[(*lead, *number, *copies, slice(0, STARTS))],
            lambda i: o.factors[(*lead, *number, i)],
            [o.scales[row], *([o.zeros[row]] if o.zeros is not None else [])],
        )

    chunk_loops(dot, o.acc, (), (dot.chunks,) if dot.chunks else (), view)

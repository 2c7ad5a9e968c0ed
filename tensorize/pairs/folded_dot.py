"""The meaning of a scaled dot product of one chunk of packed codes with folded activations.

A chunk is a unit (R rows x 32 k) or several that share a scale: ``y[i, r] += scale[r] xs[i] Σ_k
(code[r, k] - zero[r]) x[i, k]``, rows i of x, with x_k made of the int8 activations as
`apq_tvm.tensorize.meaning.spans.fold` says. What `apq_tvm.ops.activations.fold` knows of a chunk
beforehand comes as floats, four times each: ``starts`` (of the integer sum and of the product with
the scale of the activations; instructions need them, the meaning does not) and ``factors``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS, decode
from apq_tvm.tensorize.meaning.scaffold import Bound, Load, Meaning, Operand, pair
from apq_tvm.tensorize.meaning.spans.fold import Fold

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
    """

    fold: Fold
    m: int
    units: int
    blocks: int = 1

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

    @property
    def meaning(self) -> Meaning:
        """Operands ``codes`` u8, ``x`` i8, ``starts`` f32, ``factors`` f32, ``scales`` f16, perhaps
        ``zeros`` u8, and the sums f32."""
        unit, lead = self.fold.unit, self.lead
        many = bool(lead)  # rows of x, and strides of the axes between them and the floats

        def of_weights(name: str, count: int, size: int, dtype: str, align: int) -> Operand:
            """Row blocks side by side are some distance apart."""
            axis = (count,) if count > 1 or self.beside else ()
            return Operand(name, (*self.beside, *axis, size), dtype, align, bool(self.beside))

        chunk = (1,) if lead else ()
        copies = (self.copies,) if lead or self.copies > 1 else ()
        nbytes = self.x_bytes(UNIT_K * self.units)
        zeros = of_weights("zeros", 1, unit.rows, "uint8", unit.rows)
        operands = (
            of_weights("codes", self.units, unit.nbytes, "uint8", unit.vector_bytes),
            Operand("x", (*lead, nbytes), "int8", 4, many),
            Operand("starts", (*lead, *chunk, *copies, STARTS), "float32", 4, many),
            Operand("factors", (*lead, *chunk, self.fold.factors), "float32", 4, many),
            of_weights("scales", 1, unit.rows, "float16", self.scale_align),
            *((zeros,) if self.fold.zeros else ()),
            Operand("acc", self.spatial, "float32", 16),
        )
        reduced = (1, self.units, VECTORS, 4)
        return Meaning("dot", operands, self.spatial, reduced, self._term)

    def _term(self, axes: Sequence[Expr], *loads: Load) -> Expr:
        """One summand, float32: of vector j, k of the vector c, of a unit of a chunk."""
        from tvm import tirx

        codes, x, _, factors, scales, *zeros = loads
        *at, chunk, u, j, c = axes
        fold, block = self.fold, at[: len(self.beside)]
        lead, row, r = self.rows(at)
        number = chunk * i64(self.units) + u
        value = decode(
            fold.unit, lambda byte: codes(*block, number, byte), *fold.unit.place(r, j, c)
        )
        if fold.doubled:
            value = value * tirx.const(2, "int32")
        middle: Expr = tirx.const(fold.middle, "int32")
        if zeros:
            middle = zeros[0](*block, chunk, r).astype("int32")
        activation: Expr = tirx.const(0.0, "float32")
        for above in range(fold.parts):
            other = j + i64(above * fold.vectors)
            inside = other < i64(VECTORS)
            k = tirx.min(other, i64(VECTORS - 1)) * i64(4) + c
            byte = number * i64(self.unit_bytes) + self.place(row, k)
            part = x(*lead, byte).astype("float32")
            part = part * tirx.const(2.0 ** (-fold.width * above), "float32")
            activation = activation + tirx.Select(inside, part, tirx.const(0.0, "float32"))
        factor = factors(*lead, chunk, self.factor(at)) * tirx.const(2.0**fold.shift, "float32")
        scale = scales(*block, chunk, r).astype("float32")
        return (value - middle).astype("float32") * activation * (scale * factor)


class FoldedOperands(Bound):
    """Buffers of a product."""

    def lead(self, row: tuple[Expr, ...] | int, axes: int = 0) -> tuple[Expr, ...]:
        """First indices of what belongs to a row of x, with `axes` more before the last one."""
        if not self.dot.lead:
            return ()
        return (*(row if isinstance(row, tuple) else (row,)), *([i64(0)] * axes))


def folded_pair(dot: FoldedDot, implement: Callable[[FoldedOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a product."""
    meaning = dot.meaning
    return pair(meaning, lambda *buffers: implement(FoldedOperands(dot, meaning, buffers)))

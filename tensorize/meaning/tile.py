"""The meaning of micro-kernels: a tile of rows x vectors of columns, summed over one step of k.

::

    C[m, j, r] += sum over k, i of A[m, 4k + i] * B[j, k, r, i]        (integers)
    C[m, j, r] += sum over k of A[m, k] * B[j, k, r]                   (floats)

j counts vectors of R columns. Of codes in two planes of nibbles, B has an axis of planes before r.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i32
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand, View, pair


@dataclass(frozen=True)
class Tile:
    """Shape of one micro-kernel call.

    Parameters
    ----------
    m : int
        Rows of activations.
    vectors : int
        Vectors of columns.
    lanes : int
        R, columns in a vector: 8 for 256-bit, 16 for 512-bit registers.
    k : int
        Products summed by one call; a multiple of 4 for integers.
    """

    m: int
    vectors: int
    lanes: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.vectors * self.lanes}x{self.k}"

    @property
    def sums(self) -> tuple[int, int, int]:
        """Shape of C."""
        return self.m, self.vectors, self.lanes


def byte_products(tile: Tile, halves: bool) -> Meaning:
    """A micro-kernel ``(a int8, b uint8, c int32)``.

    Of `halves`, codes are two planes of nibbles, low then high.
    """

    def term(axes: Sequence[Expr], a: Load, w: Load) -> Expr:
        m, j, r, k, i = axes
        if halves:
            low, high = (w(j, k, plane, r, i).astype("int32") for plane in range(2))
            code = low + high * i32(16)
        else:
            code = w(j, k, r, i).astype("int32")
        return a(m, k * 4 + i).astype("int32") * code

    panel = (tile.vectors, tile.k // 4, *((2,) if halves else ()), tile.lanes, 4)
    operands = (
        Operand("a", (tile.m, tile.k), "int8", 4, strided=True),
        Operand("b", panel, "uint8", 64, strided=True, compact=2),
        Operand("c", tile.sums, "int32", 64),
    )
    return Meaning("dot", operands, tile.sums, (tile.k // 4, 4), term, index="int32")


def float_products(tile: Tile) -> Meaning:
    """A micro-kernel of float32."""

    def term(axes: Sequence[Expr], a: Load, w: Load) -> Expr:
        m, j, r, k = axes
        return a(m, k) * w(j, k, r)

    operands = (
        Operand("a", (tile.m, tile.k), "float32", 4, strided=True),
        Operand("b", (tile.vectors, tile.k, tile.lanes), "float32", 64, strided=True),
        Operand("c", tile.sums, "float32", 64),
    )
    return Meaning("dot", operands, tile.sums, (tile.k,), term, index="int32")


def tile_loops(
    meaning: Meaning,
    views: Callable[..., Sequence[View]],
    around: Sequence[tuple[Expr, Any]] = (),
) -> None:
    """Block ``dot``, as `product` emits it, but with loops of extent 1: tiles are of any shape.

    `around` are an operator's loops over steps; in an intrinsic, which has none, an axis of extent
    1 is the constant 0, as TVM simplifies it in the match.
    """
    from tvm.tirx.script.builder import ir as b

    extents, spatial = (*meaning.spatial, *meaning.reduced), len(meaning.spatial)
    with b.grid(*extents) as loops, b.sblock("dot"):
        *sources, target = views(*(b.axis.spatial(extent, loop) for loop, extent in around))
        axes: list[Expr] = []
        for extent, loop in zip(extents, loops, strict=True):
            make = b.axis.spatial if len(axes) < spatial else b.axis.reduce
            axes.append(make(extent, loop) if around or extent > 1 else i32(0))
        at = target.at(spatial, axes[:spatial])
        read: dict[int, Sequence[Expr]] = {}

        def load(n: int, *of: Expr) -> Expr:
            read[n] = of
            return sources[n].buffer[sources[n].at(len(of), of)]

        term = meaning.term(axes, *(partial(load, n) for n in range(len(sources))))
        regions = []
        for n, view in enumerate(sources):
            shape = meaning.operands[n].shape
            units = (i if extent == 1 else 0 for i, extent in zip(read[n], shape, strict=True))
            first = tuple(map(operator.add, view.first, units))
            regions.append(View(view.buffer, first).region(shape))
        b.reads(target.buffer[at], *regions)
        b.writes(target.buffer[at])
        b.buffer_store(target.buffer, target.buffer[at] + term, list(at))


def tile_pair(meaning: Meaning, implement: Callable[..., None]) -> tuple[PrimFunc, PrimFunc]:
    """(desc, impl) of a micro-kernel, whose plain loops are `tile_loops`."""

    def plain(*buffers: Buffer) -> None:
        views = [View(buffer, (0,) * len(buffer.shape)) for buffer in buffers]
        tile_loops(meaning, lambda: views)

    compact = replace(meaning, operands=tuple(replace(o, strided=False) for o in meaning.operands))
    return pair(compact, plain)[1], pair(meaning, implement)[1]


def dequantization(lanes: int) -> Meaning:
    """``F[i, r] = (U[r, i] - zero[r]) * scale[r]`` for 4 k: U uint8 [R, 4], F float32 [4, R]."""

    def term(axes: Sequence[Expr], code: Load, zero: Load, scale: Load) -> Expr:
        i, r = axes
        return (code(r, i).astype("float32") - zero(r)) * scale(r)

    operands = (
        Operand("u", (lanes, 4), "uint8", 64),
        Operand("zero", (lanes,), "float32", 64),
        Operand("scale", (lanes,), "float32", 64),
        Operand("f", (4, lanes), "float32", 64),
    )
    return Meaning("convert", operands, (4, lanes), (), term, adds=False, index="int32")

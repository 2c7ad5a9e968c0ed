"""The meaning of micro-kernels: a tile of rows x vectors of columns, summed over one step of k.

::

    C[m, j, r] += sum over k, i of A[m, 4k + i] * B[j, k, r, i]        (bytes; words: 2k)
    C[m, j, r] += sum over k of A[m, k] * B[j, k, r]                   (floats)

j counts vectors of R columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tvm import tirx

from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i32
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS
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


def byte_products(tile: Tile) -> Meaning:
    """A micro-kernel ``(a int8, b uint8, c int32)``."""
    return _integer_products(tile, 4, "int8", "uint8")


def signed_products(tile: Tile) -> Meaning:
    """A micro-kernel ``(a int8, b int8, c int32)``, where `a` has the bits of unsigned bytes."""
    return _integer_products(tile, 4, "int8", "int8", partial(tirx.reinterpret, "uint8"))


def word_products(tile: Tile) -> Meaning:
    """A micro-kernel ``(a int16, b int16, c int32)``."""
    return _integer_products(tile, 2, "int16", "int16")


def _integer_products(
    tile: Tile, run: int, x: str, codes: str, meant: Callable[[Expr], Expr] = lambda code: code
) -> Meaning:
    """Of 32 bits of each operand at once: `run` k; `meant` says what an element of x means."""

    def term(axes: Sequence[Expr], a: Load, w: Load) -> Expr:
        m, j, r, k, i = axes
        return meant(a(m, k * run + i)).astype("int32") * w(j, k, r, i).astype("int32")

    panel = (tile.vectors, tile.k // run, tile.lanes, run)
    operands = (
        Operand("a", (tile.m, tile.k), x, 4, strided=True),
        Operand("b", panel, codes, 64, strided=True, compact=2),
        Operand("c", tile.sums, "int32", 64),
    )
    return Meaning("dot", operands, tile.sums, (tile.k // run, run), term, index="int32")


def unit_products(tile: Tile) -> Meaning:
    """A micro-kernel ``(a int8, b uint8, c int32)`` whose codes are units as they lie in memory.

    `b` is [vectors, k / 32, 8 * 4R] (`apq_tvm.tensorize.meaning.interleaved`)::

        C[m, j, r] += sum over u, v, i of A[m, 32u + 4v + i] * B[j, u, 4R v + 4r + i]
    """
    size, units = 4 * tile.lanes, tile.k // UNIT_K

    def term(axes: Sequence[Expr], a: Load, w: Load) -> Expr:
        m, j, r, *several, v, i = axes
        u = several[0] if several else 0
        code = w(j, u, v * size + r * 4 + i).astype("int32")
        return a(m, u * UNIT_K + v * 4 + i).astype("int32") * code

    operands = (
        Operand("a", (tile.m, tile.k), "int8", 4, strided=True),
        Operand("b", (tile.vectors, units, VECTORS * size), "uint8", 64, strided=True, compact=2),
        Operand("c", tile.sums, "int32", 64),
    )
    several = (units,) if units > 1 else ()
    return Meaning("dot", operands, tile.sums, (*several, VECTORS, 4), term)


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

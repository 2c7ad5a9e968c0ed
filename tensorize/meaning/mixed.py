"""Tiles of ``mixed24`` as the integer dot intrinsics read them: R rows x 16 k.

`apq_tvm.codegen.layouts.mixed` draws the bytes; here is their meaning in TensorIR, shared by the
layout and by the plain-loop side of the intrinsics, and the scaffold of a pair. Two products::

    narrow  acc f32[m, R] += Σ_g scale[g] * (u * (Σ_k code x + z * minus))   three 2-bit tiles
    wide    acc i32[m, R] += Σ_k code x                                      one 4-bit tile

with ``minus`` = -Σ x of the group, u = sub-scale + second-order zero (0..30) and z (0..3) from the
triple's 16 bits. |Σ code x| and |z Σ x| are at most 3 * 127 * 16 = 6096, so an int16 holds
either and their sum, and ``vpmaddwd`` multiplies by u.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, whole
from apq_tvm.tensorize.pairs.unit_dot import prefetch
from apq_tvm.tensorize.registry import register

TILE_K = 16
"""k of one tile."""

TRIPLE = 3
"""2-bit tiles that share 16 bits of zeros and sub-scales per row."""

ZERO_SHIFTS = (0, 2, 4)
SUB_SHIFTS = (6, 10, 13)
SUB_MASKS = (15, 7, 7)
"""Where those bits are: zeros of 2 bits, sub-scales of 4, 3 and 3."""

Expr = Any  # tvm is untyped
Buffer = Any


def _i32(value: Any) -> Expr:
    from tvm import tirx

    return tirx.const(value, "int32") if isinstance(value, int) else value.astype("int32")


def _field(value: Expr, shift: Any, mask: Any) -> Expr:
    from tvm import tirx

    return tirx.bitwise_and(tirx.shift_right(value, _i32(shift)), _i32(mask))


def triple_word(load: Callable[[Any], Expr], rows: int, r: Any) -> Expr:
    """int32: the 16 bits of a row, behind the tiles of a triple whose bytes `load` gives."""
    from tvm import tirx

    low, high = (_i32(load(r * 2 + (words_at(rows) + i))) for i in (0, 1))
    return tirx.bitwise_or(low, tirx.shift_left(high, _i32(8)))


def words_at(rows: int) -> int:
    """Byte of a triple where its zeros and sub-scales start: 2 bytes a row, the low one first."""
    return TRIPLE * 4 * rows


def sub_zero(word: Expr, tile: Any) -> Expr:
    """Zero point, int32, of one of the tiles whose bits are `word`."""
    return _field(_i32(word), tile * 2, 3)


def sub_scale(word: Expr, tile: Any) -> Expr:
    """Sub-scale, int32."""
    from tvm import tirx

    if isinstance(tile, int):
        return _field(_i32(word), SUB_SHIFTS[tile], SUB_MASKS[tile])
    first = tile == 0
    shift = tirx.Select(first, _i32(6), _i32(tile) * _i32(3) + _i32(7))
    return _field(_i32(word), shift, tirx.Select(first, _i32(15), _i32(7)))


def narrow_code(byte: Expr, vector: Any) -> Expr:
    """Code of vector j in a byte of a 2-bit tile, int32."""
    return _field(_i32(byte), vector * 2, 3)


def wide_byte(rows: int, vector: Any) -> Any:
    """Where the load that holds vector j of a 4-bit tile starts."""
    return vector % 2 * (4 * rows)


def wide_code(byte: Expr, vector: Any) -> Expr:
    """Code of vector j in a byte of a 4-bit tile, int32."""
    return _field(_i32(byte), vector // 2 * 4, 15)


@dataclass(frozen=True)
class MixedDot:
    """Shape of one product.

    Parameters
    ----------
    wide : bool
        A 4-bit tile, else three 2-bit tiles.
    rows : int
        R.
    m : int
        Rows of x.
    """

    wide: bool
    rows: int
    m: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes; of a triple, with its zeros and sub-scales."""
        return 8 * self.rows if self.wide else words_at(self.rows) + 2 * self.rows

    @property
    def tiles(self) -> int:
        """Groups of 16 k."""
        return 1 if self.wide else TRIPLE

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        return (self.m, self.rows) if self.m > 1 else (self.rows,)


@dataclass(frozen=True)
class MixedOperands:
    """Buffers of a product; the last three are None for a 4-bit tile.

    Codes uint8 [bytes], x int8 [m, k] or [k], acc; minus int32 [m, 3] or [3],
    scale float32 [3], plus int32 [3]: of the second order, decoded.
    """

    dot: MixedDot
    codes: Buffer
    x: Buffer
    acc: Buffer
    minus: Buffer | None = None
    scale: Buffer | None = None
    plus: Buffer | None = None

    def row(self, i: Any, *rest: Any) -> list[Any]:
        """Index that starts with row i of x where there are several."""
        return [i, *rest] if self.dot.m > 1 else list(rest)

    def inputs(self) -> list[Buffer]:
        """In the order of the PrimFunc's arguments, without the sums."""
        every = (self.codes, self.x, self.minus, self.scale, self.plus)
        return [buffer for buffer in every if buffer is not None]


def product(o: MixedOperands, i: Any, r: Any, tile: Any) -> Expr:
    """What is added to the sum of row i of x and row r of the weights."""
    rows = o.dot.rows
    total: Expr = None
    for k in range(TILE_K):
        vector, byte = k // 4, r * 4 + k % 4
        if o.dot.wide:
            code = wide_code(o.codes[wide_byte(rows, vector) + byte], vector)
            x = o.x[tuple(o.row(i, k))]
        else:
            code = narrow_code(o.codes[tile * (4 * rows) + byte], vector)
            x = o.x[tuple(o.row(i, tile * TILE_K + k))]
        term = code * _i32(x)
        total = term if total is None else total + term
    if o.dot.wide:
        return total
    assert o.minus is not None and o.scale is not None and o.plus is not None
    word = triple_word(lambda byte: o.codes[byte], rows, r)
    total = total + sub_zero(word, tile) * o.minus[tuple(o.row(i, tile))]
    level = sub_scale(word, tile) + o.plus[tile]
    return (level * total).astype("float32") * o.scale[tile]


def emit_product(o: MixedOperands, name: str) -> None:
    """Plain loops over rows of x, rows of weights and tiles: the meaning, one block `name`."""
    from tvm.tirx.script.builder import ir as b

    extents = [i64(e) for e in o.dot.spatial] + ([] if o.dot.wide else [i64(TRIPLE)])
    kinds = "S" * len(o.dot.spatial) + ("" if o.dot.wide else "R")
    one = len(extents) == 1
    with b.grid(*extents) as loops, b.sblock(name):
        axes = [b.axis.spatial(extents[0], loops)] if one else list(b.axis.remap(kinds, loops))
        at = axes[: len(o.dot.spatial)]
        i = at[0] if o.dot.m > 1 else None
        b.reads(o.acc[tuple(at)], *(whole(buffer) for buffer in o.inputs()))
        b.writes(o.acc[tuple(at)])
        tile = None if o.dot.wide else axes[-1]
        b.buffer_store(o.acc, o.acc[tuple(at)] + product(o, i, at[-1], tile), at)


def make_pair(dot: MixedDot, implement: Callable[[MixedOperands], None]) -> tuple[Any, Any]:
    """(desc, impl) of a product; `implement` emits the instructions."""
    return _member(dot, lambda o: emit_product(o, "dot")), _member(dot, implement)


@dataclass(frozen=True)
class MixedInstruction:
    """How tiles are decoded, multiplied and summed.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    rows : int
        R of the layout.
    features : tuple of str
        LLVM features it needs, any one of them.
    narrow, wide : callable
        Emit the instructions for three 2-bit tiles and for a 4-bit tile.
    lanes : int
        Int32 lanes of its vectors, 0 for R.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    narrow: Callable[[MixedOperands], None]
    wide: Callable[[MixedOperands], None]
    lanes: int = 0


def mixed_intrinsic(instruction: MixedInstruction, wide: bool, m: int = 1, ahead: int = 0) -> str:
    """Register (once) and name the product of three 2-bit tiles or of a 4-bit tile.

    Parameters
    ----------
    instruction : MixedInstruction
    wide : bool
    m : int
        Rows of x.
    ahead : int
        Bytes to prefetch ahead, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; its operands are those of `MixedOperands`.
    """
    dot = MixedDot(wide, instruction.rows, m)
    k, what = (TILE_K, "u4") if wide else (TRIPLE * TILE_K, "u2x3")
    name = f"apq_{instruction.name}_{m}x{dot.rows}x{k}_s8{what}"
    name += ("s32" if wide else "f32") + (f"_pf{ahead}" if ahead else "")

    def implement(o: MixedOperands) -> None:
        prefetch(o.codes, dot.nbytes, ahead)
        (instruction.wide if wide else instruction.narrow)(o)

    return register(name, lambda: make_pair(dot, implement))


def _member(dot: MixedDot, body: Callable[[MixedOperands], None]) -> Any:
    """PrimFunc (codes, x, [minus, scale, plus,] acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    def operand(name: str, shape: tuple[int, ...], dtype: str, align: int) -> Buffer:
        strides = [f"{name}_stride", i64(1)] if len(shape) == 2 and name != "acc" else None
        extents = [i64(extent) for extent in shape]
        handle = b.arg(name, b.handle())
        return b.match_buffer(handle, extents, dtype, strides=strides, offset_factor=1, align=align)

    lead = (dot.m,) if dot.m > 1 else ()
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("dot")
            codes = operand("codes", (dot.nbytes,), "uint8", 2 * dot.rows)
            x = operand("x", (*lead, dot.tiles * TILE_K), "int8", 4)
            extra: list[Buffer] = []
            if not dot.wide:
                extra = [
                    operand("minus", (*lead, TRIPLE), "int32", 4),
                    operand("scale", (TRIPLE,), "float32", 4),
                    operand("plus", (TRIPLE,), "int32", 4),
                ]
            sums = "int32" if dot.wide else "float32"
            acc = operand("acc", dot.spatial, sums, 4 * dot.rows)
            o = MixedOperands(dot, codes, x, acc, *extra)
            with b.sblock("root"):
                b.reads(whole(acc), *(whole(buffer) for buffer in o.inputs()))
                b.writes(whole(acc))
                body(o)
    return builder.get()

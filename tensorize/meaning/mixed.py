"""Tiles of ``mixed24`` as the integer dot intrinsics read them: R rows x 16 k.

`apq_tvm.codegen.layouts.mixed` draws the bytes; here is their meaning in TensorIR, shared by the
layout, the operators and the intrinsics. Two products::

    narrow  acc f32[m, R] += Σ_g scale[g] * (u * (Σ_k code x + z * minus))   three 2-bit tiles
    wide    acc i32[m, R] += Σ_k code x                                      one 4-bit tile

with ``minus`` = -Σ x of the group, u = sub-scale + second-order zero (0..30) and z (0..3) from the
triple's 16 bits. |Σ code x| and |z Σ x| are at most 3 * 127 * 16 = 6096, so an int16 holds
either and their sum, and ``vpmaddwd`` multiplies by u.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand

TILE_K = 16
"""k of one tile."""

TRIPLE = 3
"""2-bit tiles that share 16 bits of zeros and sub-scales per row."""

ZERO_SHIFTS = (0, 2, 4)
SUB_SHIFTS = (6, 10, 13)
SUB_MASKS = (15, 7, 7)
"""Where those bits are: zeros of 2 bits, sub-scales of 4, 3 and 3."""


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


def mixed_bytes(rows: int, wide: bool) -> int:
    """Bytes of codes of a 4-bit tile; of a triple, with its zeros and sub-scales."""
    return 8 * rows if wide else words_at(rows) + 2 * rows


def narrow_dot(rows: int, m: int) -> Meaning:
    """Product of three 2-bit tiles.

    Operands codes uint8 [bytes], x int8 [m, 48], minus int32 [m, 3], scale float32 [3] and plus
    int32 [3] (of the second order, decoded), acc float32 [m, R]; there is no axis of one row of x.
    """
    lead = (m,) if m > 1 else ()

    def term(
        axes: Sequence[Expr], codes: Load, x: Load, minus: Load, scale: Load, plus: Load
    ) -> Expr:
        i, r, tile = axes

        def code(vector: int, byte: Expr) -> Expr:
            return narrow_code(codes(tile * (4 * rows) + byte), vector)

        word = triple_word(codes, rows, r)
        total = _tile(code, r, lambda k: x(i, tile * TILE_K + k))
        total = total + sub_zero(word, tile) * minus(i, tile)
        level = sub_scale(word, tile) + plus(tile)
        return (level * total).astype("float32") * scale(tile)

    operands = (
        _codes(rows, False),
        Operand("x", (*lead, TRIPLE * TILE_K), "int8", 4, strided=m > 1),
        Operand("minus", (*lead, TRIPLE), "int32", 4, strided=m > 1),
        Operand("scale", (TRIPLE,), "float32", 4),
        Operand("plus", (TRIPLE,), "int32", 4),
        Operand("acc", (*lead, rows), "float32", 4 * rows),
    )
    return Meaning("dot", operands, (m, rows), (TRIPLE,), term)


def wide_dot(rows: int, m: int) -> Meaning:
    """Product of a 4-bit tile: codes uint8 [bytes], x int8 [m, 16], acc int32 [m, R], likewise."""
    lead = (m,) if m > 1 else ()

    def term(axes: Sequence[Expr], codes: Load, x: Load) -> Expr:
        i, r = axes

        def code(vector: int, byte: Expr) -> Expr:
            return wide_code(codes(wide_byte(rows, vector) + byte), vector)

        return _tile(code, r, lambda k: x(i, k))

    operands = (
        _codes(rows, True),
        Operand("x", (*lead, TILE_K), "int8", 4, strided=m > 1),
        Operand("acc", (*lead, rows), "int32", 4 * rows),
    )
    return Meaning("dot", operands, (m, rows), (), term)


def _codes(rows: int, wide: bool) -> Operand:
    return Operand("codes", (mixed_bytes(rows, wide),), "uint8", 2 * rows)


def _tile(code: Callable[[int, Expr], Expr], r: Expr, x: Callable[[int], Expr]) -> Expr:
    """Σ code x over the 16 k of a tile; `code` is given a vector and a byte of it."""
    terms = (code(k // 4, r * 4 + k % 4) * _i32(x(k)) for k in range(TILE_K))
    return reduce(lambda total, term: total + term, terms)

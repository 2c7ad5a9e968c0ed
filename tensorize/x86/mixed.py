"""Products of ``mixed24`` tiles with int8 activations on x86: what the instructions are.

`apq_tvm.tensorize.meaning.mixed` has the meaning. Zero points and sub-scales go through
``vpmaddwd``, whose 32-bit lanes hold one small number in the low half: z times -Σ x starts the sum,
and the sum, which fits 16 bits, is multiplied by u. So a group costs one conversion and one FMA per
vector. Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMADDUBSW, PMADDWD,
VPDPBUSD.
"""

from __future__ import annotations

from functools import partial

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, i64, splat, x86
from apq_tvm.tensorize.meaning.mixed import (
    SUB_MASKS,
    SUB_SHIFTS,
    TILE_K,
    TRIPLE,
    ZERO_SHIFTS,
    words_at,
)
from apq_tvm.tensorize.meaning.scaffold import Bound
from apq_tvm.tensorize.pairs.mixed_dot import MixedInstruction
from apq_tvm.tensorize.x86.dot import INSTRUCTIONS as DOTS
from apq_tvm.tensorize.x86.dot import DotInstruction, four_k, four_products
from apq_tvm.tensorize.x86.vectors import lanes_of, masked, shifted


def _narrow(instruction: DotInstruction, o: Bound) -> None:
    rows, m = o.dot.lanes, o.dot.m
    lanes = tirx.Ramp(i64(0), i64(1), rows)
    words = o.codes.vload([i64(words_at(rows))], f"uint8x{2 * rows}")
    words = tirx.reinterpret(f"uint16x{rows}", words).astype(f"int32x{rows}")
    at = [o.at(i, lanes) for i in range(m)]
    sums = [o.acc[tuple(index)] for index in at]
    for tile in range(TRIPLE):
        load = o.codes.vload([i64(tile * 4 * rows)], f"uint8x{4 * rows}")
        codes = [masked(shifted(load, -2 * v), 3) for v in range(4)]
        zero = _lanes(words, ZERO_SHIFTS[tile], 3)
        plus = tirx.Broadcast(o.plus[i64(tile)], rows)
        level = _lanes(words, SUB_SHIFTS[tile], SUB_MASKS[tile]) + plus
        for i in range(m):
            minus = tirx.Broadcast(o.minus[tuple(o.at(i, tile))], rows)
            x = [four_k(o, i, tile * TILE_K + 4 * v, rows) for v in range(4)]
            total = four_products(instruction, _pairs(zero, minus), codes, x)
            term = _pairs(total, level).astype(f"float32x{rows}")
            sums[i] = sums[i] + term * tirx.Broadcast(o.scale[i64(tile)], rows)
    for index, total in zip(at, sums, strict=True):
        b.buffer_store(o.acc, total, index)


def _wide(instruction: DotInstruction, o: Bound) -> None:
    rows = o.dot.lanes
    loads = [o.codes.vload([i64(4 * rows * i)], f"uint8x{4 * rows}") for i in range(2)]
    codes = [masked(shifted(loads[v % 2], v // 2 * -4), 15) for v in range(4)]
    lanes = tirx.Ramp(i64(0), i64(1), rows)
    at = [o.at(i, lanes) for i in range(o.dot.m)]
    x = [[four_k(o, i, 4 * v, rows) for v in range(4)] for i in range(o.dot.m)]
    # 15 * 127 * 2 * 4 = 15240: int16 holds the sum of the four.
    totals = [
        four_products(instruction, o.acc[tuple(index)], codes, x[i]) for i, index in enumerate(at)
    ]
    for index, total in zip(at, totals, strict=True):
        b.buffer_store(o.acc, total, index)


def _pairs(a: Expr, b: Expr) -> Expr:
    """Products of int32 lanes that fit 16 bits, one of them not negative."""
    rows = lanes_of(a)
    name = "avx512.pmaddw.d.512" if rows == 16 else "avx2.pmadd.wd"
    halves = [tirx.reinterpret(f"int16x{2 * rows}", value) for value in (a, b)]
    return x86(f"int32x{rows}", name, *halves)


def _lanes(words: Expr, shift: int, mask: int) -> Expr:
    """Bits of int32 lanes."""
    rows = lanes_of(words)
    if shift:
        words = tirx.shift_right(words, splat(shift, "int32", rows))
    return tirx.bitwise_and(words, splat(mask, "int32", rows))


INSTRUCTIONS = tuple(
    MixedInstruction(dot.name, dot.rows, dot.features, partial(_narrow, dot), partial(_wide, dot))
    for dot in DOTS
)
"""In order of preference."""

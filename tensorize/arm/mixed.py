"""Products of ``mixed24`` tiles with int8 activations on Arm: what the instructions are.

`apq_tvm.tensorize.meaning.mixed` has the meaning. Per 2-bit tile and 8 rows: ``smull`` of zeros and
-Σ x, in 16-bit lanes, starts the sums, and ``mla`` multiplies them by the levels onto the pattern
of 1.5 * 2^23, a float whose unit is 1. One subtraction gives the float, where ``scvtf`` would take
two cycles on Neoverse N1. Vectors of 8 rows are left whole for as long as possible, since LLVM
computes what it sees as halves in halves. Sources: Arm Architecture Reference Manual (DDI 0487);
LLVM's IntrinsicsAArch64.td; Neoverse N1 Software Optimization Guide (PJDOC-466751330-9707).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from apq_tvm.tensorize.exprs import i64, neon
from apq_tvm.tensorize.meaning.mixed import (
    SUB_MASKS,
    SUB_SHIFTS,
    TILE_K,
    TRIPLE,
    ZERO_SHIFTS,
    MixedInstruction,
    MixedOperands,
    words_at,
)

Expr = Any  # tvm is untyped
Dot = Callable[[Expr, Sequence[Expr], Sequence[Expr]], Expr]

ROWS = 8
"""Two vectors of int32."""

_MAGIC = 0x4B400000
"""The pattern of 1.5 * 2^23."""


def _narrow(dot: Dot, o: MixedOperands) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    assert o.minus is not None and o.scale is not None and o.plus is not None
    words = o.codes.vload([i64(words_at(ROWS))], f"uint8x{2 * ROWS}")
    words = tirx.reinterpret(f"uint16x{ROWS}", words)
    each = [(i, half) for i in range(o.dot.m) for half in (0, 1)]
    sums = {key: o.acc[_four(o, *key)] for key in each}
    for tile in range(TRIPLE):
        zero = _field(words, ZERO_SHIFTS[tile], 3).astype(f"int32x{ROWS}")
        level = _field(words, SUB_SHIFTS[tile], SUB_MASKS[tile]).astype(f"int32x{ROWS}")
        level = level + tirx.Broadcast(o.plus[i64(tile)], ROWS)
        loads = [o.codes.vload([i64(tile * 32 + 16 * h)], "uint8x16") for h in (0, 1)]
        codes = [[_field(load, 2 * v, 3) for v in range(4)] for load in loads]
        for i in range(o.dot.m):
            # Four numbers are read, of which the last is the 4-bit groups': rows of `minus` end
            # with one more.
            minus = tirx.reinterpret("int16x8", o.minus.vload(o.row(i64(i), i64(0)), "int32x4"))
            start = tirx.Shuffle([minus], [tirx.const(2 * tile, "int32")] * ROWS)
            start = zero * start.astype(f"int32x{ROWS}")
            x = _four_ks(o, i, tile * TILE_K)
            scale = tirx.Broadcast(o.scale[i64(tile)], 4)
            for half in (0, 1):
                product = dot(_half(start, half), codes[half], x) * _half(level, half)
                pattern = tirx.Broadcast(tirx.const(_MAGIC, "int32"), 4) + product
                term = tirx.reinterpret("float32x4", pattern)
                term = term - tirx.Broadcast(tirx.const(1.5 * 2.0**23, "float32"), 4)
                sums[i, half] = sums[i, half] + term * scale
    for key, total in sums.items():
        b.buffer_store(o.acc, total, list(_four(o, *key)))


def _wide(dot: Dot, o: MixedOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    for half in (0, 1):
        loads = [o.codes.vload([i64(4 * ROWS * i + 16 * half)], "uint8x16") for i in (0, 1)]
        codes = [_field(loads[v % 2], v // 2 * 4, 15) for v in range(4)]
        for i in range(o.dot.m):
            at = _four(o, i, half)
            b.buffer_store(o.acc, dot(o.acc[at], codes, _four_ks(o, i, 0)), list(at))


def _sdot(start: Expr, codes: Sequence[Expr], x: Sequence[Expr]) -> Expr:
    """int32 [4]: start + Σ code x over four vectors of 4 rows x 4 k."""
    total = start
    for code, four in zip(codes, x, strict=True):
        total = neon("int32x4", "sdot.v4i32.v16i8", total, _int8(code), four)
    return total


def _smlal(start: Expr, codes: Sequence[Expr], x: Sequence[Expr]) -> Expr:
    """The same without dot products: int16 holds the sum of eight products of up to 15 * 127."""
    from tvm import tirx

    halves: list[Expr] = []
    for first in (0, 8):
        lanes = [tirx.const(first + i, "int32") for i in range(8)]
        words: Expr = None
        for code, four in zip(codes, x, strict=True):
            part = [tirx.Shuffle([_int8(value)], lanes) for value in (code, four)]
            product = neon("int16x8", "smull.v8i16", *part)
            words = product if words is None else words + product
        halves.append(words)
    pairs = neon("int16x8", "addp.v8i16", *halves)  # two sums of two k each per row
    return start + neon("int32x4", "saddlp.v4i32.v8i16", pairs)


def _four(o: MixedOperands, row: int, half: int) -> tuple[Expr, ...]:
    """Index of the sums of four rows of weights."""
    from tvm import tirx

    return tuple(o.row(i64(row), tirx.Ramp(i64(4 * half), i64(1), 4)))


def _four_ks(o: MixedOperands, row: int, k: int) -> list[Expr]:
    """Four times int8 [16]: four activations, repeated for four rows of weights."""
    from tvm import tirx

    sixteen = tirx.reinterpret("int32x4", o.x.vload(o.row(i64(row), i64(k)), "int8x16"))
    fours = [tirx.Shuffle([sixteen], [tirx.const(v, "int32")] * 4) for v in range(4)]
    return [tirx.reinterpret("int8x16", four) for four in fours]


def _field(load: Expr, shift: int, mask: int) -> Expr:
    """Bits of unsigned lanes."""
    from tvm import tirx

    kind, lanes = str(load.ty).split("x")
    if shift:
        load = load >> tirx.Broadcast(tirx.const(shift, kind), int(lanes))
    if shift + mask.bit_length() == int(kind[4:]):
        return load
    return tirx.bitwise_and(load, tirx.Broadcast(tirx.const(mask, kind), int(lanes)))


def _half(vector: Expr, half: int) -> Expr:
    """Four of eight lanes."""
    from tvm import tirx

    return tirx.Shuffle([vector], [tirx.const(4 * half + i, "int32") for i in range(4)])


def _int8(vector: Expr) -> Expr:
    from tvm import tirx

    return tirx.reinterpret("int8x16", vector)


INSTRUCTIONS = tuple(
    MixedInstruction(name, ROWS, (feature,), partial(_narrow, dot), partial(_wide, dot), 4)
    for name, feature, dot in (("sdot", "dotprod", _sdot), ("smlal", "neon", _smlal))
)
"""In order of preference."""

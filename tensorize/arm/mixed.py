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

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import as_float, lane, small_dot
from apq_tvm.tensorize.exprs import MAGIC_BITS, Expr, i64, neon, shuffled, splat
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

Dot = Callable[[Expr, Sequence[Expr], Sequence[Expr]], Expr]

ROWS = 8
"""Two vectors of int32."""


def _narrow(dot: Dot, o: Bound) -> None:
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
            minus = tirx.reinterpret("int16x8", o.minus.vload(o.at(i, 0), "int32x4"))
            start = zero * shuffled(minus, 8, [2 * tile] * ROWS).astype(f"int32x{ROWS}")
            x = _four_ks(o, i, tile * TILE_K)
            scale = tirx.Broadcast(o.scale[i64(tile)], 4)
            for half in (0, 1):
                product = dot(_half(start, half), codes[half], x) * _half(level, half)
                term = as_float(splat(MAGIC_BITS, "int32", 4) + product)
                sums[i, half] = sums[i, half] + term * scale
    for key, total in sums.items():
        b.buffer_store(o.acc, total, list(_four(o, *key)))


def _wide(dot: Dot, o: Bound) -> None:
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
        total = neon("int32x4", "sdot.v4i32.v16i8", total, tirx.reinterpret("int8x16", code), four)
    return total


def _smlal(start: Expr, codes: Sequence[Expr], x: Sequence[Expr]) -> Expr:
    """The same without dot products: int16 holds the sum of eight products of up to 15 * 127."""
    return start + small_dot(codes, x)


def _four(o: Bound, row: int, half: int) -> tuple[Expr, ...]:
    """Index of the sums of four rows of weights."""
    return tuple(o.at(row, tirx.Ramp(i64(4 * half), i64(1), 4)))


def _four_ks(o: Bound, row: int, k: int) -> list[Expr]:
    """Four times int8 [16]: four activations, repeated for four rows of weights."""
    sixteen = o.x.vload(o.at(row, k), "int8x16")
    return [lane(sixteen, "int8x16", v) for v in range(4)]


def _field(load: Expr, shift: int, mask: int) -> Expr:
    """Bits of unsigned lanes."""
    kind, lanes = str(load.ty).split("x")
    if shift:
        load = load >> tirx.Broadcast(tirx.const(shift, kind), int(lanes))
    if shift + mask.bit_length() == int(kind[4:]):
        return load
    return tirx.bitwise_and(load, tirx.Broadcast(tirx.const(mask, kind), int(lanes)))


def _half(vector: Expr, half: int) -> Expr:
    """Four of eight lanes."""
    return shuffled(vector, ROWS, range(4 * half, 4 * half + 4))


INSTRUCTIONS = tuple(
    MixedInstruction(name, ROWS, (feature,), partial(_narrow, dot), partial(_wide, dot), 4)
    for name, feature, dot in (("sdot", "dotprod", _sdot), ("smlal", "neon", _smlal))
)
"""In order of preference."""

"""Products of bit planes by AND (XOR for signs) and ``cnt`` on Arm; packing of activations.

`apq_tvm.tensorize.meaning.bitserial` says what planes mean. ``cnt`` counts the bits of every byte:

- ``udot`` with ones adds four bytes of a row to its int32 sum;
- without dot products counts are added as bytes, which hold those of 31 vectors, and widened by
  ``uaddlp`` twice.

So a pair of planes of 128 weights takes three operations: and, cnt, udot (or add).
Source: Arm Architecture Reference Manual (DDI 0487); LLVM's IntrinsicsAArch64.td.
"""

from __future__ import annotations

import itertools
from functools import partial

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import shifted
from apq_tvm.tensorize.exprs import Buffer, Expr, llvm
from apq_tvm.tensorize.pairs.bitserial import Planes, Popcount

ROWS = 4
_BYTES = 16

_BYTE_COUNTS = 31
"""Vectors whose counts, 8 each, a byte can sum."""


def _shift(vector: Expr, down: int) -> Expr:
    return shifted(vector, -down)


def _count(o: Planes, fused: bool) -> list[Expr]:
    """int32 [4] sums for every row of x, in instructions."""
    counts: list[dict[tuple[int, bool], list[Expr]]] = [{} for _ in range(o.m)]
    for which in range(o.units):
        planes = o.planes_of(which)
        for i, t in itertools.product(range(o.m), range(o.terms)):
            x = o.operands(i, t, which)
            for s, w in enumerate(planes):
                count = llvm("uint8x16", "llvm.ctpop.v16i8", o.match(w, x))
                counts[i].setdefault((s + t, o.negative(t)), []).append(count)
    return [_total(row, fused) for row in counts]


def _total(counts: dict[tuple[int, bool], list[Expr]], fused: bool) -> Expr:
    """Σ ±2^weight of counts, int32 [4]: from the highest weight down, doubled in between."""
    one = tirx.Broadcast(tirx.const(1, "int32"), ROWS)
    total: Expr = None
    for weight in range(max(w for w, _ in counts), -1, -1):
        if total is not None:
            total = total << one
        for negative in (False, True):
            if (weight, negative) in counts:
                total = _sum(total, counts[weight, negative], negative, fused)
    return total


def _sum(start: Expr, counts: list[Expr], negative: bool, fused: bool) -> Expr:
    """``start + Σ counts`` (or minus), lanes of four bytes."""
    zero = tirx.Broadcast(tirx.const(0, "int32"), ROWS)
    if fused:
        ones = tirx.Broadcast(tirx.const(1, "uint8"), _BYTES)
        total = zero if negative or start is None else start
        for count in counts:
            name = "llvm.aarch64.neon.udot.v4i32.v16i8"
            total = llvm("int32x4", name, total, count, ones)
        return (zero if start is None else start) - total if negative else total
    total = zero if start is None else start
    for first in range(0, len(counts), _BYTE_COUNTS):
        part, *more = counts[first : first + _BYTE_COUNTS]
        for count in more:
            part = part + count
        words = llvm("uint16x8", "llvm.aarch64.neon.uaddlp.v8i16.v16i8", part)
        wide = llvm("int32x4", "llvm.aarch64.neon.uaddlp.v4i32.v8i16", words)
        total = total - wide if negative else total + wide
    return total


def _pack(planes: int, x: Buffer, y: Buffer) -> None:
    """Byte 4v + c of a half becomes bit v (4 + v in the second half) of byte c: four lanes' or."""
    lanes = [tirx.const(i, "int32") for i in range(_BYTES)]
    halves, places = [], []
    for first in (0, _BYTES):
        codes = x.vload([first], f"int32x{_BYTES}").astype(f"int8x{_BYTES}")
        halves.append(tirx.reinterpret(f"uint8x{_BYTES}", codes))
        values = [tirx.const(1 << ((first + i) // 4), "uint8") for i in range(_BYTES)]
        places.append(tirx.Shuffle(values, lanes))
    zero = tirx.Broadcast(tirx.const(0, "uint8"), _BYTES)
    for t in range(planes):
        bit = tirx.Broadcast(tirx.const(1 << t, "uint8"), _BYTES)
        parts = [
            tirx.Select((half & bit) != zero, place, zero)
            for half, place in zip(halves, places, strict=True)
        ]
        words = tirx.reinterpret("int32x4", parts[0] | parts[1])
        word = llvm("int32", "llvm.vector.reduce.add", words)
        b.buffer_store(y, y[t, 0] + word, [t, 0])


_PACKER = ("cmtst", _pack)

UDOT = Popcount("cntudot", ROWS, ("dotprod",), partial(_count, fused=True), _shift, _PACKER)
UADDLP = Popcount("cntuaddlp", ROWS, ("neon",), partial(_count, fused=False), _shift, _PACKER)

INSTRUCTIONS = (UDOT, UADDLP)
"""In order of preference."""

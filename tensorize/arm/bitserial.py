"""Products of bit planes by AND (XOR for signs) and ``cnt`` on Arm; packing of activations.

`apq_tvm.tensorize.x86.bitserial` says what planes mean. ``cnt`` counts the bits of every byte:

- ``udot`` with ones adds four bytes of a row to its int32 sum;
- without dot products counts are added as bytes, which hold those of 31 vectors, and widened by
  ``uaddlp`` twice.

So a pair of planes of 128 weights takes three operations: and, cnt, udot (or add).
Source: Arm Architecture Reference Manual (DDI 0487); LLVM's IntrinsicsAArch64.td.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import llvm
from apq_tvm.tensorize.meaning.bitserial import BitserialPair, pack_pair
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any

ROWS = 4
_BYTES = 16

_BYTE_COUNTS = 31
"""Vectors whose counts, 8 each, a byte can sum."""


@dataclass(frozen=True)
class ArmPopcount:
    """How counts are summed.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    features : tuple of str
        LLVM features it needs, any one of them.
    dotprod : bool
    """

    name: str
    features: tuple[str, ...]
    dotprod: bool
    rows: int = ROWS
    units: int = 4


UDOT = ArmPopcount("cntudot", ("dotprod",), True)
UADDLP = ArmPopcount("cntuaddlp", ("neon",), False)

INSTRUCTIONS = (UDOT, UADDLP)
"""In order of preference."""


def bitserial_intrinsic(
    instruction: ArmPopcount, unit: Unit, planes: int, units: int = 1, m: int = 1, ahead: int = 0
) -> str:
    """Register (once) and name the sum over some units.

    Parameters
    ----------
    instruction : ArmPopcount
    unit, planes, units, m, ahead
        As `BitserialPair`.
    """
    name = f"apq_{instruction.name}_{m}x{unit.rows}x{UNIT_K * units}_b{planes}b{unit.bits}s32"
    name += ("_inv" if unit.inverted else "") + (f"_pf{ahead}" if ahead else "")
    pair = _Pair(instruction, unit, planes, units, m, ahead)
    return register(name, lambda: (pair.member(False), pair.member(True)))


class _Pair(BitserialPair):
    def __init__(
        self, instruction: ArmPopcount, unit: Unit, planes: int, units: int, m: int, ahead: int
    ) -> None:
        super().__init__(unit, planes, units, m, ahead)
        self.isa = instruction

    def shift(self, vector: Expr, down: int) -> Expr:
        """Bytes shifted right, left if negative."""
        from tvm import tirx

        if not down:
            return vector
        amount = tirx.Broadcast(tirx.const(abs(down), "uint8"), self.size)
        return vector >> amount if down > 0 else vector << amount

    def totals(self) -> list[Expr]:
        """int32 [4] sums for every row of x, in instructions."""
        counts: list[dict[tuple[int, bool], list[Expr]]] = [{} for _ in range(self.m)]
        for which in range(self.units):
            planes = self.planes_of(which)
            for i, t in itertools.product(range(self.m), range(self.terms)):
                x = self.operands(i, t, which)
                for s, w in enumerate(planes):
                    count = llvm("uint8x16", "llvm.ctpop.v16i8", self.match(w, x))
                    counts[i].setdefault((s + t, self.negative(t)), []).append(count)
        return [self._total(row) for row in counts]

    def _total(self, counts: dict[tuple[int, bool], list[Expr]]) -> Expr:
        """Σ ±2^weight of counts, int32 [4]: from the highest weight down, doubled in between."""
        from tvm import tirx

        one = tirx.Broadcast(tirx.const(1, "int32"), ROWS)
        total: Expr = None
        for weight in range(max(w for w, _ in counts), -1, -1):
            if total is not None:
                total = total << one
            for negative in (False, True):
                if (weight, negative) in counts:
                    total = self._sum(total, counts[weight, negative], negative)
        return total

    def _sum(self, start: Expr, counts: list[Expr], negative: bool) -> Expr:
        """``start + Σ counts`` (or minus), lanes of four bytes."""
        from tvm import tirx

        zero = tirx.Broadcast(tirx.const(0, "int32"), ROWS)
        if self.isa.dotprod:
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


def pack_intrinsic(planes: int) -> str:
    """Register (once) and name the packing of 32 codes into planes.

    ``Y[t] += Σ_e (X[e] >> t & 1) << (8 (e % 4) + e // 4)``: X int32 [32], Y int32 [p].

    Parameters
    ----------
    planes : int
        p.
    """
    return register(f"apq_cmtst_{planes}x{UNIT_K}_s32b32", lambda: pack_pair(planes, _pack_body))


def _pack_body(planes: int, x: Buffer, y: Buffer) -> None:
    """Byte 4v + c of a half becomes bit v (4 + v in the second half) of byte c: four lanes' or."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

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
        word = tirx.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", words)
        b.buffer_store(y, y[t, 0] + word, [t, 0])

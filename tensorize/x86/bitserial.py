"""Products of bit planes by AND (XOR for signs) and popcount, on x86.

``acc[i, r] += Σ_k term(code[r, k], x[i, k])`` over U units of 32 k. Codes of q bits lie as
`apq_tvm.codegen.layouts.interleaved` stores them, so that every kernel of a layer shares them: a
few shifts and masks gather bit s of a unit into one vector, where k = 4v + c of row r is bit v of
byte 4r + c. Activations lie as planes of that order: bit ``8c + v`` of the 32-bit word of plane t.

- p = 2, codes -1, 0 and 1, whose plane 0 says n: not zero, and plane 1 s: negative:
  ``term = Σ_t 2^t ((W_t xor s) & n)``, one popcount for two planes; the operator takes off what
  negatives count too much.
- p >= 3 bits, two's complement: ``term = code * x``, Σ_s Σ_t ±2^(s+t) popcount(W_s & X_t); the
  planes of the top bit, which weighs -2^(p-1), are subtracted.
- p = 1, signs x = 2u - 1: ``term = Σ_s 2^s (W_s xor u)``; the operator turns it into a product.

``vpopcntd`` counts 32 bits of a lane (AVX-512 VPOPCNTDQ); AVX2 looks nibbles up and adds bytes
(`apq_tvm.tensorize.x86.byte_sums`). The planes are ABQ-LLM's (AAAI 2025), section 3.4.

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, VPOPCNT, PSHUFB; LLVM's
IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import llvm
from apq_tvm.tensorize.meaning.bitserial import BitserialPair
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.byte_sums import ByteSums, add

Expr = Any  # tvm is untyped


@dataclass(frozen=True)
class PopcountInstruction:
    """How set bits are counted.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    rows : int
        R of the layout: int32 lanes of its vectors.
    features : tuple of str
        LLVM features it needs, any one of them.
    units : int
        Most units that one intrinsic call should sum.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    units: int


VPOPCNT = PopcountInstruction("vpopcntd", 16, ("avx512vpopcntdq",), 4)
PSHUFB = PopcountInstruction("pshufb", 8, ("avx2",), 4)

INSTRUCTIONS = (VPOPCNT, PSHUFB)
"""In order of preference."""


def bitserial_intrinsic(
    instruction: PopcountInstruction,
    unit: Unit,
    planes: int,
    units: int = 1,
    m: int = 1,
    ahead: int = 0,
) -> str:
    """Register (once) and name the sum over some units.

    Parameters
    ----------
    instruction : PopcountInstruction
        Its rows must be the unit's.
    unit : Unit
        Of one group.
    planes : int
        p, bits of an activation.
    units : int
        U, units one call sums.
    m : int
        Rows of x.
    ahead : int
        Bytes ahead of a unit to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; operands codes uint8 [U, bytes] ([bytes] for one unit), x int32
        [m, p, U] ([p, U] for one row) and acc int32 [m, R] ([R]).
    """
    name = f"apq_{instruction.name}_{m}x{unit.rows}x{UNIT_K * units}_b{planes}b{unit.bits}s32"
    name += f"_pf{ahead}" if ahead else ""
    pair = _Pair(instruction, unit, planes, units, m, ahead)
    return register(name, lambda: (pair.member(False), pair.member(True)))


class _Pair(BitserialPair):
    """Counts with one of the two instructions."""

    def __init__(
        self,
        instruction: PopcountInstruction,
        unit: Unit,
        planes: int,
        units: int,
        m: int,
        ahead: int,
    ) -> None:
        super().__init__(unit, planes, units, m, ahead)
        self.isa = instruction

    def totals(self) -> list[Expr]:
        """int32 [R] sums for every row of x, in instructions."""
        return self._count_lanes() if self.isa is VPOPCNT else self._count_nibbles()

    def shift(self, vector: Expr, down: int) -> Expr:
        """A byte vector shifted right in 16-bit lanes; masks drop what crosses over."""
        from tvm import tirx

        if not down:
            return vector
        words = tirx.reinterpret(f"uint16x{self.size // 2}", vector)
        amount = tirx.Broadcast(tirx.const(abs(down), "uint16"), self.size // 2)
        move = tirx.shift_right if down > 0 else tirx.shift_left
        return tirx.reinterpret(f"uint8x{self.size}", move(words, amount))

    def _count_lanes(self) -> list[Expr]:
        """int32 [R] for every row of x: whole lanes are counted."""
        from tvm import tirx

        lanes = f"int32x{self.unit.rows}"
        one, zero = (tirx.Broadcast(tirx.const(v, "int32"), self.unit.rows) for v in (1, 0))
        weights = self.unit.bits + self.terms - 1
        sums: list[list[Expr]] = [[None] * weights for _ in range(self.m)]  # by weight 2^(s+t)
        for which in range(self.units):
            planes = self.planes_of(which)
            for i, t in itertools.product(range(self.m), range(self.terms)):
                x = self.operands(i, t, which)
                for s, w in enumerate(planes):
                    bits = tirx.reinterpret(lanes, self.match(w, x))
                    counts = llvm(lanes, f"llvm.ctpop.v{self.unit.rows}i32", bits)
                    negative = zero if self.negative(t) else None
                    sums[i][s + t] = add(sums[i][s + t], counts, negative)
        totals = []
        for row in sums:
            total = row[-1]
            for weighed in reversed(row[:-1]):
                total = tirx.shift_left(total, one) + weighed
            totals.append(total)
        return totals

    def _count_nibbles(self) -> list[Expr]:
        """int32 [R] for every row of x: bytes of counts, widened where they are full."""
        sums = [ByteSums() for _ in range(self.m)]
        split = self.m * self.terms * self.unit.bits > 1
        for which in range(self.units):
            planes = self.planes_of(which)
            parts = [_nibbles(self, w) for w in planes] if split else []
            for i in range(self.m):
                for t in range(self.terms):
                    x = self.operands(i, t, which)
                    halves = self._halves(x)
                    for s, w in enumerate(planes):
                        if split:
                            low, up = (self.match(parts[s][h], halves[h]) for h in range(2))
                        else:
                            low, up = _nibbles(self, self.match(w, x))
                        sums[i].add(s + t, self.negative(t), low, up)
        return [total.finish() for total in sums]

    def _halves(self, x: list[Expr]) -> tuple[list[Expr], list[Expr]]:
        """Operands for the low and for the high nibbles, which those of weights are masked to.

        An AND with a masked vector needs no other mask; a XOR does, unless an AND follows.
        """
        pairs = [_nibbles(self, v) if i == 0 and self.p < 3 else (v, self.shift(v, 4))
                 for i, v in enumerate(x)]  # fmt: skip
        return [low for low, _ in pairs], [high for _, high in pairs]


def _nibbles(pair: _Pair, vector: Expr) -> tuple[Expr, Expr]:
    return pair.masked(vector, 15), pair.masked(pair.shift(vector, 4), 15)

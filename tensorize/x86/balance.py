"""Dot products of one unit of ``W2*`` codes (3L rows x 32 k, three rows in 7 bits), on x86.

``acc[i, part, r] += Σ_k digit(code[r, k], part) x[i, k]``, digits 0..4 (`tensorize.balance`).
Codes c are taken apart as `apq_tvm.tensorize.x86.balance_codes` says. Where that takes divisions,
the digits are not needed: with T0 = Σ c x, T1 = Σ (c // 5) x and T2 = Σ (c // 25) x the sums of
the digits are T0 - 5 T1, T1 - 5 T2 and T2.

int16 sums of ``vpmaddubsw``: 2 * 124 * 127 = 31496 for c, one instruction; 2 * 24 * 127 = 6096
for c // 5, 5 of them; 2 * 4 * 127 = 1016 for c // 25, all 8 of a unit.

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMADDUBSW, PMADDWD, PBLENDVB,
VPERMI2B, VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, VECTORS
from apq_tvm.tensorize.pairs.balance_dot import BalanceBuffers
from apq_tvm.tensorize.pairs.balance_dot import balance_intrinsic as dot_intrinsic
from apq_tvm.tensorize.x86.balance_codes import BalanceInstruction, Codes
from apq_tvm.tensorize.x86.dot import four_k
from apq_tvm.tensorize.x86.vectors import maddubs, masked, shifted, vpdpbusd, widened

FIFTH_SUMS = 4
"""``vpmaddubsw`` results of c // 5 that are summed in int16: at most 5 (above), half of a unit."""


def balance_intrinsic(instruction: BalanceInstruction, m: int = 1, ahead: int = 0) -> str:
    """Register (once) and name the dot product of one unit.

    Parameters
    ----------
    instruction : BalanceInstruction
    m : int
        Rows of x; codes are taken apart once for all of them.
    ahead : int
        Bytes ahead of the unit to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; operands are those of `apq_tvm.tensorize.meaning.balance.balance_dot`.
    """

    def implement(o: BalanceBuffers) -> None:
        _Unit(instruction, o).multiply()

    return dot_intrinsic(instruction.name, instruction.lanes, m, ahead, implement)


class _Unit(Codes):
    """Emits the product of one unit."""

    def __init__(self, instruction: BalanceInstruction, o: BalanceBuffers) -> None:
        super().__init__(instruction, o.codes)
        self.o, self.m = o, o.dot.m

    def multiply(self) -> None:
        """Emit the instructions."""
        if not self.isa.vnni:
            self._multiply_maddubs()
        elif self.isa.tables:
            self._look_up(self.vectors())
        else:
            *stored, pooled = self.vectors()
            self._multiply_vnni([*(masked(vector, 0x7F) for vector in stored), pooled])

    def _look_up(self, vectors: list[Expr]) -> None:
        acc = self.o.acc
        at = [[self.o.digit_at(i, part) for part in range(PARTS)] for i in range(self.m)]
        sums = [[acc[tuple(index)] for index in row] for row in at]
        for part in range(PARTS):
            for j, vector in enumerate(vectors):
                codes = self.digit(vector, part)
                for i in range(self.m):
                    x = four_k(self.o, i, 4 * j, self.isa.lanes)
                    sums[i][part] = vpdpbusd(sums[i][part], codes, x)
        for i in range(self.m):
            for part in range(PARTS):
                b.buffer_store(acc, sums[i][part], at[i][part])

    def _multiply_vnni(self, codes: list[Expr]) -> None:
        lanes = self.isa.lanes
        zero = tirx.Broadcast(tirx.const(0, "int32"), lanes)
        five = tirx.Broadcast(tirx.const(5, "int32"), lanes)
        sums = [[zero] * PARTS for _ in range(self.m)]
        for j, code in enumerate(codes):
            parts = (code, *self.quotients(code))
            for i in range(self.m):
                x = four_k(self.o, i, 4 * j, self.isa.lanes)
                sums[i] = [vpdpbusd(s, p, x) for s, p in zip(sums[i], parts, strict=True)]
        for i, (t0, t1, t2) in enumerate(sums):
            for part, total in enumerate((t0 - t1 * five, t1 - t2 * five, t2)):
                self.o.add(i, part, total)

    def _multiply_maddubs(self) -> None:
        """One code vector after the other, so that few are live: there are 16 registers."""
        ramp = tirx.Ramp(i64(0), i64(1), 16)
        # Sums of c // 5 and c // 25 for every row of x; indexed by constants, so in registers.
        words = b.alloc_buffer((self.m, 2, 16), "int16", align=32)
        pooled = b.alloc_buffer((self.size,), "uint8", align=32)
        bytes_at = [tirx.Ramp(i64(0), i64(1), self.size)]

        def products(code: Expr, j: int) -> None:
            fifth, last = self.quotients(code)
            for i in range(self.m):
                x = four_k(self.o, i, 4 * j, self.isa.lanes)
                self.o.add(i, 0, widened(maddubs(code, x)))
                for which, codes in ((0, fifth), (1, last)):
                    at = [i64(i), i64(which), ramp]
                    value = maddubs(codes, x)
                    if j % (FIFTH_SUMS if which == 0 else VECTORS):
                        value = words[tuple(at)] + value
                    b.buffer_store(words, value, at)
            if j % FIFTH_SUMS == FIFTH_SUMS - 1:
                self._flush(words, 0, 1)

        for j in range(STORED):
            vector = self.load(j)
            bit = masked(shifted(vector, j - STORED), 1 << j)
            if j:
                bit = pooled.vload([i64(0)], f"uint8x{self.size}") | bit
            b.buffer_store(pooled, bit, bytes_at)
            products(masked(vector, 0x7F), j)
        products(pooled.vload([i64(0)], f"uint8x{self.size}"), STORED)
        self._flush(words, 1, 2)

    def _flush(self, words: Buffer, which: int, part: int) -> None:
        """Add sums of ``c // 5^part``: the digit's own, and -5 times them to the one below."""
        for i in range(self.m):
            total = words[i64(i), i64(which), tirx.Ramp(i64(0), i64(1), 16)]
            self.o.add(i, part, widened(total))
            self.o.add(i, part - 1, widened(total, -5))

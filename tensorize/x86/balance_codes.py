"""Taking ``W2*`` codes of one unit apart, on x86: the steps that all its intrinsics share.

A code is c = v0 + 5 v1 + 25 v2 (`apq_tvm.tensorize.meaning.balance`). Two ways:

- ``vpermi2b`` (AVX-512 VBMI): one lookup per digit in 128 bytes, which ignores the eighth bit of
  its index, where the unit keeps another code.
- Multiplications: with e = 51 (c + 1), c // 5 = e >> 8 and c // 25 = 51 e >> 16 are exact for
  c <= 124. ``vpmaddubsw`` with every other factor 0 multiplies bytes, ``vpmulhuw`` words.

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMADDUBSW, PMULHUW, PBLENDVB,
VPERMI2B; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, i64, x86
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, balance_digits
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.vectors import maddubs, masked, shifted


@dataclass(frozen=True)
class BalanceInstruction:
    """How codes are taken apart and multiplied.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    lanes : int
        L of the layout: int32 lanes of its vectors.
    features : frozenset of tuple of str
        LLVM features it needs: one of every tuple.
    tables : bool
        True to look digits up, False to multiply.
    vnni : bool
        True for vpdpbusd, False for vpmaddubsw.
    """

    name: str
    lanes: int
    features: tuple[tuple[str, ...], ...]
    tables: bool
    vnni: bool

    @property
    def vector_bytes(self) -> int:
        """Bytes of a vector."""
        return 4 * self.lanes


VPERMI2B = BalanceInstruction("vpermi2b", 16, (("avx512vbmi",), ("avx512vnni",)), True, True)
VNNI512 = BalanceInstruction("vpdpbusd512", 16, (("avx512vnni",), ("avx512bw",)), False, True)
VNNI256 = BalanceInstruction("vpdpbusd256", 8, (("avxvnni", "avx512vnni"),), False, True)
MADDUBS = BalanceInstruction("maddubs", 8, (("avx2",),), False, False)

INSTRUCTIONS = (VPERMI2B, VNNI512, VNNI256, MADDUBS)
"""In order of preference."""


def digits_intrinsic(instruction: BalanceInstruction) -> str:
    """Register (once) and name the taking apart of one unit.

    Returns
    -------
    str
        The intrinsic's name; operands codes uint8 [28L] and digits uint8 [3, 8, L, 4].
    """
    name = f"apq_{instruction.name}_digits_{PARTS * instruction.lanes}x{UNIT_K}_t5u8"

    def emit(codes: Buffer, out: Buffer) -> None:
        Codes(instruction, codes).store_digits(out)

    return register(name, lambda: pair(balance_digits(instruction.lanes), emit))


class Codes:
    """Vectors of one unit's codes, in instructions."""

    def __init__(self, instruction: BalanceInstruction, codes: Buffer) -> None:
        self.isa, self.size, self.codes = instruction, instruction.vector_bytes, codes

    def load(self, vector: int) -> Expr:
        """One stored vector: 7 bits of code and 1 of the eighth vector in every byte."""
        return self.codes.vload([i64(vector * self.size)], f"uint8x{self.size}")

    def vectors(self) -> list[Expr]:
        """All eight code vectors; in the top bits of the first seven there is something else."""
        stored = [self.load(j) for j in range(STORED)]
        return [*stored, self.pooled(stored)]

    def constant(self, values: list[int], dtype: str) -> Expr:
        """A vector of constants."""
        lanes = [tirx.const(i, "int32") for i in range(len(values))]
        return tirx.Shuffle([tirx.const(v, dtype) for v in values], lanes)

    def pooled(self, stored: list[Expr]) -> Expr:
        """The code vector in the top bits of the stored ones, its own top bit 0."""
        pooled = None
        for j, vector in enumerate(stored):
            bit = masked(shifted(vector, j - STORED), 1 << j)
            pooled = bit if pooled is None else pooled | bit
        return pooled

    def words(self, vector: Expr) -> Expr:
        """A byte vector as 16-bit lanes."""
        return tirx.reinterpret(f"uint16x{self.size // 2}", vector)

    def quotients(self, codes: Expr) -> tuple[Expr, Expr]:
        """c // 5 and c // 25 of every byte."""
        pairs, vector = self.size // 2, f"uint8x{self.size}"
        # In 16-bit lanes: LLVM makes x - (-1) of x + 1, and the vector of -1 anew every time.
        ones = tirx.Broadcast(tirx.const(0x0101, "uint16"), pairs)
        above = tirx.reinterpret(vector, self.words(codes) + ones)
        even = maddubs(above, self.constant([51, 0] * pairs, "int8"))
        odd = maddubs(above, self.constant([0, 51] * pairs, "int8"))
        low = shifted(tirx.reinterpret(vector, even), -8)
        fifth = self.merged(low, tirx.reinterpret(vector, odd))
        # 256 times the factor leaves the quotient of an odd byte where it belongs.
        last = self.merged(self.high_product(even, 51), self.high_product(odd, 51 * 256))
        return fifth, last

    def high_product(self, words: Expr, factor: int) -> Expr:
        """Bytes of ``words * factor >> 16``."""
        name = "avx512.pmulhu.w.512" if self.size == 64 else "avx2.pmulhu.w"
        factors = tirx.Broadcast(tirx.const(factor, "int16"), self.size // 2)
        product = x86(f"int16x{self.size // 2}", name, words, factors)
        return tirx.reinterpret(f"uint8x{self.size}", product)

    def merged(self, even: Expr, odd: Expr) -> Expr:
        """Even bytes of one vector, whose odd ones are 0, and odd bytes of another."""
        odd_bytes = self.constant([0, 255] * (self.size // 2), "uint8")
        if self.size == 32:
            return x86("uint8x32", "avx2.pblendvb", even, odd, odd_bytes)
        return tirx.bitwise_or(even, tirx.bitwise_and(odd, odd_bytes))

    def digit(self, vector: Expr, part: int) -> Expr:
        """One digit by lookup."""
        digits = [value // 5**part % 5 for value in range(128)]
        low, high = (self.constant(digits[h : h + 64], "uint8") for h in (0, 64))
        index = tirx.reinterpret("uint8x64", vector)
        return x86("uint8x64", "avx512.vpermi2var.qi.512", low, index, high)

    def store_digits(self, out: Buffer) -> None:
        """Store the digits of a unit, uint8 [3, 8, L, 4]."""
        ramp = tirx.Ramp(0, 1, self.size)  # over the last two axes, which are contiguous
        for j, vector in enumerate(self.vectors()):
            for part, digits in enumerate(self._digits(vector)):
                b.buffer_store(out, digits, [part, j, 0, ramp])

    def _digits(self, vector: Expr) -> list[Expr]:
        """uint8 vectors of the three digits; the top bit of a code is ignored."""
        if self.isa.tables:
            return [self.digit(vector, part) for part in range(PARTS)]
        code = masked(vector, 0x7F)
        fifth, last = self.quotients(code)

        def five(digits: Expr) -> Expr:
            return shifted(digits, 2) + digits  # at most 96: stays in its byte

        return [code - five(fifth), fifth - five(last), last]

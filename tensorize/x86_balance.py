"""Dot products of one unit of ``W2*`` codes (3L rows x 32 k, three rows in 7 bits), on x86.

``acc[i, part, r] += Σ_k digit(code[r, k], part) x[i, k]``, digits 0..4 (`tensorize.balance`). Two
ways to take a code c = v0 + 5 v1 + 25 v2 apart:

- ``vpermi2b`` (AVX-512 VBMI): one lookup per digit in 128 bytes, which ignores the eighth bit of
  its index, where the unit keeps another code.
- Multiplications: c // 5 = 103 c >> 9 and c // 25 = 41 c >> 10 are exact for c <= 124, and
  ``vpmaddubsw`` with every other factor 0 multiplies bytes. The digits are not needed: with
  T0 = Σ c x, T1 = Σ (c // 5) x and T2 = Σ (c // 25) x the sums of the digits are T0 - 5 T1,
  T1 - 5 T2 and T2.

int16 sums of ``vpmaddubsw``: 2 * 124 * 127 = 31496 for c, one instruction; 2 * 24 * 127 = 6096
for c // 5, 5 of them; 2 * 4 * 127 = 1016 for c // 25, all 8 of a unit.

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMADDUBSW, PMADDWD, PBLENDVB,
VPERMI2B, VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.balance import STORED, VECTORS, digit, triple
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.unit import UNIT_K

Expr = Any  # tvm is untyped
Buffer = Any

PARTS = 3

FIFTH_SUMS = 4
"""``vpmaddubsw`` results of c // 5 that are summed in int16: at most 5 (above), half of a unit."""


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
        The intrinsic's name; operands codes uint8 [28L], x int8 [m, 32] ([32] for one row) and
        acc int32 [m, 3, L] ([3, L]).
    """
    rows = PARTS * instruction.lanes
    name = f"apq_{instruction.name}_{m}x{rows}x{UNIT_K}_s8t5s32" + (f"_pf{ahead}" if ahead else "")
    unit = _Unit(instruction, m, ahead)
    return register(name, lambda: (unit.member(False), unit.member(True)))


def digits_intrinsic(instruction: BalanceInstruction) -> str:
    """Register (once) and name the taking apart of one unit.

    Returns
    -------
    str
        The intrinsic's name; operands codes uint8 [28L] and digits uint8 [3, 8, L, 4].
    """
    unit = _Unit(instruction, 1, 0)
    return register(
        f"apq_{instruction.name}_digits_{PARTS * instruction.lanes}x{UNIT_K}_t5u8",
        lambda: (unit.digits(False), unit.digits(True)),
    )


def _i64(value: int) -> Expr:
    from tvm import tirx

    return tirx.const(value, "int64")


class _Unit:
    """Emits the pair of one intrinsic."""

    def __init__(self, instruction: BalanceInstruction, m: int, ahead: int) -> None:
        self.isa, self.m, self.ahead = instruction, m, ahead
        self.size = instruction.vector_bytes

    def member(self, instructions: bool) -> Any:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as b

        nbytes, lanes, rows = STORED * self.size, self.isa.lanes, (self.m,) if self.m > 1 else ()

        def operand(name: str, shape: tuple[int, ...], dtype: str, align: int, strides: Any) -> Any:
            return b.match_buffer(
                b.arg(name, b.handle()),
                [_i64(extent) for extent in shape],
                dtype,
                strides=strides,
                offset_factor=1,
                align=align,
            )

        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("dot")
            self.codes = operand("codes", (nbytes,), "uint8", self.size, None)
            row_stride = ["row_stride", _i64(1)] if rows else None
            self.x = operand("x", (*rows, UNIT_K), "int8", 4, row_stride)
            self.acc = operand("acc", (*rows, PARTS, lanes), "int32", self.size, None)
            with b.sblock("root"):
                whole = [
                    buffer[tuple(slice(0, extent) for extent in buffer.shape)]
                    for buffer in (self.acc, self.codes, self.x)
                ]
                b.reads(*whole)
                b.writes(whole[0])
                (self._instructions if instructions else self._loops)()
        return builder.get()

    def digits(self, instructions: bool) -> Any:
        """One member of the pair that stores the digits."""
        from tvm import tirx
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as b

        lanes, shape = self.isa.lanes, (PARTS, VECTORS, self.isa.lanes, 4)
        strides = None
        if instructions:
            strides = [tirx.Var("part", "int64"), *map(_i64, (4 * lanes, 4, 1))]
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("digits")
            self.codes = b.match_buffer(
                b.arg("codes", b.handle()),
                (_i64(STORED * self.size),),
                "uint8",
                offset_factor=1,
                align=self.size,
            )
            out = b.match_buffer(
                b.arg("out", b.handle()),
                [_i64(extent) for extent in shape],
                "uint8",
                strides=strides,
                offset_factor=1,
                align=self.size,
            )
            with b.sblock("root"):
                b.reads(self.codes[0 : STORED * self.size])
                b.writes(out[tuple(slice(0, extent) for extent in shape)])
                if instructions:
                    self._store_digits(out)
                else:
                    with b.grid(*shape) as loops, b.sblock("digits"):
                        part, j, r, i = b.axis.remap("SSSS", loops)
                        b.reads(self.codes[0 : STORED * self.size])
                        b.writes(out[part, j, r, i])
                        code = triple(lambda byte: self.codes[byte], self.size, j, r * 4 + i)
                        b.buffer_store(out, digit(code, part).astype("uint8"), [part, j, r, i])
        return builder.get()

    def _store_digits(self, out: Buffer) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        ramp = tirx.Ramp(0, 1, self.size)  # over the last two axes, which are contiguous
        stored = [self._load(j) for j in range(STORED)]
        pooled = self._pooled(stored)
        for j, vector in enumerate([*stored, pooled]):
            for part, digits in enumerate(self._digits(vector)):
                b.buffer_store(out, digits, [part, j, 0, ramp])

    def _digits(self, vector: Expr) -> list[Expr]:
        """uint8 vectors of the three digits; the top bit of a code is ignored."""
        from tvm import tirx

        if self.isa.tables:
            return [self._digit(vector, part) for part in range(PARTS)]
        code = self._and(vector, 0x7F)
        fifth, last = self._quotient(code, 103, 9), self._quotient(code, 41, 10)

        def five(digits: Expr) -> Expr:
            amount = tirx.Broadcast(tirx.const(2, "uint16"), self.size // 2)
            four = tirx.shift_left(self._words(digits), amount)  # at most 96: stays in its byte
            return tirx.reinterpret(f"uint8x{self.size}", four) + digits

        return [code - five(fifth), fifth - five(last), last]

    def _digit(self, vector: Expr, part: int) -> Expr:
        """One digit by lookup."""
        from tvm import tirx

        digits = [value // 5**part % 5 for value in range(128)]
        low, high = (self._constant(digits[h : h + 64], "uint8") for h in (0, 64))
        index = tirx.reinterpret("uint8x64", vector)
        return self._call("avx512.vpermi2var.qi.512", "uint8x64", low, index, high)

    def _loops(self) -> None:
        from tvm.tirx.script.builder import ir as b

        extents = [*([self.m] if self.m > 1 else []), PARTS, self.isa.lanes, VECTORS, 4]
        kinds = "S" * (len(extents) - 2) + "RR"
        with b.grid(*map(_i64, extents)) as loops, b.sblock("dot"):
            *at, j, c = b.axis.remap(kinds, loops)
            *lead, part, r = at
            b.reads(
                self.acc[tuple(at)],
                self.codes[0 : STORED * self.size],
                self.x[(*lead, slice(0, UNIT_K))],
            )
            b.writes(self.acc[tuple(at)])
            code = triple(lambda byte: self.codes[byte], self.size, j, r * _i64(4) + c)
            x = self.x[(*lead, j * _i64(4) + c)].astype("int32")
            b.buffer_store(self.acc, self.acc[tuple(at)] + digit(code, part) * x, at)

    def _instructions(self) -> None:
        self._prefetch()
        if not self.isa.vnni:
            self._multiply_maddubs()
            return
        stored = [self._load(j) for j in range(STORED)]
        if self.isa.tables:
            self._look_up([*stored, self._pooled(stored)])
        else:
            codes = [self._and(vector, 0x7F) for vector in stored]
            self._multiply_vnni([*codes, self._pooled(stored)])

    def _prefetch(self) -> None:
        """A prefetch never faults, so the address may lie past the end of the weights."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        for line in range(0, STORED * self.size if self.ahead else 0, 64):
            address = tirx.address_of(self.codes[_i64(self.ahead + line)])
            arguments = [tirx.const(v, "int32") for v in (0, 3, 1)]  # read, all cache levels, data
            b.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *arguments))

    def _load(self, vector: int) -> Expr:
        return self.codes.vload([_i64(vector * self.size)], f"uint8x{self.size}")

    def _constant(self, values: list[int], dtype: str) -> Expr:
        from tvm import tirx

        lanes = [tirx.const(i, "int32") for i in range(len(values))]
        return tirx.Shuffle([tirx.const(v, dtype) for v in values], lanes)

    def _and(self, vector: Expr, mask: int) -> Expr:
        from tvm import tirx

        return tirx.bitwise_and(vector, tirx.Broadcast(tirx.const(mask, "uint8"), self.size))

    def _pooled(self, stored: list[Expr]) -> Expr:
        """The code vector in the top bits of the stored ones, its own top bit 0.

        Shifted in 16-bit lanes: x86 has no 8-bit shift, and the masks drop what crosses over.
        """
        pooled = None
        for j, vector in enumerate(stored):
            bit = self._and(self._shift(vector, STORED - j), 1 << j)
            pooled = bit if pooled is None else pooled | bit
        return pooled

    def _words(self, vector: Expr) -> Expr:
        from tvm import tirx

        return tirx.reinterpret(f"uint16x{self.size // 2}", vector)

    def _shift(self, vector: Expr, down: int) -> Expr:
        """A byte vector shifted right in 16-bit lanes."""
        from tvm import tirx

        amount = tirx.Broadcast(tirx.const(down, "uint16"), self.size // 2)
        return tirx.reinterpret(
            f"uint8x{self.size}", tirx.shift_right(self._words(vector), amount)
        )

    def _call(self, name: str, dtype: str, *operands: Expr) -> Expr:
        from tvm import tirx

        return tirx.call_llvm_pure_intrin(dtype, f"llvm.x86.{name}", *operands)

    def _maddubs(self, codes: Expr, factors: Expr) -> Expr:
        name = "avx512.pmaddubs.w.512" if self.size == 64 else "avx2.pmadd.ub.sw"
        return self._call(name, f"int16x{self.size // 2}", codes, factors)

    def _quotient(self, codes: Expr, factor: int, shift: int) -> Expr:
        """``codes * factor >> shift`` of every byte, at most 127."""
        from tvm import tirx

        pairs = self.size // 2
        even = self._maddubs(codes, self._constant([factor, 0] * pairs, "int8"))
        odd = self._maddubs(codes, self._constant([0, factor] * pairs, "int8"))
        low = self._shift(tirx.reinterpret(f"uint8x{self.size}", even), shift)
        # The product of an odd byte is 8 bits too low for its place.
        high = self._shift(tirx.reinterpret(f"uint8x{self.size}", odd), shift - 8)
        odd_bytes = self._constant([0, 255] * pairs, "uint8")
        if self.size == 32:
            return self._call("avx2.pblendvb", "uint8x32", low, high, odd_bytes)
        return tirx.bitwise_or(low, tirx.bitwise_and(high, odd_bytes))

    def _activations(self, row: int, vector: int) -> Expr:
        """int8 [4L]: k = 4 * vector .. + 3 of one row, repeated for every row of weights."""
        from tvm import tirx

        lead = [_i64(row)] if self.m > 1 else []
        four = tirx.reinterpret("int32", self.x.vload([*lead, _i64(4 * vector)], "int8x4"))
        return tirx.reinterpret(f"int8x{self.size}", tirx.Broadcast(four, self.isa.lanes))

    def _sums_at(self, row: int, part: int) -> list[Expr]:
        from tvm import tirx

        lead = [_i64(row)] if self.m > 1 else []
        return [*lead, _i64(part), tirx.Ramp(_i64(0), _i64(1), self.isa.lanes)]

    def _dp(self, total: Expr, codes: Expr, x: Expr) -> Expr:
        return self._call(
            f"avx512.vpdpbusd.{8 * self.size}", f"int32x{self.isa.lanes}", total, codes, x
        )

    def _look_up(self, vectors: list[Expr]) -> None:
        from tvm.tirx.script.builder import ir as b

        at = [[self._sums_at(i, part) for part in range(PARTS)] for i in range(self.m)]
        sums = [[self.acc[tuple(index)] for index in row] for row in at]
        for part in range(PARTS):
            for j, vector in enumerate(vectors):
                codes = self._digit(vector, part)
                for i in range(self.m):
                    sums[i][part] = self._dp(sums[i][part], codes, self._activations(i, j))
        for i in range(self.m):
            for part in range(PARTS):
                b.buffer_store(self.acc, sums[i][part], at[i][part])

    def _store(self, row: int, totals: list[Expr]) -> None:
        """Add what the digits' sums are, from T0, T1 and T2."""
        from tvm.tirx.script.builder import ir as b

        for part, total in enumerate(totals):
            index = self._sums_at(row, part)
            b.buffer_store(self.acc, self.acc[tuple(index)] + total, index)

    def _multiply_vnni(self, codes: list[Expr]) -> None:
        from tvm import tirx

        lanes = self.isa.lanes
        zero = tirx.Broadcast(tirx.const(0, "int32"), lanes)
        five = tirx.Broadcast(tirx.const(5, "int32"), lanes)
        sums = [[zero] * PARTS for _ in range(self.m)]
        for j, code in enumerate(codes):
            parts = (code, self._quotient(code, 103, 9), self._quotient(code, 41, 10))
            for i in range(self.m):
                x = self._activations(i, j)
                sums[i] = [self._dp(s, p, x) for s, p in zip(sums[i], parts, strict=True)]
        for i, (t0, t1, t2) in enumerate(sums):
            self._store(i, [t0 - t1 * five, t1 - t2 * five, t2])

    def _multiply_maddubs(self) -> None:
        """One code vector after the other, so that few are live: there are 16 registers."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        ramp = tirx.Ramp(_i64(0), _i64(1), 16)
        # Sums of c // 5 and c // 25 for every row of x; indexed by constants, so in registers.
        words = b.alloc_buffer((self.m, 2, 16), "int16", align=32)
        pooled = b.alloc_buffer((self.size,), "uint8", align=32)
        bytes_at = [tirx.Ramp(_i64(0), _i64(1), self.size)]

        def products(code: Expr, j: int) -> None:
            fifth, last = self._quotient(code, 103, 9), self._quotient(code, 41, 10)
            for i in range(self.m):
                x = self._activations(i, j)
                self._accumulate(i, 0, self._widen(self._maddubs(code, x)))
                for which, codes in ((0, fifth), (1, last)):
                    at = [_i64(i), _i64(which), ramp]
                    value = self._maddubs(codes, x)
                    if j % (FIFTH_SUMS if which == 0 else VECTORS):
                        value = words[tuple(at)] + value
                    b.buffer_store(words, value, at)
            if j % FIFTH_SUMS == FIFTH_SUMS - 1:
                self._flush(words, 0, 1)

        for j in range(STORED):
            vector = self._load(j)
            bit = self._and(self._shift(vector, STORED - j), 1 << j)
            if j:
                bit = pooled.vload([_i64(0)], f"uint8x{self.size}") | bit
            b.buffer_store(pooled, bit, bytes_at)
            products(self._and(vector, 0x7F), j)
        products(pooled.vload([_i64(0)], f"uint8x{self.size}"), STORED)
        self._flush(words, 1, 2)

    def _widen(self, words: Expr, times: int = 1) -> Expr:
        from tvm import tirx

        factor = tirx.Broadcast(tirx.const(times, "int16"), 16)
        return self._call("avx2.pmadd.wd", "int32x8", words, factor)

    def _accumulate(self, row: int, part: int, term: Expr) -> None:
        from tvm.tirx.script.builder import ir as b

        index = self._sums_at(row, part)
        b.buffer_store(self.acc, self.acc[tuple(index)] + term, index)

    def _flush(self, words: Buffer, which: int, part: int) -> None:
        """Add sums of ``c // 5^part``: the digit's own, and -5 times them to the one below."""
        from tvm import tirx

        for i in range(self.m):
            total = words[_i64(i), _i64(which), tirx.Ramp(_i64(0), _i64(1), 16)]
            self._accumulate(i, part, self._widen(total))
            self._accumulate(i, part - 1, self._widen(total, -5))

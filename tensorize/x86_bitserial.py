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
(`apq_tvm.tensorize.x86_byte_sums`). The planes are ABQ-LLM's (AAAI 2025), section 3.4.

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, VPOPCNT, PSHUFB; LLVM's
IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.bitserial import plane_bit, term
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.unit import UNIT_K, Unit, decode
from apq_tvm.tensorize.unit_dot import operand
from apq_tvm.tensorize.x86_byte_sums import ByteSums, add

Expr = Any  # tvm is untyped
Buffer = Any
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


def _i64(value: int) -> Expr:
    from tvm import tirx

    return tirx.const(value, "int64")


class _Pair:
    """Emits the two members of one intrinsic."""

    def __init__(
        self,
        instruction: PopcountInstruction,
        unit: Unit,
        planes: int,
        units: int,
        m: int,
        ahead: int,
    ) -> None:
        self.isa, self.unit, self.p, self.units, self.m = instruction, unit, planes, units, m
        self.ahead, self.size = ahead, unit.vector_bytes

    def member(self, instructions: bool) -> Any:
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as b

        rows, many = ((self.m,) if self.m > 1 else ()), ((self.units,) if self.units > 1 else ())

        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("dot")
            self.codes = operand("codes", (*many, self.unit.nbytes), "uint8", self.size, None)
            strides = [*(["row"] if rows else []), "plane", _i64(1)]
            self.x = operand("x", (*rows, self.p, self.units), "int32", 4, strides)
            self.acc = operand("acc", (*rows, self.unit.rows), "int32", self.size, None)
            with b.sblock("root"):
                whole = [
                    buffer[tuple(slice(0, extent) for extent in buffer.shape)]
                    for buffer in (self.acc, self.codes, self.x)
                ]
                b.reads(*whole)
                b.writes(whole[0])
                (self._instructions if instructions else self._loops)()
        return builder.get()

    def _loops(self) -> None:
        from tvm.tirx.script.builder import ir as b

        rows = [self.m] if self.m > 1 else []
        extents = [*rows, self.unit.rows, 8 * self.units, 4]
        kinds = "S" * (len(rows) + 1) + "RR"
        with b.grid(*map(_i64, extents)) as loops, b.sblock("dot"):
            *at, j, c = b.axis.remap(kinds, loops)
            lead, r = at[:-1], at[-1]
            regions = [
                buffer[tuple(slice(0, extent) for extent in buffer.shape[skip:])]
                if not skip
                else buffer[(*lead, *(slice(0, extent) for extent in buffer.shape[skip:]))]
                for buffer, skip in ((self.codes, 0), (self.x, len(lead)))
            ]
            b.reads(self.acc[tuple(at)], *regions)
            b.writes(self.acc[tuple(at)])
            many = self.units > 1
            vector, which = (j % _i64(8), j // _i64(8)) if many else (j, _i64(0))
            code = decode(
                self.unit,
                lambda byte: self.codes[which, byte] if many else self.codes[byte],
                vector,
                r * _i64(4) + c,
            )
            bits = [
                plane_bit(self.x[(*lead, _i64(t), which)], vector, c) for t in range(self.p)
            ]
            value = self.acc[tuple(at)] + term(code, bits, self.unit.bits)
            b.buffer_store(self.acc, value, at)

    def _instructions(self) -> None:
        from tvm.tirx.script.builder import ir as b

        self._prefetch()
        count = self._count_lanes if self.isa is VPOPCNT else self._count_nibbles
        for i, total in enumerate(count()):
            at = self._sums_at(i)
            b.buffer_store(self.acc, self.acc[tuple(at)] + total, at)

    def _prefetch(self) -> None:
        """A prefetch never faults, so the address may lie past the end of the weights."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        for line in range(0, self.units * self.unit.nbytes if self.ahead else 0, 64):
            lead = [_i64(0)] if self.units > 1 else []
            address = tirx.address_of(self.codes[(*lead, _i64(self.ahead + line))])
            arguments = [tirx.const(v, "int32") for v in (0, 3, 1)]  # read, all cache levels, data
            b.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *arguments))

    def _sums_at(self, row: int) -> list[Expr]:
        from tvm import tirx

        lead = [_i64(row)] if self.m > 1 else []
        return [*lead, tirx.Ramp(_i64(0), _i64(1), self.unit.rows)]

    def _planes(self, which: int) -> list[Expr]:
        """uint8 [4R] of every bit of the codes of one unit, lowest first.

        By way of a buffer, which becomes registers: an expression would be emitted at every use.
        """
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        if self.unit.bits == 1:
            return self._bits(which)
        kept = b.alloc_buffer((self.unit.bits, self.size), "uint8", align=64)
        lanes = tirx.Ramp(_i64(0), _i64(1), self.size)
        for s, plane in enumerate(self._bits(which)):
            b.buffer_store(kept, plane, [_i64(s), lanes])
        vector = f"uint8x{self.size}"
        return [kept.vload([_i64(s), _i64(0)], vector) for s in range(self.unit.bits)]

    def _bits(self, which: int) -> list[Expr]:
        planes = []
        lead = [_i64(which)] if self.units > 1 else []
        for width, shift in self.unit.fields:
            loads = [
                self.codes.vload([*lead, _i64(self.size * (shift + i))], f"uint8x{self.size}")
                for i in range(width)
            ]
            for bit in range(width):
                plane: Expr = None
                for i, load in enumerate(loads):
                    mask = sum(1 << at for at in range(i, 8, width))
                    part = self._and(self._shift(load, bit - i), mask)
                    plane = part if plane is None else plane | part
                planes.append(plane)
        return planes

    def _and(self, vector: Expr, mask: int) -> Expr:
        from tvm import tirx

        if mask == 255:
            return vector
        return tirx.bitwise_and(vector, tirx.Broadcast(tirx.const(mask, "uint8"), self.size))

    def _shift(self, vector: Expr, down: int) -> Expr:
        """A byte vector shifted right in 16-bit lanes; masks drop what crosses over."""
        from tvm import tirx

        if not down:
            return vector
        words = tirx.reinterpret(f"uint16x{self.size // 2}", vector)
        amount = tirx.Broadcast(tirx.const(abs(down), "uint16"), self.size // 2)
        move = tirx.shift_right if down > 0 else tirx.shift_left
        return tirx.reinterpret(f"uint8x{self.size}", move(words, amount))

    def _activations(self, row: int, plane: int, which: int) -> Expr:
        """uint8 [4R]: one word of a plane, repeated for every row of weights."""
        from tvm import tirx

        lead = [_i64(row)] if self.m > 1 else []
        word = self.x[(*lead, _i64(plane), _i64(which))]
        return tirx.reinterpret(f"uint8x{self.size}", tirx.Broadcast(word, self.unit.rows))

    @property
    def _terms(self) -> int:
        """Popcounts for one plane of weights: both planes of p = 2 go into one."""
        return 1 if self.p == 2 else self.p

    def _operands(self, row: int, t: int, which: int) -> list[Expr]:
        """Activations of one popcount."""
        planes = (0, 1) if self.p == 2 else (t,)
        return [self._activations(row, plane, which) for plane in planes]

    def _match(self, w: Expr, x: list[Expr]) -> Expr:
        """The bits to count."""
        from tvm import tirx

        if self.p > 2:
            return tirx.bitwise_and(w, x[0])
        flipped = tirx.bitwise_xor(w, x[-1])
        return flipped if self.p == 1 else tirx.bitwise_and(flipped, x[0])

    def _negative(self, t: int) -> bool:
        """Whether plane t of an activation weighs -2^t."""
        return self.p > 2 and t == self.p - 1

    def _call(self, name: str, dtype: str, *operands: Expr) -> Expr:
        from tvm import tirx

        return tirx.call_llvm_pure_intrin(dtype, f"llvm.{name}", *operands)

    def _count_lanes(self) -> list[Expr]:
        """int32 [R] for every row of x: whole lanes are counted."""
        from tvm import tirx

        lanes = f"int32x{self.unit.rows}"
        one, zero = (tirx.Broadcast(tirx.const(v, "int32"), self.unit.rows) for v in (1, 0))
        weights = self.unit.bits + self._terms - 1
        sums: list[list[Expr]] = [[None] * weights for _ in range(self.m)]  # by weight 2^(s+t)
        for which in range(self.units):
            planes = self._planes(which)
            for i, t in itertools.product(range(self.m), range(self._terms)):
                x = self._operands(i, t, which)
                for s, w in enumerate(planes):
                    bits = tirx.reinterpret(lanes, self._match(w, x))
                    counts = self._call(f"ctpop.v{self.unit.rows}i32", lanes, bits)
                    negative = zero if self._negative(t) else None
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
        split = self.m * self._terms * self.unit.bits > 1
        for which in range(self.units):
            planes = self._planes(which)
            parts = [_nibbles(self, w) for w in planes] if split else []
            for i in range(self.m):
                for t in range(self._terms):
                    x = self._operands(i, t, which)
                    halves = self._halves(x)
                    for s, w in enumerate(planes):
                        if split:
                            low, up = (self._match(parts[s][h], halves[h]) for h in range(2))
                        else:
                            low, up = _nibbles(self, self._match(w, x))
                        sums[i].add(s + t, self._negative(t), low, up)
        return [total.finish() for total in sums]


    def _halves(self, x: list[Expr]) -> tuple[list[Expr], list[Expr]]:
        """Operands for the low and for the high nibbles, which those of weights are masked to.

        An AND with a masked vector needs no other mask; a XOR does, unless an AND follows.
        """
        pairs = [_nibbles(self, v) if i == 0 and self.p < 3 else (v, self._shift(v, 4))
                 for i, v in enumerate(x)]  # fmt: skip
        return [low for low, _ in pairs], [high for _, high in pairs]


def _nibbles(pair: _Pair, vector: Expr) -> tuple[Expr, Expr]:
    return pair._and(vector, 15), pair._and(pair._shift(vector, 4), 15)

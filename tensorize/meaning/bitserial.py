"""Planes of bits in TensorIR: what a weight and an activation add to a bit-serial sum.

The order of bits in a plane's words, the terms and the packing are those that
`apq_tvm.tensorize.x86.bitserial` describes; they hold for every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, prefetch_line
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode

Expr = Any  # tvm is untyped
Buffer = Any


def term(code: Expr, bits: list[Expr], q: int) -> Expr:
    """What one weight and one activation add to the sum, as an int32 expression.

    Parameters
    ----------
    code : PrimExpr
        int32, 0 .. 2^q - 1.
    bits : list of PrimExpr
        int32 0 or 1: the activation's planes, lowest first.
    q : int
        Bits of a code.
    """
    from tvm import tirx

    def i32(value: int) -> Expr:
        return tirx.const(value, "int32")

    if len(bits) <= 2:
        flipped = tirx.bitwise_xor(code, bits[-1] * i32((1 << q) - 1))
        return flipped if len(bits) == 1 else bits[0] * flipped
    value = bits[-1] * i32(-(1 << (len(bits) - 1)))
    for t, bit in enumerate(bits[:-1]):
        value = value + bit * i32(1 << t)
    return code * value


def plane_bit(word: Expr, vector: Expr, four: Expr) -> Expr:
    """Bit of k = 4 * vector + four in the 32-bit word of a plane, int32 0 or 1."""
    from tvm import tirx

    at = four.astype("int32") * tirx.const(8, "int32") + vector.astype("int32")
    return tirx.bitwise_and(tirx.shift_right(word, at), tirx.const(1, "int32"))


def packed_bit(code: Expr, plane: Expr, element: Expr) -> Expr:
    """Bit `plane` of the code of one element at its place in the plane's word, int32."""
    from tvm import tirx

    bit = tirx.bitwise_and(tirx.shift_right(code, plane.astype("int32")), tirx.const(1, "int32"))
    four, index = tirx.const(4, "int32"), element.astype("int32")
    place = index % four * tirx.const(8, "int32") + index // four
    return tirx.shift_left(bit, place)


def plane_axes(planes: int, loops: Any) -> tuple[Expr, Expr]:
    """(plane, element) of a block that packs; a tensorized block has no axis of extent 1."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    if planes > 1:
        plane, element = b.axis.remap("SR", loops)
        return plane, element
    return tirx.const(0, "int32"), b.axis.reduce(UNIT_K, loops)


class BitserialPair:
    """Emits the two members of one intrinsic; what counts bits is a subclass's.

    Parameters
    ----------
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
    """

    codes: Buffer
    x: Buffer
    acc: Buffer

    def __init__(self, unit: Unit, planes: int, units: int, m: int, ahead: int) -> None:
        self.unit, self.p, self.units, self.m = unit, planes, units, m
        self.ahead, self.size = ahead, unit.vector_bytes

    def member(self, instructions: bool) -> Any:
        """PrimFunc (codes uint8 [U, bytes], x int32 [m, p, U], acc int32 [m, R])."""
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as b

        rows, many = ((self.m,) if self.m > 1 else ()), ((self.units,) if self.units > 1 else ())

        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("dot")
            self.codes = operand("codes", (*many, self.unit.nbytes), "uint8", self.size, None)
            strides = [*(["row"] if rows else []), "plane", i64(1)]
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
        with b.grid(*map(i64, extents)) as loops, b.sblock("dot"):
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
            vector, which = (j % i64(8), j // i64(8)) if many else (j, i64(0))
            code = decode(
                self.unit,
                lambda byte: self.codes[which, byte] if many else self.codes[byte],
                vector,
                r * i64(4) + c,
            )
            bits = [plane_bit(self.x[(*lead, i64(t), which)], vector, c) for t in range(self.p)]
            value = self.acc[tuple(at)] + term(code, bits, self.unit.bits)
            b.buffer_store(self.acc, value, at)

    def totals(self) -> list[Expr]:
        """int32 [R] sums for every row of x, in instructions."""
        raise NotImplementedError

    def shift(self, vector: Expr, down: int) -> Expr:
        """Bytes shifted right (left if negative); masks drop what may cross over."""
        raise NotImplementedError

    def _instructions(self) -> None:
        from tvm.tirx.script.builder import ir as b

        self._prefetch()
        for i, total in enumerate(self.totals()):
            at = self._sums_at(i)
            b.buffer_store(self.acc, self.acc[tuple(at)] + total, at)

    def _prefetch(self) -> None:
        """A prefetch never faults, so the address may lie past the end of the weights."""

        for line in range(0, self.units * self.unit.nbytes if self.ahead else 0, 64):
            lead = [i64(0)] if self.units > 1 else []
            prefetch_line(self.codes[(*lead, i64(self.ahead + line))])

    def _sums_at(self, row: int) -> list[Expr]:
        from tvm import tirx

        lead = [i64(row)] if self.m > 1 else []
        return [*lead, tirx.Ramp(i64(0), i64(1), self.unit.rows)]

    def planes_of(self, which: int) -> list[Expr]:
        """uint8 [4R] of every bit of the codes of one unit, lowest first.

        By way of a buffer, which becomes registers: an expression would be emitted at every use.
        """
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        if self.unit.bits == 1:
            return self._bits(which)
        kept = b.alloc_buffer((self.unit.bits, self.size), "uint8", align=64)
        lanes = tirx.Ramp(i64(0), i64(1), self.size)
        for s, plane in enumerate(self._bits(which)):
            b.buffer_store(kept, plane, [i64(s), lanes])
        vector = f"uint8x{self.size}"
        return [kept.vload([i64(s), i64(0)], vector) for s in range(self.unit.bits)]

    def _bits(self, which: int) -> list[Expr]:
        planes = []
        lead = [i64(which)] if self.units > 1 else []
        for width, shift in self.unit.fields:
            loads = [self._load([*lead, i64(self.size * (shift + i))]) for i in range(width)]
            for bit in range(width):
                plane: Expr = None
                for i, load in enumerate(loads):
                    mask = sum(1 << at for at in range(i, 8, width))
                    part = self.masked(self.shift(load, bit - i), mask)
                    plane = part if plane is None else plane | part
                planes.append(plane)
        return planes

    def _load(self, at: list[Expr]) -> Expr:
        from tvm import tirx

        vector = self.codes.vload(at, f"uint8x{self.size}")
        if not self.unit.inverted:
            return vector
        return vector ^ tirx.Broadcast(tirx.const(0x80, "uint8"), self.size)

    def masked(self, vector: Expr, mask: int) -> Expr:
        """Some bits of every byte."""
        from tvm import tirx

        if mask == 255:
            return vector
        return tirx.bitwise_and(vector, tirx.Broadcast(tirx.const(mask, "uint8"), self.size))

    def _activations(self, row: int, plane: int, which: int) -> Expr:
        """uint8 [4R]: one word of a plane, repeated for every row of weights."""
        from tvm import tirx

        lead = [i64(row)] if self.m > 1 else []
        word = self.x[(*lead, i64(plane), i64(which))]
        return tirx.reinterpret(f"uint8x{self.size}", tirx.Broadcast(word, self.unit.rows))

    @property
    def terms(self) -> int:
        """Popcounts for one plane of weights: both planes of p = 2 go into one."""
        return 1 if self.p == 2 else self.p

    def operands(self, row: int, t: int, which: int) -> list[Expr]:
        """Activations of one popcount."""
        planes = (0, 1) if self.p == 2 else (t,)
        return [self._activations(row, plane, which) for plane in planes]

    def match(self, w: Expr, x: list[Expr]) -> Expr:
        """The bits to count."""
        from tvm import tirx

        if self.p > 2:
            return tirx.bitwise_and(w, x[0])
        flipped = tirx.bitwise_xor(w, x[-1])
        return flipped if self.p == 1 else tirx.bitwise_and(flipped, x[0])

    def negative(self, t: int) -> bool:
        """Whether plane t of an activation weighs -2^t."""
        return self.p > 2 and t == self.p - 1


def pack_pair(planes: int, implement: Callable[[int, Buffer, Buffer], None]) -> tuple[Any, Any]:
    """(desc, impl) of the packing of 32 activations: X int32 [32], Y int32 [p, 1].

    Parameters
    ----------
    planes : int
        p.
    implement : callable
        Emits the instructions, given p, X and Y.
    """
    return _pack(planes, None), _pack(planes, implement)


def _pack(planes: int, implement: Callable[[int, Buffer, Buffer], None] | None) -> Any:
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("pack")
        x = b.match_buffer(b.arg("x", b.handle()), (UNIT_K,), "int32", align=64, offset_factor=1)
        strides = [tirx.Var("plane", "int64"), 1] if implement is not None else None
        y = b.match_buffer(
            b.arg("y", b.handle()), (planes, 1), "int32", strides=strides, align=4, offset_factor=1
        )
        with b.sblock("root"):
            b.reads(y[0:planes, 0:1], x[0:UNIT_K])
            b.writes(y[0:planes, 0:1])
            if implement is not None:
                implement(planes, x, y)
            else:
                with b.grid(*([planes] if planes > 1 else []), UNIT_K) as loops, b.sblock("pack"):
                    t, e = plane_axes(planes, loops)
                    b.reads(y[t, 0], x[e])
                    b.writes(y[t, 0])
                    value = y[t, 0] + packed_bit(x[e], t, e)
                    b.buffer_store(y, value, [t, 0])
    return builder.get()

"""What an instruction set adds to bit-serial products: how bits are shifted, counted and packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, i64, prefetch
from apq_tvm.tensorize.meaning.bitserial import bitserial_dot, pack_planes
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.registry import register


@dataclass(frozen=True)
class Popcount:
    """How set bits are counted.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    rows : int
        R of the layout: int32 lanes of its vectors.
    features : tuple of str
        LLVM features it needs, all of them.
    count : callable
        int32 [R] sums for every row of x, in instructions.
    shift : callable
        ``(vector, down)`` → bytes shifted right, left if negative; masks drop what may cross over.
    packer : tuple of str and callable
        A name, and what emits the packing of 32 codes, given p, X and Y of `pack_planes`.
    units : int
        Most units that one intrinsic call should sum.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    count: Callable[[Planes], list[Expr]]
    shift: Callable[[Expr, int], Expr]
    packer: tuple[str, Callable[[int, Buffer, Buffer], None]]
    units: int = 4

    def dot(self, unit: Unit, planes: int, units: int = 1, m: int = 1, ahead: int = 0) -> str:
        """Register (once) and name `bitserial_dot`, whose parameters these are.

        `unit` has as many rows as vectors have lanes; `ahead` is how many bytes ahead of it to
        prefetch, 0 for none.
        """
        name = f"apq_{self.name}_{m}x{unit.rows}x{UNIT_K * units}_b{planes}b{unit.bits}s32"
        name += ("_inv" if unit.inverted else "") + (f"_pf{ahead}" if ahead else "")

        def implement(codes: Buffer, x: Buffer, acc: Buffer) -> None:
            prefetch(codes, units * unit.nbytes, ahead, [i64(0)] if units > 1 else [])
            totals = self.count(Planes(self, unit, planes, units, m, codes, x))
            for i, total in enumerate(totals):
                row = [i64(i)] if m > 1 else []
                at = [*row, tirx.Ramp(i64(0), i64(1), unit.rows)]
                b.buffer_store(acc, acc[tuple(at)] + total, at)

        return register(name, lambda: pair(bitserial_dot(unit, planes, units, m), implement))

    def pack(self, planes: int) -> str:
        """Register (once) and name `pack_planes`."""
        name, emit = self.packer

        def implement(x: Buffer, y: Buffer) -> None:
            emit(planes, x, y)

        full = f"apq_{name}_{planes}x{UNIT_K}_s32b32"
        return register(full, lambda: pair(pack_planes(planes), implement))


@dataclass(frozen=True)
class Planes:
    """Planes of some units' codes and of activations, as vectors.

    Parameters
    ----------
    isa : Popcount
    unit : Unit
    p : int
        Bits of an activation.
    units, m : int
        Units and rows of x.
    codes, x : Buffer
    """

    isa: Popcount
    unit: Unit
    p: int
    units: int
    m: int
    codes: Buffer
    x: Buffer

    @property
    def size(self) -> int:
        """Bytes of a vector."""
        return self.unit.vector_bytes

    def planes_of(self, which: int) -> list[Expr]:
        """uint8 [4R] of every bit of the codes of one unit, lowest first.

        By way of a buffer, which becomes registers: an expression would be emitted at every use.
        """
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
                    part = self.masked(self.isa.shift(load, bit - i), mask)
                    plane = part if plane is None else plane | part
                planes.append(plane)
        return planes

    def _load(self, at: list[Expr]) -> Expr:
        vector = self.codes.vload(at, f"uint8x{self.size}")
        if not self.unit.inverted:
            return vector
        return vector ^ tirx.Broadcast(tirx.const(0x80, "uint8"), self.size)

    def masked(self, vector: Expr, mask: int) -> Expr:
        """Some bits of every byte."""
        if mask == 255:
            return vector
        return tirx.bitwise_and(vector, tirx.Broadcast(tirx.const(mask, "uint8"), self.size))

    def _activations(self, row: int, plane: int, which: int) -> Expr:
        """uint8 [4R]: one word of a plane, repeated for every row of weights."""
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
        if self.p > 2:
            return tirx.bitwise_and(w, x[0])
        flipped = tirx.bitwise_xor(w, x[-1])
        return flipped if self.p == 1 else tirx.bitwise_and(flipped, x[0])

    def negative(self, t: int) -> bool:
        """Whether plane t of an activation weighs -2^t."""
        return self.p > 2 and t == self.p - 1

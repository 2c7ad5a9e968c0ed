"""Lookups and dot products on bitplanes, on x86: pairs of meaning and instructions.

``apq_{instr}_planes_...``: eight rows of one unit (`apq_tvm.tensorize.meaning.planes`) are looked
up and multiplied with one row of activations; ``apq_{instr}_lookup_...``: they are looked up and
stored; ``apq_{instr}_rows_...``: rows of bytes times rows of activations. Sums stay spread over the
lanes of a register: one horizontal sum at the end of a row is enough. Where activations have scales
along K (``g``), the integers of one register, or of as many as share a scale, start from 0, and a
conversion and an FMA bring them to the sums, whatever the group: each lane has its own scale. (By
vpdpbusd that is 41 cycles for 64 columns of 4 bits where one scale per token takes 31, llvm-mca 22
for Zen 4. Activations of two int8 digits, which need no scales, take 46: sums fill the registers.)

- *vpermb* (AVX-512 VBMI and VNNI): one instruction looks up 64 entries, vpermi2b 128. It ignores
  the index bits above. Centroids are offset by 128, because vpdpbusd multiplies unsigned by signed.
- *pshufb* (AVX2): looks up 16 entries by the low nibble; wider tables are blended by the upper
  planes, whose bits are moved to bit 7. vpmaddubsw multiplies |x| by the centroid with the sign of
  x: 2 * 127 * 127 = 32258 fits int16, but not twice.

Intel 64 and IA-32 Software Developer's Manual, volume 2, VPERMB, VPERMI2B, PSHUFB, VPBLENDVB,
PSIGNB, PMADDUBSW, VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import prefetch_line, x86
from apq_tvm.tensorize.meaning.planes import QUAD, ROWS, PlanesUnit
from apq_tvm.tensorize.pairs.planes import dot_pair, lookup_pair, rows_pair
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.planes_apart import codes_intrinsic, table_dot_intrinsic
from apq_tvm.tensorize.x86.planes_index import Index, nibble_indices, shifted, wide_indices
from apq_tvm.tensorize.x86.planes_sums import add_scaled, multiply

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class PlanesInstruction:
    """How codes are looked up and multiplied.

    Parameters
    ----------
    name : str
    vector : int
        Bytes of a register.
    offset : int
        What centroids are increased by.
    features : tuple of str
        LLVM features it needs, all of them.
    """

    name: str
    vector: int
    offset: int
    features: tuple[str, ...]

    def unit(self, bits: int, tables: int, k: int, group: int = 0) -> PlanesUnit:
        """A unit for this instruction."""
        return PlanesUnit(bits, tables, k, self.vector, self.offset, group)

    def dot(self, bits: int, tables: int, k: int, ahead: int = 0, group: int = 0) -> str:
        """`planes_dot_intrinsic`."""
        return planes_dot_intrinsic(self, bits, tables, k, ahead, group)

    def lookup(self, bits: int, tables: int, k: int, ahead: int = 0) -> str:
        """`planes_lookup_intrinsic`."""
        return planes_lookup_intrinsic(self, bits, tables, k, ahead)

    def codes(self, bits: int, k: int) -> str:
        """`apq_tvm.tensorize.x86.planes_apart.codes_intrinsic`."""
        return codes_intrinsic(self, bits, k)

    def table_dot(self, bits: int, rows: int, k: int, group: int = 0) -> str:
        """`apq_tvm.tensorize.x86.planes_apart.table_dot_intrinsic`."""
        return table_dot_intrinsic(self, bits, rows, k, group)

    def rows(self, m: int, rows: int, k: int, group: int = 0) -> str:
        """`rows_dot_intrinsic`."""
        return rows_dot_intrinsic(self, m, rows, k, group)


VPERMB = PlanesInstruction("vpermb", 64, 128, ("avx512vbmi", "avx512vnni"))
PSHUFB = PlanesInstruction("pshufb", 32, 0, ("avx2",))

INSTRUCTIONS = (VPERMB, PSHUFB)
"""In order of preference."""


def planes_dot_intrinsic(
    instruction: PlanesInstruction,
    bits: int,
    tables: int,
    k: int,
    ahead: int = 0,
    group: int = 0,
) -> str:
    """Register (once) and name the product of one unit with one row of activations.

    Operands: planes uint8 [bits, 1, k], tables int8 [tables, 2^bits], x int8 [k], [scales float32
    [k / 4],] sums int32 (with groups float32) [8, vector / 4].

    Parameters
    ----------
    instruction : PlanesInstruction
    bits, tables, k, group : int
        See `PlanesUnit`.
    ahead : int
        Bytes ahead in every plane to prefetch, 0 for none.
    """
    unit = instruction.unit(bits, tables, k, group)
    name = f"apq_{instruction.name}_planes_{unit}" + (f"_pf{ahead}" if ahead else "")

    def implement(planes: Buffer, table: Buffer, x: Buffer, *more: Buffer) -> None:
        *scales, acc = more
        _prefetch(unit, planes, ahead)
        sums = [acc.vload([r, 0], f"{unit.sums}x{unit.lanes}") for r in range(ROWS)]
        for first in range(0, unit.registers, unit.together):
            parts: list[Expr] = [None] * ROWS if scales else sums
            for register_ in range(first, first + unit.together):
                xs = _load(unit, x, (), register_)
                for r, w in enumerate(_lookups(instruction, unit, planes, table, register_)):
                    parts[r] = multiply(unit, parts[r], w, xs)
            if scales:
                scale = load_scales(unit, scales[0], (), first)
                sums = [add_scaled(unit, *pair, scale) for pair in zip(sums, parts, strict=True)]
        for r in range(ROWS):
            b.buffer_store(acc, sums[r], [r, tirx.Ramp(0, 1, unit.lanes)])

    return register(name, lambda: dot_pair(unit, implement))


def planes_lookup_intrinsic(
    instruction: PlanesInstruction, bits: int, tables: int, k: int, ahead: int = 0
) -> str:
    """Register (once) and name the lookup of one unit.

    Operands: planes uint8 [bits, 1, k], tables int8 [tables, 2^bits], out uint8 [8, k], to whose
    bytes the centroids plus the instruction's offset are added. (A sum, because its meaning is one;
    LLVM sees the zeros that it starts from, and stores.)
    """
    unit = instruction.unit(bits, tables, k)
    name = f"apq_{instruction.name}_lookup_{unit}" + (f"_pf{ahead}" if ahead else "")

    def implement(planes: Buffer, table: Buffer, out: Buffer) -> None:
        _prefetch(unit, planes, ahead)
        for register_ in range(unit.registers):
            for r, w in enumerate(_lookups(instruction, unit, planes, table, register_)):
                width = min(unit.k, unit.vector)
                value = tirx.reinterpret(f"uint8x{unit.vector}", w)
                if width < unit.vector:
                    value = tirx.Shuffle([value], [tirx.const(i, "int32") for i in range(width)])
                at = register_ * unit.vector
                value = out.vload([r, at], f"uint8x{width}") + value
                b.buffer_store(out, value, [r, tirx.Ramp(at, 1, width)])

    return register(name, lambda: lookup_pair(unit, implement))


def rows_dot_intrinsic(
    instruction: PlanesInstruction, m: int, rows: int, k: int, group: int = 0
) -> str:
    """Register (once) and name the product of rows of looked up bytes with rows of activations.

    ``acc[m, r, l] += sum over the columns of lane l of w[r, k] * x[m, k]``. Operands: w uint8
    [rows, k] (signed bytes where the instruction has no offset), x int8 [m, k], [scales float32
    [m, k / 4],] sums int32 (with groups float32) [m, rows, vector / 4].
    """
    unit = instruction.unit(1, 1, k, group)
    name = f"apq_{instruction.name}_rows_{m}x{rows}x{k}{unit.suffix}"

    def implement(w: Buffer, x: Buffer, *more: Buffer) -> None:
        *scales, acc = more
        for first in range(0, unit.registers, unit.together):
            registers = range(first, first + unit.together)
            ws = [[_load(unit, w, (r,), at) for at in registers] for r in range(rows)]
            for i in range(m):
                xs = [_load(unit, x, (i,), at) for at in registers]
                scale = load_scales(unit, scales[0], (i,), first) if scales else None
                for r in range(rows):
                    total = acc.vload([i, r, 0], f"{unit.sums}x{unit.lanes}")
                    part = None if scales else total
                    for value, byte in zip(xs, ws[r], strict=True):
                        signed = tirx.reinterpret(f"int8x{unit.vector}", byte)
                        part = multiply(unit, part, signed, value)
                    total = add_scaled(unit, total, part, scale) if scales else part
                    b.buffer_store(acc, total, [i, r, tirx.Ramp(0, 1, unit.lanes)])

    return register(name, lambda: rows_pair(unit, m, rows, implement))


def load_scales(unit: PlanesUnit, scales: Buffer, lead: tuple[int, ...], register_: int) -> Expr:
    """float32 [lanes]: the scale of the activations that each lane of a register multiplies."""
    return _load_part(scales, lead, register_, unit.lanes, unit.k // QUAD)


def _load(unit: PlanesUnit, buffer: Buffer, lead: tuple[int, ...], register_: int) -> Expr:
    """One register of bytes of the row `lead` of a buffer; columns past the unit's are 0."""
    return _load_part(buffer, lead, register_, unit.vector, unit.k)


def _load_part(
    buffer: Buffer, lead: tuple[int, ...], register_: int, size: int, count: int
) -> Expr:
    """`size` elements of the row `lead`, of which `count` there are at most; then 0."""
    width, dtype = min(count, size), str(buffer.dtype)
    value = buffer.vload([*lead, register_ * size], f"{dtype}x{width}")
    if width == size:
        return value
    zeros = tirx.Broadcast(tirx.const(0, dtype), width)
    return tirx.Shuffle([value, zeros], [tirx.const(i, "int32") for i in range(2 * width)])


def _prefetch(unit: PlanesUnit, planes: Buffer, ahead: int) -> None:
    """Prefetch every plane's cache line `ahead` bytes on; a prefetch never faults."""
    for p in range(unit.bits if ahead else 0):
        prefetch_line(planes[p, 0, ahead])


def _lookups(
    instruction: PlanesInstruction, unit: PlanesUnit, planes: Buffer, table: Buffer, register_: int
) -> list[Expr]:
    """int8 [V] centroids of the eight rows."""
    registers = [_load(unit, planes, (p, 0), register_) for p in reversed(range(unit.bits))]
    if instruction is VPERMB:
        indices = _named(unit, wide_indices(registers))
        return [_vpermb(unit, table, r, index) for r, index in enumerate(indices)]
    indices = _named(unit, nibble_indices(registers[:4]))
    return [_pshufb(unit, table, r, index, registers[4:]) for r, index in enumerate(indices)]


def _named(unit: PlanesUnit, indices: list[Index]) -> list[Index]:
    """The same, kept in a buffer: an expression used in many lookups would be compiled for each."""
    kept = b.alloc_buffer((ROWS, unit.vector), "uint8", align=64)
    for r, index in enumerate(indices):
        b.buffer_store(kept, index.vector, [r, tirx.Ramp(0, 1, unit.vector)])
    dtype = f"uint8x{unit.vector}"
    return [Index(kept.vload([r, 0], dtype), index.places) for r, index in enumerate(indices)]


def _table(unit: PlanesUnit, table: Buffer, row: int, first: int, codes: list[int]) -> Expr:
    """int8 [len(codes)]: entries ``first + code`` of the row's table."""
    width = min(unit.entries, 64 if len(codes) == 64 else 16)
    value = table.vload([row * unit.tables // ROWS, first], f"int8x{width}")
    if codes != list(range(width)):
        copies = -(-len(codes) // width)  # a Shuffle gives no more lanes than it is given
        value = tirx.Shuffle([value] * copies, [tirx.const(code, "int32") for code in codes])
    if unit.offset:
        value = tirx.bitwise_xor(value, tirx.Broadcast(tirx.const(-128, "int8"), len(codes)))
    return value


def _vpermb(unit: PlanesUnit, table: Buffer, row: int, index: Index) -> Expr:
    if unit.bits <= 6:
        entries = _table(unit, table, row, 0, index.table(64))
        return x86("int8x64", "avx512.permvar.qi.512", entries, index.vector)
    plain = list(range(64))
    quarters = [_table(unit, table, row, at, plain) for at in range(0, unit.entries, 64)]
    halves = [
        x86("int8x64", "avx512.vpermi2var.qi.512", low, index.vector, high)
        for low, high in zip(quarters[::2], quarters[1::2], strict=True)
    ]
    if len(halves) == 1:
        return halves[0]
    upper = tirx.LT(
        tirx.reinterpret("int8x64", index.vector), tirx.Broadcast(tirx.const(0, "int8"), 64)
    )
    return tirx.Select(upper, halves[1], halves[0])


def _pshufb(unit: PlanesUnit, table: Buffer, row: int, index: Index, upper: list[Expr]) -> Expr:
    codes = index.table(16) * 2
    found = [
        x86("int8x32", "avx2.pshuf.b", _table(unit, table, row, at, codes), index.vector)
        for at in range(0, max(unit.entries, 16), 16)
    ]
    for plane in upper:
        mask = tirx.reinterpret("int8x32", shifted(plane, 7 - row))
        found = [
            x86("int8x32", "avx2.pblendvb", low, high, mask)
            for low, high in zip(found[::2], found[1::2], strict=True)
        ]
    return found[0]

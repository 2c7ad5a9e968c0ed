"""Lookups and dot products on bitplanes, on x86.

``apq_{instr}_planes_...``: eight rows of one step (`apq_tvm.tensorize.meaning.planes`) are looked
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

Where cells are divided (`apq_tvm.tensorize.x86.planes_cells`) weights of 7 and 8 bits are two
bytes, each multiplied by itself.

Intel 64 and IA-32 Software Developer's Manual, volume 2, VPERMB, VPERMI2B, PSHUFB, VPBLENDVB,
PSIGNB, PMADDUBSW, VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, Expr, prefetch_line, splat, x86
from apq_tvm.tensorize.meaning.planes import FINE_BITS, ROWS, PlanesStep
from apq_tvm.tensorize.pairs.planes import PlanesInstruction
from apq_tvm.tensorize.x86.planes_apart import emit_codes, emit_table_dot
from apq_tvm.tensorize.x86.planes_cells import narrow_digits, wide_digits
from apq_tvm.tensorize.x86.planes_index import Index, long_lookup, nibble_indices, wide_indices
from apq_tvm.tensorize.x86.planes_sums import add_scaled, load, load_scales, multiply
from apq_tvm.tensorize.x86.vectors import shifted


class X86Planes(PlanesInstruction):
    """Lookups in registers of 512 or of 256 bits."""

    def emit_dot(self, step: PlanesStep, ahead: int, *buffers: Buffer) -> None:
        if step.divided:
            self._emit_divided(step, ahead, *buffers)
            return
        planes, table, x, *scales, acc = buffers
        _prefetch(step, planes, ahead)
        sums = [acc.vload([r, 0], f"{step.sums}x{step.lanes}") for r in range(ROWS)]
        for first in range(0, step.registers, step.together):
            parts: list[Expr] = [None] * ROWS if scales else sums
            for register in range(first, first + step.together):
                xs = load(step, x, (), register)
                for r, w in enumerate(_lookups(step, planes, table, register)):
                    parts[r] = multiply(step, parts[r], w, xs)
            if scales:
                scale = load_scales(step, scales[0], (), first)
                sums = [add_scaled(step, *pair, scale) for pair in zip(sums, parts, strict=True)]
        for r in range(ROWS):
            b.buffer_store(acc, sums[r], [r, tirx.Ramp(0, 1, step.lanes)])

    def _emit_divided(self, step: PlanesStep, ahead: int, *buffers: Buffer) -> None:
        """`emit_dot` of one or two digits, of which the first counts 16 times the second."""
        planes, table, halves, x, *scales, acc = buffers
        _prefetch(step, planes, ahead)
        sums = [acc.vload([r, 0], f"{step.sums}x{step.lanes}") for r in range(ROWS)]
        for first in range(0, step.registers, step.together):
            registers = range(first, first + step.together)
            found = [_digits(step, planes, table, halves, at) for at in registers]
            xs = [load(step, x, (), at) for at in registers]
            for r in range(ROWS):
                part: Expr = None
                for i in range(step.digits):
                    if i:
                        part = part * splat(1 << FINE_BITS, "int32", step.lanes)
                    for digits, value in zip(found, xs, strict=True):
                        part = multiply(step, part, digits[r][i], value)
                if scales:
                    scale = load_scales(step, scales[0], (), first)
                    sums[r] = add_scaled(step, sums[r], part, scale)
                else:
                    sums[r] = sums[r] + part
        for r in range(ROWS):
            b.buffer_store(acc, sums[r], [r, tirx.Ramp(0, 1, step.lanes)])

    def emit_lookup(self, step: PlanesStep, ahead: int, digit: int, *buffers: Buffer) -> None:
        planes, table, *halves, out = buffers
        _prefetch(step, planes, ahead)
        width = min(step.k, step.vector)
        for register in range(step.registers):
            if step.divided:
                digits = _digits(step, planes, table, halves[0], register)
                found = [each[digit] for each in digits]
            else:
                found = _lookups(step, planes, table, register)
            for r, w in enumerate(found):
                value = tirx.reinterpret(f"uint8x{step.vector}", w)
                if width < step.vector:
                    value = tirx.Shuffle([value], [tirx.const(i, "int32") for i in range(width)])
                at = register * step.vector
                value = out.vload([r, at], f"uint8x{width}") + value
                b.buffer_store(out, value, [r, tirx.Ramp(at, 1, width)])

    def emit_codes(self, step: PlanesStep, *buffers: Buffer) -> None:
        emit_codes(step, *buffers)

    def emit_table_dot(self, step: PlanesStep, rows: int, *buffers: Buffer) -> None:
        emit_table_dot(step, rows, *buffers)

    def emit_rows(self, step: PlanesStep, m: int, rows: int, *buffers: Buffer) -> None:
        if step.strided:
            _emit_span(step, m, rows, *buffers)
            return
        w, x, *scales, acc = buffers
        for first in range(0, step.registers, step.together):
            registers = range(first, first + step.together)
            ws = [[load(step, w, (r,), at) for at in registers] for r in range(rows)]
            for i in range(m):
                xs = [load(step, x, (i,), at) for at in registers]
                scale = load_scales(step, scales[0], (i,), first) if scales else None
                for r in range(rows):
                    total = acc.vload([i, r, 0], f"{step.sums}x{step.lanes}")
                    part = None if scales else total
                    for value, byte in zip(xs, ws[r], strict=True):
                        signed = tirx.reinterpret(f"int8x{step.vector}", byte)
                        part = multiply(step, part, signed, value)
                    total = add_scaled(step, total, part, scale) if scales else part
                    b.buffer_store(acc, total, [i, r, tirx.Ramp(0, 1, step.lanes)])


VPERMB = X86Planes("vpermb", 64, 128, ("avx512vbmi", "avx512vnni"))
PSHUFB = X86Planes("pshufb", 32, 0, ("avx2",))

INSTRUCTIONS = (VPERMB, PSHUFB)
"""In order of preference."""


def _emit_span(
    step: PlanesStep, m: int, rows: int, w: Buffer, x: Buffer, scales: Buffer, acc: Buffer
) -> None:
    """`rows_dot` of a strided step, register by register: sums of all rows are integers at once."""
    lanes = step.lanes
    kept = b.alloc_buffer((m * rows, lanes), "int32", align=64)
    places = [(i, r) for i in range(m) for r in range(rows)]
    for register in range(step.registers):
        for i, r in places:
            at = i * rows + r
            before = kept.vload([at, 0], f"int32x{lanes}") if register else None
            weights = tirx.reinterpret(f"int8x{step.vector}", load(step, w, (r,), register))
            value = multiply(step, before, weights, load(step, x, (i,), register))
            b.buffer_store(kept, value, [at, tirx.Ramp(0, 1, lanes)])
    for i, r in places:
        total = acc.vload([i, r, 0], f"{step.sums}x{lanes}")
        part = kept.vload([i * rows + r, 0], f"int32x{lanes}")
        total = add_scaled(step, total, part, load_scales(step, scales, (i,), 0))
        b.buffer_store(acc, total, [i, r, tirx.Ramp(0, 1, lanes)])


def _prefetch(step: PlanesStep, planes: Buffer, ahead: int) -> None:
    """Prefetch every plane's cache line `ahead` bytes on; a prefetch never faults."""
    for p in range(step.bits if ahead else 0):
        prefetch_line(planes[p, 0, ahead])


def _digits(
    step: PlanesStep, planes: Buffer, table: Buffer, halves: Buffer, register: int
) -> list[list[Expr]]:
    """The digits of the eight rows, int8 [V]."""
    registers = [load(step, planes, (p, 0), register) for p in range(step.bits)]
    make = wide_digits if step.vector == VPERMB.vector else narrow_digits
    return make(step, registers, table, halves)


def _lookups(step: PlanesStep, planes: Buffer, table: Buffer, register: int) -> list[Expr]:
    """int8 [V] centroids of the eight rows."""
    registers = [load(step, planes, (p, 0), register) for p in reversed(range(step.bits))]
    if step.vector == VPERMB.vector:
        indices = _named(step, wide_indices(registers))
        return [_vpermb(step, table, r, index) for r, index in enumerate(indices)]
    indices = _named(step, nibble_indices(registers[:4]))
    return [_pshufb(step, table, r, index, registers[4:]) for r, index in enumerate(indices)]


def _named(step: PlanesStep, indices: list[Index]) -> list[Index]:
    """The same, kept in a buffer: an expression used in many lookups would be compiled for each."""
    kept = b.alloc_buffer((ROWS, step.vector), "uint8", align=64)
    for r, index in enumerate(indices):
        b.buffer_store(kept, index.vector, [r, tirx.Ramp(0, 1, step.vector)])
    dtype = f"uint8x{step.vector}"
    return [Index(kept.vload([r, 0], dtype), index.places) for r, index in enumerate(indices)]


def _table(step: PlanesStep, table: Buffer, row: int, first: int, codes: list[int]) -> Expr:
    """int8 [len(codes)]: entries ``first + code`` of the row's table."""
    width = min(step.entries, 64 if len(codes) == 64 else 16)
    value = table.vload([row * step.tables // ROWS, first], f"int8x{width}")
    if codes != list(range(width)):
        copies = -(-len(codes) // width)  # a Shuffle gives no more lanes than it is given
        value = tirx.Shuffle([value] * copies, [tirx.const(code, "int32") for code in codes])
    if step.offset:
        value = tirx.bitwise_xor(value, tirx.Broadcast(tirx.const(-128, "int8"), len(codes)))
    return value


def _vpermb(step: PlanesStep, table: Buffer, row: int, index: Index) -> Expr:
    if step.bits <= 6:
        entries = _table(step, table, row, 0, index.table(64))
        return x86("int8x64", "avx512.permvar.qi.512", entries, index.vector)
    plain = list(range(64))
    quarters = [_table(step, table, row, at, plain) for at in range(0, step.entries, 64)]
    return long_lookup(quarters, index.vector)


def _pshufb(step: PlanesStep, table: Buffer, row: int, index: Index, upper: list[Expr]) -> Expr:
    codes = index.table(16) * 2
    found = [
        x86("int8x32", "avx2.pshuf.b", _table(step, table, row, at, codes), index.vector)
        for at in range(0, max(step.entries, 16), 16)
    ]
    for plane in upper:
        mask = tirx.reinterpret("int8x32", shifted(plane, 7 - row))
        found = [
            x86("int8x32", "avx2.pblendvb", low, high, mask)
            for low, high in zip(found[::2], found[1::2], strict=True)
        ]
    return found[0]

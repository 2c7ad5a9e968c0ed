"""Table lookups of one unit of binary codes (R rows x 32 k x q planes) on x86.

Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PSHUFB, VPERMB, VPERMPS,
VPDPBUSD; LLVM's IntrinsicsX86.td. That bits as keys into in-register tables of activation sums pay
on CPUs is T-MAC's finding (Wei et al., arXiv 2407.00088); their int8 tables are looked up by
pshufb and widened to 16 bits.

=========  =======  ==========  =================================================================
name       tables   lanes       operations per vector of keys (two nibbles a byte), plane and row
=========  =======  ==========  =================================================================
pshufb     uint8    32 bytes    2 ands, 1 shift; per nibble 1 lookup and 3 to add: the bytes as
                                16-bit lanes, then their high bytes (shift, add) once more
vpermb     uint8    64 bytes    1 shift, 2 ternary logics (mask, and which of four tables in the
                                register); per nibble 1 lookup and 1 vpdpbusd with ones, as four
                                quads of a row are neighbours: 64 keys take 3.5, AVX2's 11
permps512  float32  16 floats   per nibble 1 shift, 1 lookup (of all 16 entries) and 1 add
permps256  float32  8 floats    per nibble 2 shifts, 2 lookups (of 8 entries), blend and add
=========  =======  ==========  =================================================================
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, i64, x86
from apq_tvm.tensorize.meaning.binary_codes import ENTRIES, QUADS
from apq_tvm.tensorize.pairs.lut_dot import LutBuffers, LutInstruction

PLANES_AT_ONCE = 3
"""Planes whose sums stay in the 16 registers of AVX2 while a unit passes."""


def _all(value: int, dtype: str, lanes: int) -> Expr:
    return tirx.Broadcast(tirx.const(value, dtype), lanes)


def _pshufb(o: LutBuffers) -> None:
    bits, low = o.dot.unit.bits, _all(15, "uint8", 32)
    for first in range(0, bits, PLANES_AT_ONCE):
        planes = range(first, min(bits, first + PLANES_AT_ONCE))
        at = {(i, p, h): o.acc_at(i, p, h) for i in range(o.dot.m) for p in planes for h in (0, 1)}
        sums = {key: o.acc[tuple(index)] for key, index in at.items()}
        for chunk in range(QUADS // 2):
            for p in planes:
                bytes_ = o.codes.vload([i64((chunk * bits + p) * 32)], "uint8x32")
                words = tirx.reinterpret("uint16x16", bytes_)
                shifted = tirx.shift_right(words, _all(4, "uint16", 16))
                halves = (bytes_, tirx.reinterpret("uint8x32", shifted))
                for side, half in enumerate(halves):
                    keys = tirx.reinterpret("int8x32", tirx.bitwise_and(half, low))
                    for i in range(o.dot.m):
                        table = _twice(o.entries(i, (2 * chunk + side) * ENTRIES, ENTRIES))
                        found = x86("int8x32", "avx2.pshuf.b", table, keys)
                        value = tirx.reinterpret("uint16x16", found)
                        odd = tirx.shift_right(value, _all(8, "uint16", 16))
                        sums[i, p, 0] = sums[i, p, 0] + value
                        sums[i, p, 1] = sums[i, p, 1] + odd
        for key, index in at.items():
            b.buffer_store(o.acc, sums[key], index)


def _twice(table: Expr) -> Expr:
    """int8 [32]: one 128-bit table in both lanes."""
    lane = tirx.reinterpret("int8x16", table)
    return tirx.Shuffle([lane, lane], [tirx.const(i, "int32") for i in range(32)])


def _vpermb(o: LutBuffers) -> None:
    bits = o.dot.unit.bits
    low, ones = _all(0x0F0F0F0F, "int32", 16), _all(0x01010101, "int32", 16)
    which = _all(0x30201000, "int32", 16)  # byte j of a lane looks into table j of the register
    at = {(i, p): o.acc_at(i, p) for i in range(o.dot.m) for p in range(bits)}
    sums = {key: o.acc[tuple(index)] for key, index in at.items()}
    tables = {
        (i, h): tirx.reinterpret("int8x64", o.entries(i, 4 * h * ENTRIES, 4 * ENTRIES))
        for i in range(o.dot.m)
        for h in (0, 1)
    }
    for p in range(bits):
        words = tirx.reinterpret("int32x16", o.codes.vload([i64(64 * p)], "uint8x64"))
        for half in (0, 1):
            if half:
                words = tirx.shift_right(
                    tirx.reinterpret("uint32x16", words), _all(4, "uint32", 16)
                )
                words = tirx.reinterpret("int32x16", words)
            keys = tirx.bitwise_or(tirx.bitwise_and(words, low), which)
            keys = tirx.reinterpret("int8x64", keys)
            for i in range(o.dot.m):
                name = "avx512.permvar.qi.512"
                found = x86("int8x64", name, tables[i, half], keys)
                name = "avx512.vpdpbusd.512"
                one = tirx.reinterpret("int8x64", ones)
                sums[i, p] = x86("int32x16", name, sums[i, p], found, one)
    for key, index in at.items():
        b.buffer_store(o.acc, sums[key], index)


def _permps(o: LutBuffers) -> None:
    bits, rows = o.dot.unit.bits, o.dot.unit.rows
    at = {(i, p): o.acc_at(i, p) for i in range(o.dot.m) for p in range(bits)}
    sums = {key: o.acc[tuple(index)] for key, index in at.items()}
    words = {
        p: tirx.reinterpret(
            f"uint32x{rows}", o.codes.vload([i64(4 * rows * p)], f"uint8x{4 * rows}")
        )
        for p in range(bits)
    }
    find = _find16 if rows == 16 else _find8
    for p in range(bits):
        found: dict[int, list[Expr]] = {i: [] for i in range(o.dot.m)}
        for quad in range(QUADS):
            down = quad % 4 * 8 + quad // 4 * 4
            keys = tirx.shift_right(words[p], _all(down, "uint32", rows)) if down else words[p]
            for i in range(o.dot.m):
                found[i].append(find(o, i, quad, keys))
        for i in range(o.dot.m):
            b.buffer_store(o.acc, sums[i, p] + _tree(found[i]), at[i, p])


def _tree(terms: list[Expr]) -> Expr:
    """Sum in pairs: additions that do not wait for each other."""
    while len(terms) > 1:
        terms = [one + other for one, other in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _find16(o: LutBuffers, row: int, quad: int, keys: Expr) -> Expr:
    """float32 [16]: the instruction looks at the lowest four bits of a key."""
    table = o.entries(row, quad * ENTRIES, 16)
    index = tirx.reinterpret("int32x16", keys)
    return x86("float32x16", "avx512.permvar.sf.512", table, index)


def _find8(o: LutBuffers, row: int, quad: int, keys: Expr) -> Expr:
    """float32 [8]: of two lookups by three bits the one that the fourth bit chooses."""
    index = tirx.reinterpret("int32x8", keys)
    low, high = (
        x86("float32x8", "avx2.permps", o.entries(row, quad * ENTRIES + at, 8), index)
        for at in (0, 8)
    )
    sign = tirx.shift_left(keys, _all(28, "uint32", 8))
    mask = tirx.reinterpret("float32x8", sign)
    return x86("float32x8", "avx.blendv.ps.256", low, high, mask)


PSHUFB = LutInstruction("pshufb", 32, ("avx2",), "uint8", _pshufb)
VPERMB = LutInstruction("vpermb", 16, ("avx512vbmi", "avx512vnni"), "uint8", _vpermb, tile_sums=12)
PERMPS512 = LutInstruction("permps512", 16, ("avx512f",), "float32", _permps)
PERMPS256 = LutInstruction("permps256", 8, ("avx2",), "float32", _permps)

INSTRUCTIONS = (VPERMB, PSHUFB, PERMPS512, PERMPS256)
"""In order of preference."""

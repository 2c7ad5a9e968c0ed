"""Dot products of one unit (4 rows x 32 k of packed codes) with int8 activations without sdot.

Sources: Arm Architecture Reference Manual, DDI 0487: SMULL, SMLAL, SADALP, ADDP; LLVM's
IntrinsicsAArch64.td.

smull multiplies 8 bytes into int16, smlal adds to it. Codes of q bits (8 bits: code - 128, as
`InterleavedLayout` stores them where top bits are inverted) and activations in [-127, 127] give at
most (2^q - 1) * 127 a product, so int16 holds

    ====  ==============  ================================
    bits  one product     products that int16 can sum
    ====  ==============  ================================
    1-4   15 * 127        17, and a unit has 8 for a lane
    5     31 * 127        8   (31496)
    6     63 * 127        4   (32004)
    7     127 * 127       2   (32258)
    8     128 * 127       2   (32512)
    ====  ==============  ================================

before sadalp adds neighbours into int32, and addp brings two rows of four to four rows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.codes import unpacked
from apq_tvm.tensorize.exprs import Expr, neon
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.meaning.scaffold import Bound
from apq_tvm.tensorize.pairs.packed_dot import unit_dot_intrinsic

SMULL_SUMS = {1: 8, 2: 8, 3: 8, 4: 8, 5: 8, 6: 4, 7: 2, 8: 2}
"""bits -> products that are summed in int16 (table above, at most the 8 of a unit)."""


def smull_meaning(unit: Unit, m: int = 1) -> UnitDot:
    """The dot product of a unit of 4 rows, with inverted top bits, with `m` rows of x."""
    return UnitDot(unit, m, "int8", 128 if unit.bits == 8 else 0)


def smull_intrinsic(dot: UnitDot, ahead: int = 0) -> str:
    """Register (once) and name a dot product of `smull_meaning`."""
    return unit_dot_intrinsic("smull", dot, _smull, ahead)


def _smull(o: Bound, group: int) -> None:
    unit = o.dot.unit
    vectors = range(group * unit.vectors, (group + 1) * unit.vectors)
    step = SMULL_SUMS[unit.bits]
    for i in range(o.dot.m):
        halves: list[Expr] = [None, None]
        for start in range(0, len(vectors), step):
            for h in range(2):
                words = _words(o, i, vectors[start : start + step], h)
                pairs = neon("int32x4", "saddlp.v4i32.v8i16", words)
                halves[h] = pairs if halves[h] is None else halves[h] + pairs
        at = o.sums_at(group, i)
        total = neon("int32x4", "addp.v4i32", *halves)
        b.buffer_store(o.acc, o.acc[tuple(at)] + total, at)


def _words(o: Bound, row: int, vectors: range, half: int) -> Expr:
    """int16 [8]: sums of products of two rows of the weights, four k apart."""
    words: Expr = None
    for vector in vectors:
        lanes = [tirx.const(8 * half + lane, "int32") for lane in range(8)]
        codes = tirx.Shuffle([_codes(o, vector)], lanes)
        four = tirx.reinterpret("int32", o.x.vload(o.at(row, 4 * vector), "int8x4"))
        x = tirx.reinterpret("int8x8", tirx.Broadcast(four, 2))
        product = neon("int16x8", "smull.v8i16", codes, x)
        words = product if words is None else words + product
    return words


def _codes(o: Bound, vector: int) -> Expr:
    """int8 [16]."""

    def load(index: int) -> Expr:
        return o.codes.vload([tirx.const(16 * index, "int64")], "uint8x16")

    unit = o.dot.unit
    codes = load(vector) if unit.bits == 8 else unpacked(unit, load, vector)
    return tirx.reinterpret("int8x16", codes)

"""Dot products of one unit (R rows x 32 k of packed codes) with 32 int8 activations, on x86.

A pair per (instruction, bits, groups of a unit): the meaning, in plain loops, is one factory shared
by all instructions; the implementations differ in how decoded vectors are multiplied and summed.
Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMADDUBSW, PMADDWD, PSIGNB,
VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.

``vpmaddubsw`` adds two products u8 x s8 to an int16 and saturates. Codes of q bits and activations
in [-127, 127] give at most (2^q - 1) * 127 * 2 a lane and instruction, so int16 holds the sum of

    ====  ====================  =======================================
    bits  one instruction       instructions that int16 can sum (<= 32767)
    ====  ====================  =======================================
    1     1 * 127 * 2 = 254     129
    2     3 * 127 * 2 = 762     43
    3     7 * 127 * 2 = 1778    18
    4     15 * 127 * 2 = 3810   8  (30480)
    5     31 * 127 * 2 = 7874   4  (31496)
    6     63 * 127 * 2 = 16002  2  (32004)
    7     127 * 127 * 2 = 32258 1
    8     255 * 127 * 2 = 64770 none: saturates
    ====  ====================  =======================================

At most 8 are summed, the vectors of one unit; then ``vpmaddwd`` with ones widens to int32. For 8
bits the operands are |code - 128| <= 128 and the activation with the sign of (code - 128):
128 * 127 * 2 = 32512 fits, and the result is a dot product of signed codes. Of codes whose
neighbours fit together (`apq_tvm.formats.integer.PAIR_SUM`) and unsigned activations it is one as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, splat, x86
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.meaning.scaffold import Bound
from apq_tvm.tensorize.pairs.packed_dot import decoded, unit_dot_intrinsic
from apq_tvm.tensorize.x86.vectors import for_rows, maddubs, vpdpbusd, widened

MADDUBS_SUMS = {1: 8, 2: 8, 3: 8, 4: 8, 5: 4, 6: 2, 7: 1, 8: 1}
"""bits -> vpmaddubsw results that are summed in int16 (table above, at most the 8 of a unit)."""


@dataclass(frozen=True)
class DotInstruction:
    """How decoded codes and activations are multiplied.

    Parameters
    ----------
    name : str
        First part of the intrinsics' names.
    rows : int
        R of the layout: int32 lanes of its vectors.
    features : tuple of str
        LLVM features it needs, any one of them.
    signed8 : bool
        True if 8-bit codes are taken as ``code - 128``.
    pairs : bool
        True if these are such whose neighbours fit together, and activations unsigned.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    signed8: bool
    pairs: bool = False

    def meaning(self, unit: Unit, m: int) -> UnitDot:
        """The dot product of a unit with `m` rows of x."""
        offset = 128 if self.signed8 and unit.bits == 8 else 0
        return UnitDot(unit, m, "uint8" if self.pairs else "int8", offset)


MADDUBS = DotInstruction("maddubs", 8, ("avx2",), signed8=True)
PAIRS = replace(MADDUBS, pairs=True)
VNNI256 = DotInstruction("vpdpbusd256", 8, ("avxvnni", "avx512vnni"), signed8=False)
VNNI512 = DotInstruction("vpdpbusd512", 16, ("avx512vnni",), signed8=False)

INSTRUCTIONS = (VNNI512, VNNI256, MADDUBS)
"""In order of preference, of any codes."""


def dot_intrinsic(instruction: DotInstruction, dot: UnitDot, ahead: int = 0) -> str:
    """Register (once) and name the dot product of one unit with int8 activations.

    Parameters
    ----------
    instruction : DotInstruction
        Its rows are the unit's.
    dot : UnitDot
        As `DotInstruction.meaning` gives it; a decoded vector is used for all rows of x.
    ahead : int
        As `unit_dot_intrinsic`.
    """

    def group_products(o: Bound, group: int) -> None:
        together = MADDUBS_SUMS[dot.unit.bits]
        add_products(instruction, o, group, lambda v: decoded(dot.unit, o.codes, v), together)

    return unit_dot_intrinsic(instruction.name, dot, group_products, ahead)


def add_products(
    instruction: DotInstruction,
    o: Bound,
    group: int,
    values: Callable[[int], Expr],
    together: int,
) -> None:
    """Add the products of a group of a unit to its sums.

    Parameters
    ----------
    instruction : DotInstruction
    o : Bound
        Of a dot product with a unit of codes.
    group : int
    values : callable
        uint8 [4R] of a vector of the unit, used for all rows of x.
    together : int
        ``vpmaddubsw`` results that int16 can sum.
    """
    unit, rows = o.dot.unit, range(o.dot.m)
    at = [o.sums_at(group, i) for i in rows]
    sums = [o.acc[tuple(index)] for index in at]
    vectors = range(group * unit.vectors, (group + 1) * unit.vectors)
    if instruction.name == MADDUBS.name:
        for start in range(0, len(vectors), together):
            words: list[Expr] = [None] * o.dot.m
            for vector in vectors[start : start + together]:
                codes = values(vector)
                for i in rows:
                    product = _products(o.dot, codes, four_k(o, i, 4 * vector, unit.rows))
                    words[i] = product if words[i] is None else words[i] + product
            for i in rows:
                sums[i] = sums[i] + widened(words[i])
    else:
        for vector in vectors:
            codes = values(vector)
            for i in rows:
                sums[i] = vpdpbusd(sums[i], codes, four_k(o, i, 4 * vector, unit.rows))
    for index, total in zip(at, sums, strict=True):
        b.buffer_store(o.acc, total, index)


def four_products(
    instruction: DotInstruction, start: Expr | None, codes: Sequence[Expr], x: Sequence[Expr]
) -> Expr:
    """int32 [R]: start, 0 for None, + Σ code x over four vectors; int16 must hold their sums."""
    if instruction is MADDUBS:
        words: Expr = None
        for code, four in zip(codes, x, strict=True):
            part = maddubs(code, four)
            words = part if words is None else words + part
        total = widened(words)
        return total if start is None else start + total
    total = splat(0, "int32", instruction.rows) if start is None else start
    for code, four in zip(codes, x, strict=True):
        total = vpdpbusd(total, code, four)
    return total


def four_k(o: Bound, row: int, k: int, lanes: int) -> Expr:
    """int8 [4 lanes]: four activations from column `k` on, repeated for every row of weights."""
    return for_rows(o.x.vload(o.at(row, k), "int8x4"), lanes)


def _products(dot: UnitDot, codes: Expr, x: Expr) -> Expr:
    """int16 [16]: sums of two products; of signed codes at 8 bits."""
    if dot.unit.bits < 8:
        return maddubs(codes, x)
    flipped = tirx.bitwise_xor(codes, splat(0x80, "uint8", 32))
    centred = tirx.reinterpret("int8x32", flipped)
    if dot.x_dtype == "uint8":
        return maddubs(x, centred)
    magnitude = tirx.reinterpret("uint8x32", x86("int8x32", "avx2.psign.b", centred, centred))
    return maddubs(magnitude, x86("int8x32", "avx2.psign.b", x, centred))

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
128 * 127 * 2 = 32512 fits, and the result is a dot product of signed codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, splat, x86
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.lookup_dot import LookupOperands
from apq_tvm.tensorize.meaning.unit_dot import UnitDot
from apq_tvm.tensorize.pairs.unit_dot import DotBuffers, decoded, unit_dot_intrinsic
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
    """

    name: str
    rows: int
    features: tuple[str, ...]
    signed8: bool

    def meaning(self, unit: Unit, m: int) -> UnitDot:
        """The dot product of a unit with `m` rows of x."""
        return UnitDot(unit, m, "int8", 128 if self.signed8 and unit.bits == 8 else 0)


MADDUBS = DotInstruction("maddubs", 8, ("avx2",), signed8=True)
VNNI256 = DotInstruction("vpdpbusd256", 8, ("avxvnni", "avx512vnni"), signed8=False)
VNNI512 = DotInstruction("vpdpbusd512", 16, ("avx512vnni",), signed8=False)

INSTRUCTIONS = (VNNI512, VNNI256, MADDUBS)
"""In order of preference."""


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

    def accumulate(o: DotBuffers, group: int) -> None:
        def codes(vector: int) -> Expr:
            return decoded(o.dot.unit, o.codes, vector)

        bits = o.dot.unit.bits
        add_group(instruction, o, group, codes, MADDUBS_SUMS[bits], signed=bits == 8)

    return unit_dot_intrinsic(instruction.name, dot, accumulate, ahead)


def add_group(
    instruction: DotInstruction,
    o: DotBuffers | LookupOperands,
    group: int,
    value: Callable[[int], Expr],
    together: int,
    signed: bool = False,
) -> None:
    """Add a group's products to its sums.

    Parameters
    ----------
    instruction : DotInstruction
    o : DotBuffers or LookupOperands
    group : int
        Of the unit.
    value : callable
        What is multiplied, uint8 [4R], by number of a vector of the unit.
    together : int
        ``vpmaddubsw`` results that are summed in int16.
    signed : bool
        Whether ``vpmaddubsw`` is to take values as ``value - 128``.
    """
    unit, m = o.dot.unit, o.dot.m
    at = [o.sums_at(group, i) for i in range(m)]
    sums = [o.acc[tuple(index)] for index in at]
    vectors = range(group * unit.vectors, (group + 1) * unit.vectors)
    for start in range(0, len(vectors), together):
        words: list[Expr] = [None] * m
        for vector in vectors[start : start + together]:
            values = value(vector)
            for i in range(m):
                x = for_rows(o.x.vload(o.x_at(i, 4 * vector), "int8x4"), unit.rows)
                if instruction is not MADDUBS:
                    sums[i] = vpdpbusd(sums[i], values, x)
                    continue
                product = _signed_products(values, x) if signed else maddubs(values, x)
                words[i] = product if words[i] is None else words[i] + product
        if instruction is MADDUBS:
            sums = [total + widened(word) for total, word in zip(sums, words, strict=True)]
    for index, total in zip(at, sums, strict=True):
        b.buffer_store(o.acc, total, index)


def dot_of(
    instruction: DotInstruction, start: Expr | None, codes: Sequence[Expr], x: Sequence[Expr]
) -> Expr:
    """int32 [R]: start + Σ code x, whose ``vpmaddubsw`` results int16 can sum; None is 0."""
    if instruction is MADDUBS:
        words: Expr = None
        for code, four in zip(codes, x, strict=True):
            part = maddubs(code, four)
            words = part if words is None else words + part
        return widened(words) if start is None else start + widened(words)
    total = splat(0, "int32", instruction.rows) if start is None else start
    for code, four in zip(codes, x, strict=True):
        total = vpdpbusd(total, code, four)
    return total


def _signed_products(codes: Expr, x: Expr) -> Expr:
    """int16 [16]: sums of two products of ``code - 128``."""
    centred = tirx.reinterpret("int8x32", tirx.bitwise_xor(codes, splat(0x80, "uint8", 32)))
    magnitude = x86("int8x32", "avx2.psign.b", centred, centred)
    return maddubs(
        tirx.reinterpret("uint8x32", magnitude), x86("int8x32", "avx2.psign.b", x, centred)
    )

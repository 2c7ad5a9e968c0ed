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

from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import x86
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.unit_dot import UnitDot
from apq_tvm.tensorize.pairs.unit_dot import DotBuffers, decoded, unit_dot_intrinsic

Expr = Any  # tvm is untyped

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
    accumulate = _maddubs if instruction is MADDUBS else _vnni
    return unit_dot_intrinsic(instruction.name, dot, accumulate, ahead)


def _four_k(o: DotBuffers, row: int, vector: int) -> Expr:
    """int8 [4R]: the activations of k = 4 * vector .. + 3, repeated for every row of weights."""
    from tvm import tirx

    unit = o.dot.unit
    four = tirx.reinterpret("int32", o.x.vload(o.x_at(row, 4 * vector), "int8x4"))
    return tirx.reinterpret(f"int8x{unit.vector_bytes}", tirx.Broadcast(four, unit.rows))


def _vnni(o: DotBuffers, group: int) -> None:
    from tvm.tirx.script.builder import ir as b

    unit = o.dot.unit
    intrinsic = f"avx512.vpdpbusd.{8 * unit.vector_bytes}"
    at = [o.sums_at(group, i) for i in range(o.dot.m)]
    sums = [o.acc[tuple(index)] for index in at]
    for vector in range(group * unit.vectors, (group + 1) * unit.vectors):
        codes = decoded(unit, o.codes, vector)
        for i in range(o.dot.m):
            x = _four_k(o, i, vector)
            sums[i] = x86(f"int32x{unit.rows}", intrinsic, sums[i], codes, x)
    for index, total in zip(at, sums, strict=True):
        b.buffer_store(o.acc, total, index)


def _maddubs(o: DotBuffers, group: int) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    unit = o.dot.unit
    ones = tirx.Broadcast(tirx.const(1, "int16"), 16)
    at = [o.sums_at(group, i) for i in range(o.dot.m)]
    sums = [o.acc[tuple(index)] for index in at]
    vectors = range(group * unit.vectors, (group + 1) * unit.vectors)
    for start in range(0, len(vectors), MADDUBS_SUMS[unit.bits]):
        words: list[Expr] = [None] * o.dot.m
        for vector in vectors[start : start + MADDUBS_SUMS[unit.bits]]:
            codes = decoded(unit, o.codes, vector)
            for i in range(o.dot.m):
                product = _products(unit, codes, _four_k(o, i, vector))
                words[i] = product if words[i] is None else words[i] + product
        for i in range(o.dot.m):
            sums[i] = sums[i] + _avx2("pmadd.wd", "int32x8", words[i], ones)
    for index, total in zip(at, sums, strict=True):
        b.buffer_store(o.acc, total, index)


def _avx2(name: str, dtype: str, *arguments: Expr) -> Expr:
    return x86(dtype, f"avx2.{name}", *arguments)


def _products(unit: Unit, codes: Expr, x: Expr) -> Expr:
    """int16 [16]: sums of two products; of signed codes at 8 bits."""
    from tvm import tirx

    if unit.bits < 8:
        return _avx2("pmadd.ub.sw", "int16x16", codes, x)
    flip = tirx.Broadcast(tirx.const(0x80, "uint8"), 32)
    centred = tirx.reinterpret("int8x32", tirx.bitwise_xor(codes, flip))
    magnitude = tirx.reinterpret("uint8x32", _avx2("psign.b", "int8x32", centred, centred))
    return _avx2("pmadd.ub.sw", "int16x16", magnitude, _avx2("psign.b", "int8x32", x, centred))

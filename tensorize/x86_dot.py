"""Dot products of one unit (R rows x 32 k of packed codes) with 32 int8 activations, on x86.

A pair per (instruction, bits, groups of a unit): the meaning, in plain loops, is one factory shared
by all instructions; the implementations differ in how decoded vectors are multiplied and summed.
Sources: Intel 64 and IA-32 Software Developer's Manual, volume 2, PMADDUBSW, PMADDWD, PSIGNB,
VPDPBUSD; LLVM's IntrinsicsX86.td for the operand types.

``vpmaddubsw`` adds two products u8 x s8 to an int16 and saturates. Codes of q bits and activations in
[-127, 127] give at most (2^q - 1) * 127 * 2 a lane and instruction, so int16 holds the sum of

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

At most 8 are summed, the vectors of one unit; then ``vpmaddwd`` with ones widens to int32. For 8 bits
the operands are |code - 128| <= 128 and the activation with the sign of (code - 128):
128 * 127 * 2 = 32512 fits, and the result is a dot product of signed codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.unit import UNIT_K, Unit, decode

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


MADDUBS = DotInstruction("maddubs", 8, ("avx2",), signed8=True)
VNNI256 = DotInstruction("vpdpbusd256", 8, ("avxvnni", "avx512vnni"), signed8=False)
VNNI512 = DotInstruction("vpdpbusd512", 16, ("avx512vnni",), signed8=False)

INSTRUCTIONS = (VNNI512, VNNI256, MADDUBS)
"""In order of preference."""


def dot_intrinsic(instruction: DotInstruction, unit: Unit, prefetch: int = 0) -> str:
    """Register (once) and name the dot product of one unit.

    Parameters
    ----------
    instruction : DotInstruction
    unit : Unit
        Its rows must be the instruction's.
    prefetch : int
        Bytes ahead of the unit to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name; operands codes uint8 [unit bytes], x int8 [32], acc int32 [R], or
        [2, R] where a unit holds two groups.
    """
    signed = instruction.signed8 and unit.bits == 8
    code = f"s{unit.bits}" if signed else f"u{unit.bits}"
    name = f"apq_{instruction.name}_1x{unit.rows}x{UNIT_K}_s8{code}s32"
    name += ("_g16" if unit.groups == 2 else "") + (f"_pf{prefetch}" if prefetch else "")

    def make() -> tuple[Any, Any]:
        accumulate = _maddubs if instruction is MADDUBS else _vnni
        desc = _pair_member(unit, lambda *o: _plain_loops(unit, signed, *o))
        impl = _pair_member(unit, lambda *o: _instructions(unit, accumulate, prefetch, *o))
        return desc, impl

    return register(name, make)


def _pair_member(unit: Unit, body: Callable[[Any, Any, Any], None]) -> Any:
    """PrimFunc (codes, x, acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    sums = (unit.rows,) if unit.groups == 1 else (unit.groups, unit.rows)
    operands = (
        ("codes", (unit.nbytes,), "uint8", unit.vector_bytes),
        ("x", (UNIT_K,), "int8", 4),
        ("acc", sums, "int32", unit.vector_bytes),
    )
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("dot")
            codes, x, acc = (
                b.match_buffer(b.arg(name, b.handle()), shape, dtype, offset_factor=1, align=align)
                for name, shape, dtype, align in operands
            )
            with b.sblock("root"):
                whole = acc[tuple(slice(0, extent) for extent in sums)]
                b.reads(whole, codes[0 : unit.nbytes], x[0:UNIT_K])
                b.writes(whole)
                body(codes, x, acc)
    return builder.get()


def _plain_loops(unit: Unit, signed: bool, codes: Any, x: Any, acc: Any) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    extents = (unit.rows, unit.vectors, 4)
    if unit.groups == 1:
        with b.grid(*extents) as loops, b.sblock("dot"):
            r, j, c = b.axis.remap("SRR", loops)
            _plain_update(unit, signed, codes, x, acc, (r,), j, c)
    else:
        with b.grid(unit.groups, *extents) as loops, b.sblock("dot"):
            p, r, j, c = b.axis.remap("SSRR", loops)
            _plain_update(unit, signed, codes, x, acc, (p, r), p * unit.vectors + j, c)


def _plain_update(
    unit: Unit, signed: bool, codes: Any, x: Any, acc: Any, at: tuple[Any, ...], vector: Any, c: Any
) -> None:
    """``acc[at] += code * x`` for k = 4 * vector + c of a unit."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    b.reads(acc[at], codes[0 : unit.nbytes], x[0:UNIT_K])
    b.writes(acc[at])
    code = decode(unit, lambda byte: codes[byte], vector, at[-1] * 4 + c)
    if signed:
        code = code - tirx.const(128, "int32")
    b.buffer_store(acc, acc[at] + code * x[vector * 4 + c].astype("int32"), list(at))


def _instructions(
    unit: Unit, accumulate: Callable[..., Any], prefetch: int, codes: Any, x: Any, acc: Any
) -> None:
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    # A prefetch never faults, so the address may lie past the end of the weights.
    for line in range(0, unit.nbytes if prefetch else 0, 64):
        address = tirx.address_of(codes[prefetch + line])
        arguments = [tirx.const(v, "int32") for v in (0, 3, 1)]  # read, all levels, data
        b.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *arguments))
    for p in range(unit.groups):
        vectors = range(p * unit.vectors, (p + 1) * unit.vectors)
        operands = [(_decoded(unit, codes, v), _four_k(unit, x, v)) for v in vectors]
        lanes = tirx.Ramp(0, 1, unit.rows)
        at = [lanes] if unit.groups == 1 else [p, lanes]
        b.buffer_store(acc, accumulate(unit, acc[tuple(at)], operands), at)


def _four_k(unit: Unit, x: Any, vector: int) -> Any:
    """int8 [4R]: the activations of k = 4 * vector .. + 3, repeated for every row."""
    from tvm import tirx

    four = tirx.reinterpret("int32", x.vload([4 * vector], "int8x4"))
    return tirx.reinterpret(f"int8x{unit.vector_bytes}", tirx.Broadcast(four, unit.rows))


def _decoded(unit: Unit, codes: Any, vector: int) -> Any:
    """uint8 [4R]: codes of one vector, from each field by at most a shift and a mask."""
    from tvm import tirx

    size = unit.vector_bytes
    result: Any = None
    for width, shift in unit.fields:
        part = codes.vload([size * (shift + vector % width)], f"uint8x{size}")
        if width < 8:
            # Shifted in 16-bit lanes: x86 has no 8-bit shift, and the mask drops what crosses over.
            down = vector // width * width - shift
            words = tirx.reinterpret(f"uint16x{size // 2}", part)
            if down:
                move = tirx.shift_right if down > 0 else tirx.shift_left
                amount = tirx.Broadcast(tirx.const(abs(down), "uint16"), size // 2)
                part = tirx.reinterpret(f"uint8x{size}", move(words, amount))
            mask = tirx.const(((1 << width) - 1) << shift, "uint8")
            part = tirx.bitwise_and(part, tirx.Broadcast(mask, size))
        result = part if result is None else tirx.bitwise_or(result, part)
    return result


def _vnni(unit: Unit, acc: Any, operands: list[tuple[Any, Any]]) -> Any:
    from tvm import tirx

    intrinsic = f"llvm.x86.avx512.vpdpbusd.{8 * unit.vector_bytes}"
    for codes, x in operands:
        acc = tirx.call_llvm_pure_intrin(f"int32x{unit.rows}", intrinsic, acc, codes, x)
    return acc


def _maddubs(unit: Unit, acc: Any, operands: list[tuple[Any, Any]]) -> Any:
    from tvm import tirx

    def call(name: str, dtype: str, *arguments: Any) -> Any:
        return tirx.call_llvm_pure_intrin(dtype, f"llvm.x86.avx2.{name}", *arguments)

    ones = tirx.Broadcast(tirx.const(1, "int16"), 16)
    limit = MADDUBS_SUMS[unit.bits]
    for start in range(0, len(operands), limit):
        words: Any = None
        for codes, x in operands[start : start + limit]:
            if unit.bits == 8:
                codes, x = _magnitude_and_sign(codes, x, call)
            product = call("pmadd.ub.sw", "int16x16", codes, x)
            words = product if words is None else words + product
        acc = acc + call("pmadd.wd", "int32x8", words, ones)
    return acc


def _magnitude_and_sign(codes: Any, x: Any, call: Callable[..., Any]) -> tuple[Any, Any]:
    """|code - 128| as uint8 and x with the sign of (code - 128)."""
    from tvm import tirx

    flip = tirx.Broadcast(tirx.const(0x80, "uint8"), 32)
    centred = tirx.reinterpret("int8x32", tirx.bitwise_xor(codes, flip))
    magnitude = call("psign.b", "int8x32", centred, centred)
    return tirx.reinterpret("uint8x32", magnitude), call("psign.b", "int8x32", x, centred)

"""Planes of bits in TensorIR: what a weight and an activation add to a bit-serial sum.

The order of bits in a plane's words, the terms and the packing are those that
`apq_tvm.tensorize.x86_bitserial` describes; they hold for every instruction set.
"""

from __future__ import annotations

from typing import Any

UNIT_K = 32
"""Columns of one word of a plane."""

Expr = Any  # tvm is untyped


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

    bit = tirx.bitwise_and(
        tirx.shift_right(code, plane.astype("int32")), tirx.const(1, "int32")
    )
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

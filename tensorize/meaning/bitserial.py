"""Products of bit planes by AND (XOR for signs) and popcount: what is added to a sum.

``acc[i, r] += Σ_k term(code[r, k], x[i, k])`` over U units of 32 k. Codes of q bits lie as
`apq_tvm.codegen.layouts.interleaved` stores them, so that every kernel of a layer shares them: a
few shifts and masks gather bit s of a unit into one vector, where k = 4v + c of row r is bit v of
byte 4r + c. Activations lie as planes of that order: bit ``8c + v`` of the 32-bit word of plane t.

- p = 2, codes -1, 0 and 1, whose plane 0 says n: not zero, and plane 1 s: negative:
  ``term = Σ_t 2^t ((W_t xor s) & n)``, one popcount for two planes; the operator takes off what
  negatives count too much.
- p >= 3 bits, two's complement: ``term = code * x``, Σ_s Σ_t ±2^(s+t) popcount(W_s & X_t); the
  planes of the top bit, which weighs -2^(p-1), are subtracted.
- p = 1, signs x = 2u - 1: ``term = Σ_s 2^s (W_s xor u)``; the operator turns it into a product.

The planes are ABQ-LLM's (AAAI 2025), section 3.4.
"""

from __future__ import annotations

from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand


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

    bit = tirx.bitwise_and(tirx.shift_right(code, plane.astype("int32")), tirx.const(1, "int32"))
    four, index = tirx.const(4, "int32"), element.astype("int32")
    place = index % four * tirx.const(8, "int32") + index // four
    return tirx.shift_left(bit, place)


def bitserial_dot(unit: Unit, planes: int, units: int = 1, m: int = 1) -> Meaning:
    """The sum over some units of one group.

    Operands: codes uint8 [U, bytes] ([bytes] for one unit), x int32 [m, p, U] ([p, U] for one row)
    and sums int32 [m, R] ([R]).

    Parameters
    ----------
    unit : Unit
    planes : int
        p, bits of an activation.
    units : int
        U.
    m : int
        Rows of x.
    """

    def added(at: list[Expr], codes: Load, x: Load) -> Expr:
        row, r, j, c = at
        vector, which = (j % i64(8), j // i64(8)) if units > 1 else (j, i64(0))
        code = decode(unit, lambda byte: codes(which, byte), vector, r * i64(4) + c)
        bits = [plane_bit(x(row, i64(t), which), vector, c) for t in range(planes)]
        return term(code, bits, unit.bits)

    rows, many = ((m,) if m > 1 else ()), ((units,) if units > 1 else ())
    operands = (
        Operand("codes", (*many, unit.nbytes), "uint8", unit.vector_bytes),
        Operand("x", (*rows, planes, units), "int32", 4, True),
        Operand("acc", (*rows, unit.rows), "int32", unit.vector_bytes),
    )
    return Meaning("dot", operands, (m, unit.rows), (8 * units, 4), added)


def pack_planes(planes: int) -> Meaning:
    """The packing of 32 activations: X int32 [32], Y int32 [p, 1].

    ``Y[t] += Σ_e (X[e] >> t & 1) << (8 (e % 4) + e // 4)``.
    """
    operands = (
        Operand("x", (UNIT_K,), "int32", 64),
        Operand("y", (planes, 1), "int32", 4, True),
    )

    def added(at: list[Expr], x: Load) -> Expr:
        plane, _, element = at
        return packed_bit(x(element), plane, element)

    return Meaning("pack", operands, (planes, 1), (UNIT_K,), added, index="int32")

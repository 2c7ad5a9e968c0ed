"""Integer arithmetic that cannot trap, and other elementwise functions TVM computes otherwise.

A processor's division stops the process at a divisor of 0 and at the least number divided by -1;
so do lanes of a vector that hold nothing. ONNX leaves division by 0 open: here it gives 0, as in
numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx


def broadcast(fn: Callable[..., Any], *tensors: Any) -> Any:
    """`fn` of the elements of several tensors, with ONNX's broadcasting."""
    rank = max(len(t.shape) for t in tensors)
    shape = [_extent([t.shape for t in tensors], axis) for axis in range(-rank, 0)]

    def element(*index: Any) -> Any:
        return fn(*(t(*_where(t.shape, index)) for t in tensors))

    return te.compute(shape, element, "y")


def _is_one(extent: Any) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _extent(shapes: Sequence[Sequence[Any]], axis: int) -> Any:
    given = [shape[axis] for shape in shapes if len(shape) >= -axis]
    numbers = [d for d in given if isinstance(d, tirx.IntImm) and not _is_one(d)]
    wide = [d for d in given if not _is_one(d)]
    return (numbers or wide or given)[0]


def _where(shape: Sequence[Any], index: Sequence[Any]) -> list[Any]:
    """Where a tensor is read for the element at `index` of the result."""
    own = index[len(index) - len(shape) :]
    return [
        tirx.const(0, "int64") if _is_one(extent) else i
        for extent, i in zip(shape, own, strict=True)
    ]


def divide(a: Any, b: Any) -> Any:
    """Integer division that truncates."""
    dtype = str(a.ty)
    wide, quotient = _quotient(a, b)
    zero = tirx.const(0, wide)
    return tirx.Select(b.astype(wide) == zero, zero, quotient).astype(dtype)


def remainder(a: Any, b: Any, *, of_dividend: bool) -> Any:
    """Integer remainder with the sign of the divisor, or as in C with that of the dividend."""
    dtype = str(a.ty)
    wide, quotient = _quotient(a, b)
    zero, divisor = tirx.const(0, wide), b.astype(wide)
    rest = a.astype(wide) - quotient * divisor
    if not of_dividend and not dtype.startswith("u"):
        opposite = tirx.any(
            tirx.all(rest < zero, divisor > zero), tirx.all(rest > zero, divisor < zero)
        )
        rest = tirx.Select(opposite, rest + divisor, rest)
    return tirx.Select(divisor == zero, zero, rest).astype(dtype)


def _quotient(a: Any, b: Any) -> tuple[str, Any]:
    """A type that holds the quotient, and the quotient in it; anything where `b` is 0.

    Of up to 32 bits it is that of floats, which is exact: it differs from the next integer by more
    than a rounding. LLVM makes vectors of integer divisions with lanes that hold nothing, and those
    trap (seen with uint16).
    """
    dtype = str(a.ty)
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    if bits <= 32:
        wide, real = ("int32", "float32") if bits <= 16 else ("int64", "float64")
        one = tirx.const(1, real)
        divisor = b.astype(real)
        divisor = tirx.Select(divisor == tirx.const(0, real), one, divisor)
        return wide, (a.astype(real) / divisor).astype(wide)
    one, zero = tirx.const(1, dtype), tirx.const(0, dtype)
    if dtype.startswith("u"):
        return dtype, tirx.truncdiv(a, tirx.Select(b == zero, one, b))
    minus = tirx.const(-1, dtype)
    safe = tirx.Select(tirx.any(b == zero, b == minus), one, b)
    return dtype, tirx.Select(b == minus, zero - a, tirx.truncdiv(a, safe))


def floored(rest: Any, b: Any) -> Any:
    """The remainder of floats with the sign of the divisor, from that of C's fmod."""
    zero = tirx.const(0, str(rest.ty))
    opposite = tirx.any(tirx.all(rest < zero, b > zero), tirx.all(rest > zero, b < zero))
    return tirx.Select(opposite, rest + b, rest)


def integer_power(a: Any, b: Any) -> Any:
    """``a ** b`` in the type of `a`, by squaring, cut to its bits; 0 for what is no integer."""
    dtype = str(a.ty)
    one, zero = tirx.const(1, dtype), tirx.const(0, dtype)
    exponent, base, result = b.astype("int64"), a, one
    for bit in range(6):
        on = tirx.bitwise_and(tirx.shift_right(exponent, bit), tirx.const(1, "int64")) != 0
        result = result * tirx.Select(on, base, one)
        base = base * base
    far = tirx.any(exponent < 0, exponent > 63)
    odd = tirx.bitwise_and(exponent, tirx.const(1, "int64")) != 0
    steady = tirx.Select(a == one, one, zero)
    if not dtype.startswith("u"):
        minus = tirx.const(-1, dtype)
        steady = tirx.Select(a == minus, tirx.Select(odd, minus, one), steady)
    return tirx.Select(far, steady, result)


def shift(a: Any, b: Any, *, left: bool) -> Any:
    """``a << b`` or ``a >> b``; by less than 0, or by all bits, nothing but the sign stays."""
    dtype = str(a.ty)
    unsigned = dtype.startswith("u")
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    # Of unsigned integers TVM's simplifier takes the difference, and fails where it is negative.
    signed = tirx.Cast("int64", b) if dtype in ("uint32", "uint64") else b
    fits = signed < tirx.const(bits, signed.ty)
    if not unsigned or dtype == "uint64":
        fits = tirx.all(fits, signed >= tirx.const(0, signed.ty))
    by = tirx.Select(fits, b, tirx.const(bits - 1, b.ty))
    if not left and not unsigned:
        return tirx.shift_right(a, by)
    moved = tirx.shift_left(a, by) if left else tirx.shift_right(a, by)
    return tirx.Select(fits, moved, tirx.const(0, dtype))


def to_integer(x: Any, dtype: str) -> Any:
    """A float as integer: truncated, NaN as 0, and out of range the nearest there is."""
    kind = str(x.ty)
    bits = int(dtype.removeprefix("uint").removeprefix("int"))
    unsigned = dtype.startswith("u")
    low = 0 if unsigned else -(1 << (bits - 1))
    high = (1 << (bits if unsigned else bits - 1)) - 1
    # The largest float that is no larger than `high`.
    digits = {"float32": 24, "float64": 53, "float16": 11}[kind]
    top = (
        high
        if high.bit_length() <= digits
        else (high >> (high.bit_length() - digits)) << (high.bit_length() - digits)
    )
    if kind == "float16":
        low, top = max(low, -65504), min(top, 65504)
    number = tirx.max(tirx.min(x, tirx.const(float(top), kind)), tirx.const(float(low), kind))
    number = tirx.Select(x == x, number, tirx.const(0.0, kind))
    # Signed conversions are single instructions; narrow ones go through 32 bits.
    through = "int32" if bits < 32 else "int64" if dtype == "uint32" else dtype
    return number.astype(through).astype(dtype)


def converted(x: Any, dtype: str) -> Any:
    """A float as integer as x86-64's C compilers do it: truncated, then cut to the type's bits.

    Numbers are truncated to int32, or to int64 for uint32 and the types of 64 bits; what that does
    not hold, and NaN, is its least number ("integer indefinite", Intel SDM, CVTTSS2SI). Those from
    2^63 on become uint64 without that bit, which is put back. ONNX leaves all of this open, LLVM's
    own conversion gives anything at all, and ONNX Runtime has static_cast. (Of uint32, below -2^31
    and from 2^32 on, its loops of vectors differ from those of single numbers, which are as here.)
    """
    x = x.astype("float32") if str(x.ty) == "float16" else x
    wide = "int64" if dtype in ("uint32", "int64", "uint64") else "int32"
    bits = int(wide.removeprefix("int")) - 1
    kind, least = str(x.ty), tirx.const(-(1 << bits), wide)
    edge = tirx.const(float(1 << bits), kind)
    above = x >= edge
    number = tirx.Select(above, x - edge, x) if dtype == "uint64" else x
    inside = tirx.all(number >= -edge, number < edge)
    whole = tirx.Select(inside, number, tirx.const(0.0, kind)).astype(wide)
    whole = tirx.Select(inside, whole, least)
    if dtype == "uint64":
        whole = tirx.Select(above, tirx.bitwise_xor(whole, least), whole)
    return whole.astype(dtype)


def from_bfloat16(x: Any) -> Any:
    """A bfloat16, as uint16, as float32: its upper half."""
    return tirx.reinterpret("float32", x.astype("uint32") << tirx.const(16, "uint32"))


def to_bfloat16(x: Any) -> Any:
    """A float32 rounded to bfloat16, ties to even, as uint16."""

    def u32(value: int) -> Any:
        return tirx.const(value, "uint32")

    bits = tirx.reinterpret("uint32", x)
    even = (bits >> u32(16)) & u32(1)
    rounded = (bits + u32(0x7FFF) + even) >> u32(16)
    quiet = (bits >> u32(16)) | u32(0x40)
    return tirx.Select(x == x, rounded, quiet).astype("uint16")

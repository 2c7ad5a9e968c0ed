"""Numbers on the way from a size to a size: sizes times a scale, before they are rounded.

Exporters compute sizes in floats (``int(floor(height * 0.5))``). A float is here the exact fraction
it stands for, so that no rounding of float32 comes between; where that matters, a size is off by
its rounding error, which no exporter means.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

from apq_tvm.onnx_import.symbolic.dims import (
    Dim,
    compare,
    exact,
    floordiv,
    maximum,
    minimum,
    negative,
    not_negative,
    positive,
)


@dataclass(frozen=True)
class Ratio:
    """``num / den`` that is no whole number, as far as is known; `den` is positive."""

    num: Dim
    den: Dim


Number = Dim | Ratio


def number(value: float) -> Number | None:
    """A constant; None for infinities and NaN."""
    if not isfinite(value):
        return None
    given = Fraction(value)
    return quotient(given.numerator, given.denominator)


def pair(value: Number) -> tuple[Dim, Dim]:
    """Numerator and denominator."""
    return (value.num, value.den) if isinstance(value, Ratio) else (value, 1)


def quotient(num: Dim, den: Dim) -> Number | None:
    """``num / den``; None where the sign of `den` is not known, or it may be 0."""
    whole = None if den == 0 else exact(num, den)
    if whole is not None:
        return whole
    if negative(den):
        return quotient(-num, -den)
    if not positive(den):
        return None
    if isinstance(num, int) and isinstance(den, int):
        least = Fraction(num, den)
        return Ratio(least.numerator, least.denominator)
    return Ratio(num, den)


def add(a: Number, b: Number) -> Number | None:
    """``a + b``; None where its denominator may be 0."""
    (a_num, a_den), (b_num, b_den) = pair(a), pair(b)
    return quotient(a_num * b_den + b_num * a_den, a_den * b_den)


def sub(a: Number, b: Number) -> Number | None:
    """``a - b``."""
    num, den = pair(b)
    return add(a, Ratio(-num, den))


def mul(a: Number, b: Number) -> Number | None:
    """``a * b``."""
    (a_num, a_den), (b_num, b_den) = pair(a), pair(b)
    return quotient(a_num * b_num, a_den * b_den)


def div(a: Number, b: Number) -> Number | None:
    """``a / b``; None where `b` may be 0."""
    (a_num, a_den), (b_num, b_den) = pair(a), pair(b)
    return quotient(a_num * b_den, a_den * b_num)


def floor(value: Number) -> Dim:
    """Rounded down."""
    num, den = pair(value)
    return floordiv(num, den)


def ceil(value: Number) -> Dim:
    """Rounded up."""
    num, den = pair(value)
    return -floordiv(-num, den)


def truncate(value: Number) -> Dim | None:
    """Towards 0, as a Cast to integers; None where the sign is not known."""
    number = pair(value)[0]
    if not_negative(number):
        return floor(value)
    return ceil(value) if not_negative(-number) else None


def _crossed(a: Number, b: Number) -> tuple[Dim, Dim, Dim]:
    """Two numbers over one denominator."""
    (a_num, a_den), (b_num, b_den) = pair(a), pair(b)
    return a_num * b_den, b_num * a_den, a_den * b_den


def less(a: Number, b: Number) -> bool | None:
    """``a < b``; None where that depends on the symbols."""
    left, right, _ = _crossed(a, b)
    if compare(left + 1, right) in (-1, 0):
        return True
    return False if compare(left, right) in (0, 1) else None


def smaller(a: Number, b: Number) -> Number | None:
    """The smaller of two."""
    left, right, den = _crossed(a, b)
    return quotient(minimum(left, right), den)


def larger(a: Number, b: Number) -> Number | None:
    """The larger of two."""
    left, right, den = _crossed(a, b)
    return quotient(maximum(left, right), den)

"""Dot product of one unit of packed codes with float activations: decode, convert, multiply-add.

No instruction is named: shifts, conversions and fused multiply-adds of R-lane vectors exist on
every SIMD machine, and LLVM picks them (``vpsrld``, ``vcvtdq2ps``, ``vfmadd231ps`` on x86).
"""

from __future__ import annotations

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.interleaved import Unit
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.meaning.scaffold import Bound
from apq_tvm.tensorize.pairs.packed_dot import decoded, unit_dot_intrinsic


def float_dot_intrinsic(dot: UnitDot, ahead: int = 0) -> str:
    """Register (once) and name the dot product of one unit with float32 activations.

    A converted vector is used for all rows of x; `ahead` as `unit_dot_intrinsic`.
    """
    return unit_dot_intrinsic("fma", dot, _group, ahead)


def _group(o: Bound, group: int) -> None:
    """At least four sums in flight: a multiply-add must not wait for the one before it."""
    from tvm.tirx.script.builder import ir as b

    unit, rows = o.dot.unit, range(o.dot.m)
    zero = _zero_points(o, group)
    at = [o.sums_at(group, i) for i in rows]
    chains = max(1, 4 // o.dot.m)
    sums: list[list[Expr]] = [[o.acc[tuple(at[i])]] + [None] * (chains - 1) for i in rows]
    for vector in range(group * unit.vectors, (group + 1) * unit.vectors):
        codes = decoded(unit, o.codes, vector)
        for c in range(4):
            weight = _weights(unit, codes, c, zero)
            for i in rows:
                term = weight * _repeated(o, i, 4 * vector + c)
                before = sums[i][c % chains]
                sums[i][c % chains] = term if before is None else before + term
    for i in rows:
        total = sums[i][0]
        for part in sums[i][1:]:
            total = total + part
        b.buffer_store(o.acc, total, at[i])


def _zero_points(o: Bound, group: int) -> Expr | None:
    """int32 [R], or None where codes are symmetric."""
    from tvm import tirx

    if "zeros" not in o.arrays:
        return None
    rows = o.dot.unit.rows
    lanes = tirx.Ramp(tirx.const(0, "int64"), tirx.const(1, "int64"), rows)
    at = (tirx.const(group, "int64"), lanes) if o.dot.unit.groups > 1 else (lanes,)
    return o.zeros[at].astype(f"int32x{rows}")


def _weights(unit: Unit, codes: Expr, c: int, zero: Expr | None) -> Expr:
    """float32 [R]: (code - zero) of byte c of every 32-bit lane."""
    from tvm import tirx

    def repeated(value: int, dtype: str) -> Expr:
        return tirx.Broadcast(tirx.const(value, dtype), unit.rows)

    words = tirx.reinterpret(f"uint32x{unit.rows}", codes)
    if c:
        words = tirx.shift_right(words, repeated(8 * c, "uint32"))
    if c < 3:
        words = tirx.bitwise_and(words, repeated(0xFF, "uint32"))
    code = tirx.reinterpret(f"int32x{unit.rows}", words)
    if zero is not None:
        centred = code - zero
    elif unit.bits == 1:
        centred = code * repeated(2, "int32") - repeated(1, "int32")
    else:
        centred = code - repeated(1 << (unit.bits - 1), "int32")
    return centred.astype(f"float32x{unit.rows}")


def _repeated(o: Bound, row: int, k: int) -> Expr:
    from tvm import tirx

    return tirx.Broadcast(o.x[tuple(o.at(row, k))], o.dot.unit.rows)

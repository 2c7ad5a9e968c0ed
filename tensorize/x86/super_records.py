"""Products of records of super-blocks on x86 (`apq_tvm.tensorize.meaning.super_records`).

Codes are multiplied where they stand in their bytes, 4^g too large, by ``vpdpbusd``; the factor is
taken back with the group's scale of the activations. ``vpmaddubsw`` sums two products to an int16,
so there the upper two groups are shifted down by four first: 2 * 127 * 12 * 4 = 12192 fits for
2-bit codes, and 2 * 127 * 28 * 4 = 28448 for 3-bit ones. All other integer sums fit int32, and, as
they are multiples of less than 2^24, are exact in a float.

Intel 64 and IA-32 Software Developer's Manual, volume 2, VPDPBUSD, PMADDUBSW, PMADDWD, PMULLD,
PMOVZX; LLVM's IntrinsicsX86.td for the operand types.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, i64, prefetch, splat
from apq_tvm.tensorize.meaning.scaffold import Bound, bound_pair
from apq_tvm.tensorize.meaning.super_records import GROUP, RecordDot, Records, high_bit
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.dot import MADDUBS, DotInstruction, four_k, four_products
from apq_tvm.tensorize.x86.vectors import lanes_of, masked, shifted

_CODE_BITS = 2
"""Bits of a code that stand together."""


def places(instruction: DotInstruction, bits: int) -> tuple[int, ...]:
    """Bit at which codes of each group of a chunk are multiplied."""
    if instruction is MADDUBS:
        return (0, 2, 0, 2)
    return (0, 2, 4, 6) if bits == 2 else (0, 2, 4, 4)


def powers(instruction: DotInstruction, bits: int) -> tuple[float, ...]:
    """What `apq_tvm.ops.activations.factors` must multiply the scales of a chunk's groups by."""
    return tuple(2.0**-place for place in places(instruction, bits))


def records_dot_intrinsic(instruction: DotInstruction, dot: RecordDot, ahead: int = 0) -> str:
    """Register (once) and name the product of a chunk.

    Parameters
    ----------
    instruction : DotInstruction
        Of the records' rows.
    dot : RecordDot
    ahead : int
        Bytes ahead of the chunk to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name.
    """
    rec = dot.records
    name = f"apq_{instruction.name}_{dot.m}x{rec.rows}x{dot.k}_s8u{rec.bits}records"
    name += f"_pf{ahead}" if ahead else ""

    def implement(o: Bound) -> None:
        prefetch(o.chunk, rec.chunk, ahead)
        totals = [[_sums(o, which, row) for row in range(dot.m)] for which in range(2)]
        where = places(instruction, rec.bits)
        for group in range(dot.k // GROUP):
            codes = [_codes(o, group, i, where[group]) for i in range(4)]
            sub, least = (_small(o, group, which) for which in range(2))
            for row in range(dot.m):
                total = _products(instruction, o, codes, row, group) * sub
                for which, value in enumerate((total, least)):
                    factor = o.factors[tuple(o.at(row, group, which))]
                    sums = totals[which][row]
                    totals[which][row] = _fma(value.astype(_floats(o)), factor, sums)
        for which in range(2):
            for row in range(dot.m):
                _store(o.acc, totals[which][row], _sums_at(o, which, row))

    return register(name, lambda: bound_pair(dot, dot.meaning, implement))


def records_scale_intrinsic(records: Records, m: int, ahead: int = 0) -> str:
    """Register (once) and name the end of a super-block for vectors of its rows.

    `ahead` is as of `records_dot_intrinsic`: together they ask for every line.
    """
    rows, dot = records.rows, RecordDot(records, m)
    name = f"apq_records_scale_{m}x{rows}" + (f"_pf{ahead}" if ahead else "")

    def implement(o: Bound) -> None:
        prefetch(o.scales, records.scales, ahead)

        def scale(first: int) -> Expr:
            low, high = (
                o.scales.vload([i64(at)], f"uint8x{rows}").astype(f"uint16x{rows}")
                for at in (first, first + rows)
            )
            up = tirx.shift_left(high, splat(8, "uint16", rows))
            half = tirx.reinterpret(f"float16x{rows}", tirx.bitwise_or(low, up))
            return half.astype(f"float32x{rows}")

        for row in range(m):
            at = o.at(row, 0)
            total, least = (
                o.totals.vload([i64(which), *at], f"float32x{rows}") for which in range(2)
            )
            value = o.acc.vload(at, f"float32x{rows}") + total * scale(0)
            _store(o.acc, value - least * scale(2 * rows), at)

    return register(name, lambda: bound_pair(dot, dot.scaling, implement))


def _floats(o: Bound) -> str:
    return f"float32x{o.dot.records.rows}"


def _sums_at(o: Bound, which: int, row: int) -> list[Expr]:
    return [i64(which), *o.at(row, 0)]


def _sums(o: Bound, which: int, row: int) -> Expr:
    return o.acc.vload(_sums_at(o, which, row), _floats(o))


def _store(buffer: Any, value: Expr, at: list[Expr]) -> None:
    *lead, last = at
    lanes = lanes_of(value)
    b.buffer_store(buffer, value, [*lead, tirx.Ramp(last, i64(1), lanes)])


def _fma(value: Expr, factor: Expr, total: Expr) -> Expr:
    lanes = lanes_of(value)
    dtype = f"float32x{lanes}"
    return tirx.call_llvm_pure_intrin(
        dtype, f"llvm.fma.v{lanes}f32", value, tirx.Broadcast(factor, lanes), total
    )


def _small(o: Bound, group: int, which: int) -> Expr:
    """int32 [R]: sub-scales (0) or minima (1) of a group."""
    rows = o.dot.records.rows
    at = group // 2 * rows + 2 * rows * which
    pair = o.chunk.vload([i64(at)], f"uint8x{rows}").astype(f"int32x{rows}")
    if group % 2:
        return tirx.shift_right(pair, splat(4, "int32", rows))
    return tirx.bitwise_and(pair, splat(15, "int32", rows))


def _part(o: Bound, vector: int, width: int, at: int, place: int) -> Expr:
    """Bits `at` to ``at + width`` of every byte of a vector, brought to `place`."""
    rec = o.dot.records
    found = o.chunk.vload([i64(rec.codes + vector * rec.vector)], f"uint8x{rec.vector}")
    return masked(shifted(found, place - at), ((1 << width) - 1) << place)


def _codes(o: Bound, group: int, i: int, place: int) -> Expr:
    """uint8 [4R]: codes of vector `i` of a group, times 2^place."""
    codes = _part(o, i, _CODE_BITS, 2 * group, place)
    if o.dot.records.bits == _CODE_BITS:
        return codes
    high = _part(o, 4 + i // 2, 1, high_bit(group, i), place + 2)
    return tirx.bitwise_or(codes, high)


def _products(
    instruction: DotInstruction, o: Bound, codes: list[Expr], row: int, group: int
) -> Expr:
    """int32 [R]: a group's codes times a row of x."""
    x = [four_k(o, row, group * GROUP + 4 * i, o.dot.records.rows) for i in range(4)]
    return four_products(instruction, None, codes, x)

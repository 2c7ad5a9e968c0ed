"""Scaled dot products of packed codes with folded activations by smmla, codes in runs of 8 k.

Sources: Arm Architecture Reference Manual, DDI 0487: SMMLA (FEAT_I8MM), FCVTL, FMLA; LLVM's
IntrinsicsAArch64.td for ``llvm.aarch64.neon.smmla``.

Codes are unpacked, and sums scaled, as `apq_tvm.tensorize.arm.fold` does it. Per 4 rows x 32 k of
W4 that is, for one row of x, 4 ``and``, 8 smmla, 1 ``shl``, 1 ``fcvtl`` and 2 ``fmla``, as many as
of sdot by lane; for each two more rows of x 8 smmla, 2 ``shl`` and 4 ``fmla``, where sdot takes 16,
2 and 4.
"""

from __future__ import annotations

from itertools import pairwise

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.codes import repeated, unpacked
from apq_tvm.tensorize.arm.fold import fma, four_floats, raw_codes, sums_by_place
from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.pairs.folded_dot import FoldedOperands, folded_pair
from apq_tvm.tensorize.pairs.paired_dot import BYTES, PairedDot
from apq_tvm.tensorize.registry import register

OCTETS = UNIT_K // 8


def paired_intrinsic(dot: PairedDot) -> str:
    """Register (once) and name the product of one chunk."""
    unit = dot.fold.unit
    name = f"apq_smmla_fold_{dot.m}x{unit.rows}x{UNIT_K * dot.units}_s8u{unit.bits}f32"
    name += ("_z" if dot.fold.zeros else "") + ("_own" if dot.own else "")
    name += "_half" if unit.half else ""
    name += ("_u" if dot.fold.unfolded else "") + (f"_x{dot.blocks}" if dot.blocks > 1 else "")
    return register(name, lambda: folded_pair(dot, _implement))


def _implement(o: FoldedOperands) -> None:
    several = o.dot.pairs > 1 or o.dot.blocks > 1
    totals = _outer_products(o) if o.dot.units > 1 and several else None
    for pair, column in _order(o.dot):
        if totals is None:
            total = _sums(o, pair, column)
        else:
            total = totals[pair, column]
        if "zeros" in o.arrays:
            zero = _of_column(o, o.zeros, "uint8", column)
            sums = tirx.reinterpret("int32x4", four_floats(o.factors, o.lead((i64(pair),), 1), 4))
            total = total - zero * sums
        scale = _of_column(o, o.scales, "float16", column)
        factor = four_floats(o.factors, o.lead((i64(pair),), 1), 0)
        start = four_floats(o.starts, _start(o, pair, column), 4)
        scaled = fma(tirx.reinterpret("float32x4", total), factor, start)
        at = _at(o, pair, column)
        b.buffer_store(o.acc, fma(scale, scaled, o.acc[tuple(at)]), at)


def _order(dot: PairedDot) -> list[tuple[int, int]]:
    """Pairs and columns in the order of their sums.

    What the outer loop goes over is loaded once: the longer it is, the fewer registers hold the
    operands of the inner one.
    """
    pairs, columns = range(dot.pairs), range(dot.columns)
    if len(pairs) >= len(columns):
        return [(pair, column) for pair in pairs for column in columns]
    return [(pair, column) for column in columns for pair in pairs]


def _outer_products(o: FoldedOperands) -> dict[tuple[int, int], Expr]:
    """Sums by pair and column, made k by k: operands of a long chunk would not fit registers."""
    dot, fold, lanes = o.dot, o.dot.fold, tirx.Ramp(0, 1, 4)
    places = sorted(set(fold.places))
    sums = b.alloc_buffer((len(places), dot.pairs, dot.columns, 4), "int32", align=16)
    order = _order(dot)
    for place in range(len(places)):
        for pair, column in order:
            start = tirx.Broadcast(tirx.const(0, "int32"), 4)
            if not place:
                first = four_floats(o.starts, _start(o, pair, column), 0)
                start = tirx.reinterpret("int32x4", first)
            b.buffer_store(sums, start, [place, pair, column, lanes])
    for unit in range(dot.units):
        for octet in _by_bytes(dot):
            place = places.index(fold.places[fold.part(2 * octet)])
            for pair, column in order:
                total = sums.vload([place, pair, column, 0], "int32x4")
                total = _product(o, total, unit, octet, pair, column)
                b.buffer_store(sums, total, [place, pair, column, lanes])
    results = {}
    for pair, column in order:
        result = sums.vload([0, pair, column, 0], "int32x4")
        for i, (below, place) in enumerate(pairwise(places), 1):
            width = tirx.Broadcast(tirx.const(place - below, "int32"), 4)
            part = sums.vload([i, pair, column, 0], "int32x4")
            result = tirx.shift_left(result, width) + part
        results[pair, column] = result
    return results


def _by_bytes(dot: PairedDot) -> list[int]:
    """Octets of a unit, those whose codes share bytes one after another."""
    width, _ = dot.fold.unit.fields[0]
    apart = max(1, width // 2)
    return sorted(range(OCTETS), key=lambda octet: (octet % apart, octet))


def _of_column(o: FoldedOperands, values: Buffer, dtype: str, column: int) -> Expr:
    """Values of 4 rows of the block, or of 2 rows as often as there are rows of x."""
    if o.dot.m == 1:
        return _four_rows(o, values, dtype, column)
    first = column % 2 * 2
    lanes = [tirx.const(first + i % 2, "int32") for i in range(4)]
    return tirx.Shuffle([_four_rows(o, values, dtype, column // 2)], lanes)


def _four_rows(o: FoldedOperands, values: Buffer, dtype: str, index: int) -> Expr:
    """int32 or float32 [4]: values of 4 rows, of a load of all.

    LLVM would shuffle float16 before it converts it, and convert twice.
    """
    rows, wide = o.dot.fold.unit.rows, "float32x4" if dtype == "float16" else "int32x4"
    block, index = divmod(index, rows // 4)
    first = [i64(block), i64(0), i64(0)] if o.dot.beside else [i64(0)]
    if rows == 4:
        return values.vload(first, f"{dtype}x4").astype(wide)
    lanes = [tirx.const(4 * index + i, "int32") for i in range(4)]
    four = tirx.Shuffle([values.vload(first, f"{dtype}x{rows}")], lanes)
    if dtype == "uint8":
        return four.astype(wide)
    name = "llvm.aarch64.neon.vcvthf2fp"
    return tirx.call_llvm_pure_intrin(wide, name, tirx.reinterpret("int16x4", four))


def _start(o: FoldedOperands, pair: int, column: int) -> tuple[Expr, ...]:
    if not o.dot.own:
        return o.lead((i64(pair),), 2)
    return (*o.lead((i64(pair),), 1), *([i64(column)] if len(o.starts.shape) > 1 else []))


def _sums(o: FoldedOperands, pair: int, column: int) -> Expr:
    def multiply(total: Expr, unit: int, vector: int) -> Expr:
        return _product(o, total, unit, vector // 2, pair, column)

    return sums_by_place(o.dot, four_floats(o.starts, _start(o, pair, column), 0), multiply, 2)


def _product(o: FoldedOperands, total: Expr, unit: int, octet: int, pair: int, column: int) -> Expr:
    """Products of 8 k, of one column of a pair; of one row of x those with 4 rows of weights."""
    at = BYTES * (OCTETS * unit + octet)
    if o.dot.m > 1:
        return _smmla(total, _x(o, pair, at), _codes(o, unit, octet, column))
    for half in range(2):
        x = _x(o, pair, at + (8 if half == 0 else 0))
        total = _smmla(total, x, _codes(o, unit, octet, 2 * column + half))
    return total


def _x(o: FoldedOperands, pair: int, at: int) -> Expr:
    return o.x.vload([*o.lead((i64(pair),)), i64(at)], "int8x16")


def _smmla(total: Expr, x: Expr, codes: Expr) -> Expr:
    name = "llvm.aarch64.neon.smmla.v4i32.v16i8"
    return tirx.call_llvm_pure_intrin("int32x4", name, total, x, codes)


def _codes(o: FoldedOperands, unit: int, octet: int, column: int) -> Expr:
    """int8 [16]: what stands for 2 rows x 8 k (see `apq_tvm.tensorize.meaning.spans.fold`)."""
    fold, size = o.dot.fold, o.dot.fold.unit.vector_bytes
    block, column = divmod(column, o.dot.fold.unit.rows // 2)
    unit_at = o.dot.fold.unit.at
    byte_of_octet = 16 * column
    vector, within = 2 * octet + byte_of_octet // size, byte_of_octet % size

    def load(index: int) -> Expr:
        lead = [i64(unit)] if o.dot.units > 1 or o.dot.beside else []
        lead = [i64(block), *lead] if o.dot.beside else lead
        return o.codes.vload([*lead, i64(unit_at(size * index + within))], "uint8x16")

    if fold.shifted:
        return _moved_down(load(vector % fold.shifted), fold.shifted, vector)
    if not fold.raw:
        return tirx.reinterpret("int8x16", unpacked(fold.unit, load, vector, fold.doubled))
    return raw_codes(fold, load, vector)


def _moved_down(byte: Expr, width: int, vector: int) -> Expr:
    """Codes of a part of `byte`; those of the topmost are centred."""
    down = vector // width * width
    if down + width == 8:
        signed = tirx.reinterpret("int8x16", byte)
        return tirx.shift_right(signed, tirx.Broadcast(tirx.const(down, "int8"), 16))
    if down:
        byte = tirx.shift_right(byte, repeated(down))
    return tirx.reinterpret("int8x16", tirx.bitwise_and(byte, repeated((1 << width) - 1)))


def _at(o: FoldedOperands, pair: int, column: int) -> list[Expr]:
    if o.dot.m == 1:
        block, column = divmod(column, o.dot.fold.unit.rows // 4)
        lead = [i64(block)] if o.dot.beside else []
        return [*lead, tirx.Ramp(i64(4 * column), i64(1), 4)]
    return [*o.lead((i64(pair),)), i64(column), tirx.Ramp(i64(0), i64(1), 4)]

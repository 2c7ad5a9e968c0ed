"""Scaled dot products of packed codes with folded activations by sdot: 4 rows, by lane.

Sources: Arm Architecture Reference Manual, DDI 0487: SDOT (by element), FCVTL, FMLA; LLVM's
IntrinsicsAArch64.td for ``llvm.aarch64.neon.sdot``.

Per 4 rows x 32 k of W4 that is 4 ``and``, 8 sdot, 1 ``shl``, 1 ``fcvtl`` and 2 ``fmla``:

- An int32 sum starts at the pattern of `MAGIC` (and at what symmetric codes are off by), so that it
  *is* the float MAGIC + sum at the end.
- ``c = -MAGIC xs`` is exact, because xs is given in 22 bits. ``c + xs (MAGIC + sum)`` is one
  ``fmla`` with one rounding, ``y + scale c`` the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.codes import repeated, unpacked
from apq_tvm.tensorize.exprs import Buffer, Expr
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS
from apq_tvm.tensorize.meaning.spans.fold import Fold
from apq_tvm.tensorize.meaning.whole_codes import whole_place
from apq_tvm.tensorize.pairs.folded_dot import FoldedDot, FoldedOperands, folded_pair
from apq_tvm.tensorize.registry import register


def folded_intrinsic(fold: Fold, m: int, units: int) -> str:
    """Register (once) and name the product of one chunk.

    Parameters
    ----------
    fold : Fold
        Of a unit of 4 rows.
    m : int
        Rows of x; codes are unpacked once for all of them.
    units : int
        Of the chunk.
    """
    unit = fold.unit
    name = f"apq_sdot_fold_{m}x{unit.rows}x{UNIT_K * units}_s8u{unit.bits}f32"
    name += ("_t" if unit.whole else "") + ("_z" if fold.zeros else "")
    return register(name, lambda: folded_pair(FoldedDot(fold, m, units), _implement))


def _implement(o: FoldedOperands) -> None:
    if o.dot.fold.unit.whole:
        places = _sums_of_whole(o)
    elif o.dot.m > 2 or (o.dot.m == 2 and o.dot.units > 1 and o.dot.fold.unit.bits < 8):
        places = _sums_of_rows(o)
    else:
        places = [_sums(o, i) for i in range(o.dot.m)]
    scale = o.scales.vload([0], "float16x4").astype("float32x4")
    for i, total in enumerate(places):
        at = _at(o, i)
        if "zeros" in o.arrays:
            zero = o.zeros.vload([0], "uint8x4").astype("int32x4")
            factor = four_floats(o.factors, o.lead(i, 1), 4)
            total = total - zero * tirx.reinterpret("int32x4", factor)
        total = tirx.reinterpret("float32x4", total)
        factor = four_floats(o.factors, o.lead(i, 1), 0)
        scaled = fma(total, factor, four_floats(o.starts, o.lead(i, 2), 4))
        b.buffer_store(o.acc, fma(scale, scaled, o.acc[tuple(at)]), at)


def four_floats(buffer: Buffer, lead: tuple[Expr, ...], index: int) -> Expr:
    """float32 [4] behind `lead`."""
    return buffer.vload([*lead, index], "float32x4")


def fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """x y + z, rounded once: TVM's own multiply and add would be two operations."""
    return tirx.call_llvm_pure_intrin("float32x4", "llvm.fma.v4f32", x, y, z)


def sums_by_place(
    dot: FoldedDot, start: Expr, multiply: Callable[[Expr, int, int], Expr], vectors: int = 1
) -> Expr:
    """int32 [4]: pattern of a float, MAGIC + 2^shift Σ.

    Parameters
    ----------
    dot : FoldedDot
    start : PrimExpr
        float32 [4].
    multiply : callable
        Adds products of a unit and a vector of it, or of the `vectors` from there on.
    vectors : int
    """
    fold = dot.fold
    total = tirx.reinterpret("int32x4", start)
    for part, place in enumerate(fold.places):
        if part and place > fold.places[part - 1]:
            width = tirx.Broadcast(tirx.const(place - fold.places[part - 1], "int32"), 4)
            total = tirx.shift_left(total, width)
        apart = dot.units > 1 and part > 0 and not fold.shifted
        mine = tirx.Broadcast(tirx.const(0, "int32"), 4) if apart else total
        for unit in range(dot.units):
            for vector in fold.members(part)[::vectors]:
                mine = multiply(mine, unit, vector)
        total = total + mine if apart else mine
    return total


def _sums(o: FoldedOperands, row: int) -> Expr:
    def multiply(total: Expr, unit: int, vector: int) -> Expr:
        return _sdot(total, _codes(o, unit, vector), _four_k(o, row, unit, vector))

    return sums_by_place(o.dot, four_floats(o.starts, o.lead(row, 2), 0), multiply)


def _sums_of_rows(o: FoldedOperands) -> list[Expr]:
    """As `_sums`, of every row; vector by vector, or LLVM holds a chunk's vectors for the next row.

    They do not fit the registers: 4 rows of 8-bit codes take N1 152 cycles instead of 93. Two rows
    of short chunks are better one after the other.
    """
    dot, lanes = o.dot, tirx.Ramp(0, 1, 4)
    sums = b.alloc_buffer((dot.m, 4), "int32", align=16)
    for i in range(dot.m):
        start = four_floats(o.starts, o.lead(i, 2), 0)
        b.buffer_store(sums, tirx.reinterpret("int32x4", start), [i, lanes])
    for part, place in enumerate(dot.fold.places):
        step = place - dot.fold.places[part - 1] if part else 0
        for i in range(dot.m if step > 0 else 0):
            width = tirx.Broadcast(tirx.const(step, "int32"), 4)
            b.buffer_store(sums, tirx.shift_left(sums.vload([i, 0], "int32x4"), width), [i, lanes])
        for unit in range(dot.units):
            for vector in dot.fold.members(part):
                codes = _codes(o, unit, vector)
                for i in range(dot.m):
                    total = _sdot(sums.vload([i, 0], "int32x4"), codes, _four_k(o, i, unit, vector))
                    b.buffer_store(sums, total, [i, lanes])
    return [sums.vload([i, 0], "int32x4") for i in range(dot.m)]


def _sums_of_whole(o: FoldedOperands) -> list[Expr]:
    """As `_sums`, of every row; unit by unit, because bytes are wanted at several places."""
    fold, lanes = o.dot.fold, tirx.Ramp(0, 1, 4)
    sums = b.alloc_buffer((o.dot.m, len(fold.places), 4), "int32", align=16)
    for i in range(o.dot.m):
        for part in range(len(fold.places)):
            start = tirx.Broadcast(tirx.const(0, "int32"), 4)
            if not part:
                start = tirx.reinterpret("int32x4", four_floats(o.starts, o.lead(i, 2), 0))
            b.buffer_store(sums, start, [i, part, lanes])
    for unit in range(o.dot.units):
        for vector in range(VECTORS):
            part, codes = fold.part(vector), _codes(o, unit, vector)
            for i in range(o.dot.m):
                total = sums.vload([i, part, 0], "int32x4")
                total = _sdot(total, codes, _four_k(o, i, unit, vector))
                b.buffer_store(sums, total, [i, part, lanes])
    results = []
    for i in range(o.dot.m):
        result = sums.vload([i, 0, 0], "int32x4")
        for part, (below, place) in enumerate(pairwise(fold.places), 1):
            width = tirx.Broadcast(tirx.const(place - below, "int32"), 4)
            result = tirx.shift_left(result, width) + sums.vload([i, part, 0], "int32x4")
        results.append(result)
    return results


def _sdot(total: Expr, codes: Expr, x: Expr) -> Expr:
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return tirx.call_llvm_pure_intrin("int32x4", name, total, codes, x)


def _codes(o: FoldedOperands, unit: int, vector: int) -> Expr:
    """int8 [16]: what stands for one vector of the unit, as the meaning has it."""
    fold = o.dot.fold
    if fold.unit.whole and fold.part(vector):
        bits = fold.unit.bits
        mask = ((1 << bits) - 1) << whole_place(bits, vector)
        byte = tirx.bitwise_and(_load(o, unit, vector % bits), repeated(mask))
        return tirx.reinterpret("int8x16", byte)
    if not fold.raw or fold.unit.whole:
        codes = unpacked(fold.unit, partial(_load, o, unit), vector, fold.doubled)
        return tirx.reinterpret("int8x16", codes)
    return raw_codes(fold, partial(_load, o, unit), vector)


def raw_codes(fold: Fold, load: Callable[[int], Expr], vector: int) -> Expr:
    """int8 [16]: a vector's part of its bytes with the parts below."""
    part, width = fold.part(vector), fold.width
    byte = load(vector % width)
    mask = (1 << width * (part + 1)) - 1
    if mask < 255:
        byte = tirx.bitwise_and(byte, repeated(mask))
    return tirx.reinterpret("int8x16", byte)


def _load(o: FoldedOperands, unit: int, index: int) -> Expr:
    lead = [unit] if o.dot.units > 1 else []
    return o.codes.vload([*lead, 16 * index], "uint8x16")


def _four_k(o: FoldedOperands, row: int, unit: int, vector: int) -> Expr:
    """int8 [16]: activations of k = 4 * vector .. + 3, which sdot takes by lane."""
    at = UNIT_K * unit + 16 * (vector // 4)
    sixteen = tirx.reinterpret("int32x4", o.x.vload([*o.lead(row), at], "int8x16"))
    lane = [tirx.const(vector % 4, "int32")] * 4
    return tirx.reinterpret("int8x16", tirx.Shuffle([sixteen], lane))


def _at(o: FoldedOperands, row: int) -> list[Expr]:
    zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")
    return [*o.lead(row), tirx.Ramp(zero, one, 4)]

"""Rows of floats become codes: int8 with one scale, of queries and of keys and values of caches, or
int4 in groups with a scale and a least each, of caches."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.attention import PACK
from apq_tvm.schedules.graph.attention.scratch import Scratch, across, slots
from apq_tvm.tensorize.exprs import MAGIC, Expr, Stmt, f32, i32, i64, splat

MOST = 127
"""The largest code; the least is its negative, so that products by sign fit an int16."""

TOP = 15
"""The largest code of int4; the least is 0."""

INFINITE = 0x7F800000
"""Pattern of infinity: those of larger numbers are no numbers."""

NO_NUMBER = 0x7FC0
"""A bfloat16 that is none."""

TINY = 1e-35
"""Rows whose largest element is less are 0: 127 over it would be no number."""


def padded(columns: int) -> int:
    """Columns of a row in scratch: whole vectors."""
    return -(-columns // PACK) * PACK


def coded_row(
    row: Any, at: Expr, codes: Any, to: Expr, columns: int
) -> tuple[list[Stmt], Expr, list[Expr]]:
    """Round one row.

    Parameters
    ----------
    row : tvm.tirx.Buffer
        float32; `columns`, whole vectors, from `at` on.
    codes : tvm.tirx.Buffer
        int8; gets them from `to` on. A row that has a NaN gets a scale that is one.
    columns : int

    Returns
    -------
    list of Stmt
    Expr
        The scale, ``max|row| / 127``.
    list of Expr
        The codes as int32, 16 at a time.
    """
    load, parts = Scratch.load, list[Stmt]()
    starts = range(0, columns, PACK)
    sizes: list[Expr] = []
    for begin in starts:
        value = load(row, at + i64(begin), PACK)
        bits = tirx.reinterpret(f"int32x{PACK}", value)
        sizes.append(tirx.bitwise_and(bits, splat(0x7FFFFFFF, "int32")))
    more, top = across(tirx.max, sizes)
    binds, (largest,) = slots([tirx.reinterpret("float32", top)], "largest")
    parts += [*more, *binds]
    inverse = tirx.Select(largest >= f32(TINY), f32(float(MOST)) / largest, f32(0.0))
    binds, (scale, inverse) = slots([largest * f32(1.0 / MOST), inverse], "scale")
    parts += binds
    found: list[Expr] = []
    for begin in starts:
        value = load(row, at + i64(begin), PACK) * tirx.Broadcast(inverse, PACK)
        value = value + splat(MAGIC, "float32")
        code = tirx.reinterpret(f"int32x{PACK}", value).astype(f"int8x{PACK}")
        code = tirx.max(code, splat(-MOST, "int8"))  # what a NaN rounds to
        binds, (code,) = slots([code], "code")
        parts += [*binds, Scratch.store(codes, to + i64(begin), code, PACK)]
        found.append(code.astype(f"int32x{PACK}"))
    return parts, scale, found


def coded_group(row: Any, codes: Any, begin: int, size: int) -> tuple[list[Stmt], Expr, Expr]:
    """Round a group of columns of one row to int4.

    Parameters
    ----------
    row : tvm.tirx.Buffer
        float32.
    codes : tvm.tirx.Buffer
        uint8; gets a code a byte. A group that has what is no finite number gets a scale that is
        none.
    begin, size : int
        Columns; 16 or 32.

    Returns
    -------
    list of Stmt
    Expr, Expr
        Scale and least, bfloat16 as uint16: not less than the float32, and not more.
    """
    load, parts = Scratch.load, list[Stmt]()
    places = [i64(at) for at in range(begin, begin + size, PACK)]
    binds, values = slots([load(row, at, PACK) for at in places], "value")
    parts += binds
    sizes = [
        tirx.bitwise_and(tirx.reinterpret(f"int32x{PACK}", v), splat(0x7FFFFFFF, "int32"))
        for v in values
    ]
    found = []
    for join, of in ((tirx.min, values), (tirx.max, values), (tirx.max, sizes)):
        binds, value = across(join, of)
        parts += binds
        found.append(value)
    lowest, highest, largest = found
    binds, (least,) = slots([_upper(tirx.reinterpret("int32", lowest), lowest < f32(0.0))], "least")
    more, (base,) = slots([from_upper(least)], "base")
    span = tirx.reinterpret("int32", (highest - base) * f32(1.0 / TOP))
    last, (scale,) = slots([_upper(span, True)], "scale")
    parts += [*binds, *more, *last]
    binds, (step,) = slots([from_upper(scale)], "step")
    inverse = tirx.Select(step >= f32(TINY), f32(1.0) / step, f32(0.0))
    more, (inverse,) = slots([inverse], "inverse")
    parts += [*binds, *more]
    for at, value in zip(places, values, strict=True):
        place = (value - tirx.Broadcast(base, PACK)) * tirx.Broadcast(inverse, PACK)
        place = tirx.min(tirx.max(place, splat(0.0, "float32")), splat(float(TOP), "float32"))
        binds, (place,) = slots([place], "place")
        code = tirx.reinterpret(f"int32x{PACK}", place + splat(MAGIC, "float32"))
        parts += [*binds, Scratch.store(codes, at, code.astype(f"uint8x{PACK}"), PACK)]
    fine = tirx.all(largest < i32(INFINITE), tirx.reinterpret("int32", step) < i32(INFINITE))
    return parts, tirx.Select(fine, scale, tirx.const(NO_NUMBER, "uint16")), least


def _upper(bits: Expr, away: Any) -> Expr:
    """The bfloat16 of a pattern: `away` from zero, or towards it."""
    raised = bits + i32(0xFFFF)
    whole = raised if away is True else tirx.Select(away, raised, bits)
    return tirx.shift_right(whole, i32(16)).astype("uint16")


def from_upper(halves: Expr) -> Expr:
    """Floats of bfloat16, given as uint16."""
    _, _, lanes = str(halves.ty).partition("x")
    kind = (lambda name: f"{name}x{lanes}") if lanes else str
    by = splat(16, "int32", int(lanes)) if lanes else i32(16)
    return tirx.reinterpret(kind("float32"), tirx.shift_left(halves.astype(kind("int32")), by))


def paired(codes: Any, begin: Expr, apart: int, lanes: int) -> Expr:
    """Codes of neighbouring columns, and in the upper halves of their bytes those `apart` on."""
    low, high = (Scratch.load(codes, at, lanes) for at in (begin, begin + i64(apart)))
    return tirx.bitwise_or(low, tirx.shift_left(high, splat(4, "uint8", lanes)))

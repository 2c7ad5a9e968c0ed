"""Rows of floats become int8 codes with one scale: of queries, and of keys and values of caches."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.ops.graph.attention import PACK
from apq_tvm.schedules.graph.attention.scratch import Scratch, across, slots
from apq_tvm.tensorize.exprs import MAGIC, Expr, Stmt, f32, i64, splat

MOST = 127
"""The largest code; the least is its negative, so that products by sign fit an int16."""

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

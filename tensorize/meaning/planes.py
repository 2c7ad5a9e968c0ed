"""The meaning of kernels on bitplanes: codes of eight rows, looked up in tables, times activations.

A *unit* is `k` bytes of each of b planes (`apq_tvm.codegen.layouts.planes`): bit r of byte k of
plane p is bit p, counted from the most significant one, of the code of row r, column k. TensorIR
cannot match an index that depends on data, so the meaning of a lookup is the sum over all entries c
of ``table[c] where code == c``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

Expr = Any  # tvm is untyped
Buffer = Any

ROWS = 8
"""Rows whose bits share a byte."""

QUAD = 4
"""Columns of a lane."""


@dataclass(frozen=True)
class PlanesUnit:
    """Shape of one step on bitplanes.

    Parameters
    ----------
    bits : int
        Planes read.
    tables : int
        Tables that the eight rows use: 1, 2, 4 or 8.
    k : int
        Columns.
    vector : int
        Bytes of a register. Sums have ``vector / 4`` lanes: lane l adds columns 4l .. 4l + 3 of
        every register.
    offset : int
        Added to every centroid: 128 where the instruction wants them unsigned.
    group : int
        Columns of activations that share a scale: sums are float32 then, and scales are an operand,
        one for every `QUAD` columns. 0 where they are int32, for scales that come later.
    """

    bits: int
    tables: int
    k: int
    vector: int
    offset: int
    group: int = 0

    @property
    def entries(self) -> int:
        """Centroids of a table."""
        return 1 << self.bits

    @property
    def lanes(self) -> int:
        """int32 lanes of a register."""
        return self.vector // 4

    @property
    def registers(self) -> int:
        """Registers of a plane: 1 also where the columns do not fill one."""
        return max(1, self.k // self.vector)

    @property
    def together(self) -> int:
        """Registers whose products are one sum of integers: of a group, or a part of it."""
        return gcd(self.registers, max(1, self.group // self.vector))

    @property
    def sums(self) -> str:
        """Type of a sum."""
        return "float32" if self.group else "int32"

    def table_of(self, row: Expr) -> Expr:
        """Which of the tables a row uses."""
        return table_of(row, self.tables)

    def __str__(self) -> str:
        return f"b{self.bits}t{self.tables}_{ROWS}x{self.k}{self.suffix}"

    @property
    def suffix(self) -> str:
        """The part of its name that all kinds of units have."""
        return f"v{self.vector}" + (f"g{self.group}" if self.group else "")


def table_of(row: Expr, tables: int) -> Expr:
    """Which of a row block's tables row 0..7 uses."""
    from tvm import tirx

    if tables == 1:
        return tirx.const(0, "int32")
    return row if tables == ROWS else row // (ROWS // tables)


def plane_code(load: Callable[[int], Expr], row: Expr, bits: int) -> Expr:
    """Code of `bits` bits of one row and column, as an int32 expression.

    Parameters
    ----------
    load : callable
        uint8 byte of a plane at that column.
    row : PrimExpr
        0..7.
    bits : int
    """
    from tvm import tirx

    code: Expr = None
    for p in range(bits):
        bit = tirx.shift_right(load(p).astype("int32"), row.astype("int32"))
        bit = tirx.bitwise_and(bit, tirx.const(1, "int32"))
        bit = tirx.shift_left(bit, tirx.const(bits - 1 - p, "int32"))
        code = bit if code is None else tirx.bitwise_or(code, bit)
    return code


def centroid_if(code: Expr, entry: Expr, centroid: Expr, offset: int) -> Expr:
    """``centroid + offset`` where `code` is `entry`, else 0, as an int32 expression."""
    from tvm import tirx

    value = centroid.astype("int32") + tirx.const(offset, "int32")
    return tirx.Select(code == entry.astype("int32"), value, tirx.const(0, "int32"))


def dot_axes(unit: PlanesUnit) -> tuple[str, tuple[int, ...]]:
    """Kinds and extents of a dot product's loops: row, lane, [register,] byte of lane, entry.

    A loop of extent 1 is left out: a tensorized block has none.
    """
    registers = (unit.registers,) if unit.registers > 1 else ()
    return "SSRR" + "R" * len(registers), (ROWS, unit.lanes, *registers, 4, unit.entries)


def table_axes(unit: PlanesUnit, rows: int) -> tuple[str, tuple[int, ...]]:
    """As `dot_axes`, of the rows of one table; the first is left out where that is one."""
    lead = (rows,) if rows > 1 else ()
    extents = (*lead, unit.lanes, unit.registers, 4, unit.entries)
    return "S" * (len(lead) + 1) + "RRR", extents


def column_of(unit: PlanesUnit, lane: Expr, inner: tuple[Expr, ...]) -> Expr:
    """Column of ``([register,] byte)`` of a lane."""
    *register, byte = inner
    column = lane * 4 + byte
    return register[0] * unit.vector + column if register else column


def scaled(term: Expr, scale: Expr | None) -> Expr:
    """An integer product, times the scale of its activation where that is not left for later."""
    return term if scale is None else term.astype("float32") * scale


def dot_body(
    unit: PlanesUnit,
    acc: Buffer,
    acc_at: tuple[Expr, ...],
    plane: Callable[[int, Expr], Expr],
    centroid: Callable[[Expr, Expr], Expr],
    x: Callable[[Expr], Expr],
    scale: Callable[[Expr], Expr | None],
    axes: tuple[Expr, ...],
) -> None:
    """Store ``acc += centroid[code] * x`` of one row, column and table entry (`dot_axes`)."""
    from tvm.tirx.script.builder import ir as b

    r, lane, *inner, entry = axes
    column = column_of(unit, lane, tuple(inner))
    code = plane_code(lambda p: plane(p, column), r, unit.bits)
    term = centroid_if(code, entry, centroid(unit.table_of(r), entry), unit.offset)
    term = term * x(column).astype("int32")
    term = _inside(unit, column, scaled(term, scale(column)))
    b.buffer_store(acc, acc[acc_at] + term, list(acc_at))


def _inside(unit: PlanesUnit, column: Expr, term: Expr) -> Expr:
    """`term`, 0 for columns past the unit's."""
    from tvm import tirx

    if unit.k >= unit.vector:
        return term
    return tirx.if_then_else(column < unit.k, term, tirx.const(0, unit.sums))


def rows_body(
    unit: PlanesUnit,
    acc: Buffer,
    at: tuple[Expr, ...],
    w: Expr,
    x: Expr,
    scale: Expr | None,
    column: Expr,
) -> None:
    """Store ``acc += w * x`` of one row, row of x and column."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    byte = w if unit.offset else tirx.reinterpret("int8", w)
    term = scaled(byte.astype("int32") * x.astype("int32"), scale)
    b.buffer_store(acc, acc[at] + _inside(unit, column, term), list(at))

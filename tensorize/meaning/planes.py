"""The meaning of kernels on bitplanes: codes of eight rows, looked up in tables, times activations.

A *step* is `k` bytes of each of b planes (`apq_tvm.codegen.layouts.planes`): bit r of byte k of
plane p is bit p, counted from the most significant one, of the code of row r, column k. TensorIR
cannot match an index that depends on data, so the meaning of a lookup is the sum over all entries c
of ``table[c] where code == c``.

Where cells of 5 bits are divided uniformly (`apq_tvm.formats.anyprec_cells`) wider codes have the
table of 5 bits and one operand more after it, ``halves`` uint8 [tables, 32]. A step of 6 bits has
weights of one digit, of 7 and 8 bits of two: 16 times the digit of 6 bits, and another byte.

Steps with groups of activations take one more operand before the sums, which are float32: the
scales of activations, float32 [.., k / 4].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand

ROWS = 8
"""Rows whose bits share a byte."""

QUAD = 4
"""Columns of a lane."""

CELL_BITS = 5
"""Bits of cells that are divided, and by which they are numbered."""

FINE_BITS = 4
"""A step of two digits has 2^FINE_BITS parts."""


@dataclass(frozen=True)
class PlanesStep:
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
    divided : bool
        Whether cells of 5 bits are divided; of more bits than those alone.
    strided : bool
        Whether lane l has the columns of the l-th group alone, one `QUAD` of them in each register:
        all registers then have the same scales, and their products are one sum of integers.
    """

    bits: int
    tables: int
    k: int
    vector: int
    offset: int
    group: int = 0
    divided: bool = False
    strided: bool = False

    @property
    def entries(self) -> int:
        """Centroids of a table."""
        return 1 << (CELL_BITS if self.divided else self.bits)

    @property
    def two_digits(self) -> bool:
        """Whether weights are two bytes."""
        return self.divided and self.bits > CELL_BITS + 1

    @property
    def digits(self) -> int:
        """Bytes of a weight."""
        return 2 if self.two_digits else 1

    @property
    def added(self) -> int:
        """What `offset` adds to a weight."""
        return self.offset * ((1 << FINE_BITS) + 1 if self.two_digits else 1)

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

    def __str__(self) -> str:
        return (
            f"{'c' if self.divided else 'b'}{self.bits}t{self.tables}_{ROWS}x{self.k}{self.suffix}"
        )

    @property
    def suffix(self) -> str:
        """The part of its name that all kinds of steps have."""
        group = f"g{self.group}{'s' if self.strided else ''}"
        return f"v{self.vector}" + (group if self.group else "")


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


def cell_value(centroid: Expr, half: Expr, code: Expr, bits: int, digit: int | None = None) -> Expr:
    """The weight of a code of 6 to 8 bits, or one of its digits, as an int32 expression.

    Parameters
    ----------
    centroid, half : PrimExpr
        int8 and uint8, of its cell.
    code : PrimExpr
        int32; of its bits those after the fifth matter.
    bits : int
    digit : int, optional
        0 for T, 1 for what is less than a step.
    """
    from tvm import tirx

    h, low = half.astype("int32"), bits - CELL_BITS

    def bit(place: int) -> Expr:
        return tirx.bitwise_and(tirx.shift_right(code, i32(place)), i32(1))

    def i32(value: int) -> Expr:
        return tirx.const(value, "int32")

    up = tirx.shift_right(h + i32(2), i32(2))
    down = tirx.shift_right(h + i32(1), i32(2))
    value = centroid.astype("int32") + tirx.Select(bit(low - 1) == i32(1), up, -down)
    if low == 1 or digit == 0:
        return value
    if low == 2:
        fine = h * (bit(0) * i32(4) - i32(2))
    else:
        fine = h * (bit(1) * i32(4) + bit(0) * i32(2) - i32(3))
    return fine if digit == 1 else value * i32(1 << FINE_BITS) + fine


def centroid_if(code: Expr, entry: Expr, centroid: Expr, offset: int) -> Expr:
    """``centroid + offset`` where `code` is `entry`, else 0, as an int32 expression."""
    from tvm import tirx

    value = centroid.astype("int32") + tirx.const(offset, "int32")
    return tirx.Select(code == entry.astype("int32"), value, tirx.const(0, "int32"))


def _planes(unit: PlanesStep) -> Operand:
    return Operand("planes", (unit.bits, 1, unit.k), "uint8", 32, True)


def _tables(unit: PlanesStep) -> Operand:
    return Operand("table", (unit.tables, unit.entries), "int8", min(unit.entries, 64), True)


def _halves(unit: PlanesStep) -> tuple[Operand, ...]:
    """The operand that divided cells have."""
    shape = (unit.tables, unit.entries)
    return (Operand("halves", shape, "uint8", 32, True),) if unit.divided else ()


def _weight(
    unit: PlanesStep, code: Expr, entry: Expr, row: Expr, *tables: Load, digit: int | None = None
) -> Expr:
    """What an entry of the table of a row gives a code, int32: its weight or a digit, or 0."""
    which = table_of(row, unit.tables)
    return _entry(unit, code, entry, *(table(which, entry) for table in tables), digit=digit)


def _entry(
    unit: PlanesStep, code: Expr, entry: Expr, *found: Expr, digit: int | None = None
) -> Expr:
    """The same of what the tables hold at that entry."""
    from tvm import tirx

    if not unit.divided:
        return centroid_if(code, entry, found[0], unit.offset)
    cell = tirx.shift_right(code, tirx.const(unit.bits - CELL_BITS, "int32"))
    value = cell_value(found[0], found[1], code, unit.bits, digit)
    value = value + tirx.const(unit.added if digit is None else unit.offset, "int32")
    return tirx.Select(cell == entry.astype("int32"), value, tirx.const(0, "int32"))


def _factors(unit: PlanesStep, m: int = 0) -> tuple[Operand, ...]:
    """The operands x and, with groups, its scales: one row, or `m`."""
    lead = (m,) if m else ()
    x = Operand("x", (*lead, unit.k), "int8", 4, m > 0)
    scales = Operand("scales", (*lead, unit.k // QUAD), "float32", 4, m > 0)
    return (x, scales) if unit.group else (x,)


def _meaning(
    name: str,
    operands: tuple[Operand, ...],
    spatial: tuple[int, ...],
    reduced: tuple[int, ...],
    term: Callable[..., Expr],
    adds: bool = True,
) -> Meaning:
    return Meaning(name, operands, spatial, reduced, term, adds, "int32")


def _column(unit: PlanesStep, lane: Expr, register: Expr, byte: Expr) -> Expr:
    return register * unit.vector + (lane * QUAD + byte)


def _product(
    unit: PlanesStep, weight: Expr, row: Expr, column: Expr, x: Load, *scales: Load
) -> Expr:
    """``weight * x`` times, with groups, the scale; 0 for columns past the step's."""
    from tvm import tirx

    term = weight * x(row, column).astype("int32")
    if scales:
        quad = column // QUAD % unit.lanes if unit.strided else column // QUAD
        term = term.astype("float32") * scales[0](row, quad)
    if unit.k >= unit.vector:
        return term
    return tirx.if_then_else(column < unit.k, term, tirx.const(0, unit.sums))


def planes_dot(unit: PlanesStep) -> Meaning:
    """Product of a step with one row of activations.

    Operands: planes uint8 [bits, 1, k], tables int8 [tables, 2^bits], [halves,] x int8 [k],
    [scales,] sums int32 [8, vector / 4].
    """
    count = 2 if unit.divided else 1

    def term(at: list[Expr], planes: Load, *loads: Load) -> Expr:
        row, lane, register, byte, entry = at
        column = _column(unit, lane, register, byte)
        code = plane_code(lambda p: planes(p, 0, column), row, unit.bits)
        weight = _weight(unit, code, entry, row, *loads[:count])
        return _product(unit, weight, 0, column, *loads[count:])

    sums = Operand("acc", (ROWS, unit.lanes), unit.sums, 64)
    operands = (_planes(unit), _tables(unit), *_halves(unit), *_factors(unit), sums)
    return _meaning("dot", operands, sums.shape, (unit.registers, QUAD, unit.entries), term)


def planes_lookup(unit: PlanesStep, digit: int = 0) -> Meaning:
    """Lookup of a step: planes, tables, [halves,] out uint8 [8, k], to which centroids are added.

    `digit` says which byte of weights that have two.
    """

    def term(at: list[Expr], planes: Load, *tables: Load) -> Expr:
        row, column, entry = at
        code = plane_code(lambda p: planes(p, 0, column), row, unit.bits)
        return _weight(unit, code, entry, row, *tables, digit=digit).astype("uint8")

    out = Operand("out", (ROWS, unit.k), "uint8", 32, True)
    operands = (_planes(unit), _tables(unit), *_halves(unit), out)
    return _meaning("lookup", operands, out.shape, (unit.entries,), term)


def planes_codes(unit: PlanesStep) -> Meaning:
    """Codes of a step: planes, out uint8 [8, k]."""

    def term(at: list[Expr], planes: Load) -> Expr:
        row, column = at
        return plane_code(lambda p: planes(p, 0, column), row, unit.bits).astype("uint8")

    out = Operand("out", (ROWS, unit.k), "uint8", 32, True)
    return _meaning("codes", (_planes(unit), out), out.shape, (), term, adds=False)


def table_dot(unit: PlanesStep, rows: int) -> Meaning:
    """Lookups of rows that share a table, times one row of activations.

    Operands: codes uint8 [rows, k], table int8 [2^bits], [halves uint8 [32],] x int8 [k], [scales,]
    sums int32 [rows, vector / 4]; there is no axis of one row.
    """
    count = 2 if unit.divided else 1

    def term(at: list[Expr], codes: Load, *loads: Load) -> Expr:
        row, lane, register, byte, entry = at
        column = _column(unit, lane, register, byte)
        code = codes(row, column).astype("int32")
        weight = _entry(unit, code, entry, *(load(entry) for load in loads[:count]))
        return _product(unit, weight, 0, column, *loads[count:])

    lead = (rows,) if rows > 1 else ()
    codes = Operand("codes", (*lead, unit.k), "uint8", 32, rows > 1)
    table = Operand("table", (unit.entries,), "int8", min(unit.entries, 64))
    sums = Operand("acc", (*lead, unit.lanes), unit.sums, 16)
    reduced = (unit.registers, QUAD, unit.entries)
    halves = (Operand("halves", (unit.entries,), "uint8", 32),) if unit.divided else ()
    operands = (codes, table, *halves, *_factors(unit), sums)
    return _meaning("table_dot", operands, (rows, unit.lanes), reduced, term)


def rows_dot(unit: PlanesStep, m: int, rows: int) -> Meaning:
    """Rows of looked up bytes times rows of activations.

    Operands: w uint8 [rows, k] (signed bytes where there is no offset), x int8 [m, k], [scales,]
    sums int32 [m, rows, vector / 4].
    """

    def term(at: list[Expr], w: Load, *x: Load) -> Expr:
        from tvm import tirx

        i, row, lane, register, byte = at
        column = _column(unit, lane, register, byte)
        weight = w(row, column)
        weight = weight if unit.offset else tirx.reinterpret("int8", weight)
        return _product(unit, weight.astype("int32"), i, column, *x)

    w = Operand("w", (rows, unit.k), "uint8", 32, True)
    sums = Operand("acc", (m, rows, unit.lanes), unit.sums, 64)
    operands = (w, *_factors(unit, m), sums)
    return _meaning("rows_dot", operands, sums.shape, (unit.registers, QUAD), term)

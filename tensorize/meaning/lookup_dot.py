"""Dot products of one unit of packed codes that stand for values in a table: the meaning.

``acc[p, i, r] += Σ_k table[code[r, k] + (book[p, r] << bits)] x[i, k]`` over the k of group p of a
unit, for rows i of x and rows r of the weights; `book` is left out where there is one codebook.
TVM cannot match an index that depends on data, so the plain loops run over the table too and take
the entry that is meant. Axes of extent 1 are left out, as in `apq_tvm.tensorize.pairs.unit_dot`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.tensorize.meaning.product import Index, Meaning, Operand, View, Views

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class LookupDot(Meaning):
    """Shape of one dot product of a unit.

    Parameters
    ----------
    unit : Unit
    entries : int
        Of the table.
    m : int
        Rows of x.
    """

    unit: Unit
    entries: int
    m: int

    @property
    def books(self) -> int:
        """Codebooks in the table."""
        return self.entries >> self.unit.bits

    @property
    def groups(self) -> tuple[int, ...]:
        """The axis of groups, left out where a unit is one."""
        return (self.unit.groups,) if self.unit.groups > 1 else ()

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        return (*self.groups, *((self.m,) if self.m > 1 else ()), self.unit.rows)

    @property
    def book_shape(self) -> tuple[int, ...]:
        """Shape of `book`."""
        return (*self.groups, self.unit.rows)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """``codes``, ``x`` [m, 32], ``table``, ``book`` if there are several, ``acc`` int32."""
        codes, *rest = self.weights
        x = Operand("x", (*((self.m,) if self.m > 1 else ()), UNIT_K), "int8", 4, self.m > 1)
        return codes, x, *rest, Operand("acc", self.spatial, "int32", self.unit.vector_bytes)

    @property
    def weights(self) -> tuple[Operand, ...]:
        """Operands of the weights."""
        unit = self.unit
        codes = Operand("codes", (unit.nbytes,), "uint8", unit.vector_bytes)
        table = Operand("table", (self.entries,), "uint8", 16)
        book = Operand("book", self.book_shape, "uint8", unit.rows)
        return (codes, table, book) if self.books > 1 else (codes, table)

    @property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """[group, row of x,] row; vector of a group, byte of four, entry of the table."""
        return self.spatial, (self.unit.vectors, 4, self.entries)

    def term(self, views: Views, at: Index, inner: Index) -> tuple[list[Any], Expr]:
        """An entry times x where it is meant, else 0."""
        unit, (j, c, entry) = self.unit, inner
        group, lead = at[: len(self.groups)], at[len(self.groups) : -1]
        vector = group[0] * i64(unit.vectors) + j if group else j
        x, table = views["x"], views["table"]
        value = table[entry].astype("int32") * x[(*lead, vector * i64(4) + c)].astype("int32")
        book = views["book"][(*group, at[-1])] if self.books > 1 else None
        where = (vector, at[-1] * i64(4) + c, entry)
        reads = [views["codes"][0 : unit.nbytes], x[(*lead, slice(0, UNIT_K))], table[entry]]
        term = self.choose(views["codes"], book, value, where)
        return reads + ([] if book is None else [book]), term

    def choose(self, codes: View, book: Expr | None, value: Expr, at: Index) -> Expr:
        """`value` if the weight's code means the table's entry, else 0.

        Parameters
        ----------
        codes : View
            Of the unit.
        book : PrimExpr or None
            uint8, of the weight's group and row.
        value : PrimExpr
            Of that entry.
        at : tuple of PrimExpr
            Vector of the unit, byte of the vector, entry of the table.
        """
        from tvm import tirx

        vector, lane, entry = at
        code = decode(self.unit, lambda byte: codes[byte], vector, lane)
        if book is not None:
            bits = tirx.const(self.unit.bits, "int32")
            code = code + tirx.shift_left(book.astype("int32"), bits)
        return tirx.Select(code == entry.astype("int32"), value, tirx.const(0, str(value.ty)))


@dataclass(frozen=True)
class LookupValues(Meaning):
    """A unit's values: ``acc[v, r, c] += table[...]``, uint8 [8, R, 4] that were 0."""

    dot: LookupDot

    index = "int32"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """``codes``, ``table``, ``book`` if there are several, ``acc``."""
        unit = self.dot.unit
        return *self.dot.weights, Operand("acc", (8, unit.rows, 4), "uint8", unit.vector_bytes)

    @property
    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Vector, row, byte of four; entry of the table."""
        return (8, self.dot.unit.rows, 4), (self.dot.entries,)

    def term(self, views: Views, at: Index, inner: Index) -> tuple[list[Any], Expr]:
        """An entry where it is meant, else 0."""
        dot, unit, (v, r, c) = self.dot, self.dot.unit, at
        group = (v // unit.vectors,) if dot.groups else ()
        value = views["table"][inner[0]]
        book = views["book"][(*group, r)] if dot.books > 1 else None
        term = dot.choose(views["codes"], book, value, (v, r * 4 + c, inner[0]))
        reads = [views["codes"][0 : unit.nbytes], value]
        return reads + ([] if book is None else [book]), term


@dataclass(frozen=True)
class LookupOperands:
    """Buffers of one pair member; of `LookupValues` ``x`` is None."""

    dot: LookupDot
    codes: Buffer
    table: Buffer
    acc: Buffer
    x: Buffer = None
    book: Buffer | None = None

    def sums_at(self, group: int, row: int) -> list[Expr]:
        """Index of all lanes of one group and row of x."""
        from tvm import tirx

        unit = self.dot.unit
        lead = ([i64(group)] if unit.groups > 1 else []) + ([i64(row)] if self.dot.m > 1 else [])
        return [*lead, tirx.Ramp(i64(0), i64(1), unit.rows)]

    def x_at(self, row: int, k: int) -> list[Expr]:
        """Index of one activation."""
        return [i64(row), i64(k)] if self.dot.m > 1 else [i64(k)]

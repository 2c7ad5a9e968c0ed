"""The meaning of every dot product of one unit of packed codes with activations.

``acc[p, i, r] += Σ_k term(code[r, k], x[i, k])`` over the k of group p, for rows i of x and rows r
of the weights. The group axis is left out where a unit is one group, the row axis where there is
one row: a tensorized block has no axes of extent 1.

Codes may stand for values in a table, ``term = table[code + (book[p, r] << bits)] x``; `book` is
left out where there is one codebook. TVM cannot match an index that depends on data, so the plain
loops run over the table too and take the entry that is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, centred_code, decode
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand

_SHORT = {"int8": "s8", "uint8": "u8", "float32": "f32", "int32": "s32"}
"""Types in names."""


@dataclass(frozen=True)
class UnitDot:
    """One dot product of a unit.

    Parameters
    ----------
    unit : Unit
    m : int
        Rows of x.
    x_dtype : {"int8", "uint8", "float32"}
        With integers the sums are int32 and of codes, with float32 of what codes stand for.
        Unsigned ones lie in int8.
    offset : int
        Taken off the codes; of integers alone.
    zeros : bool
        True if there is an operand of zero points, uint8 [R] or [2, R]; of float32 alone.
    """

    unit: Unit
    m: int
    x_dtype: str
    offset: int = 0
    zeros: bool = False

    @property
    def acc_dtype(self) -> str:
        """Type of the sums."""
        return "float32" if self.x_dtype == "float32" else "int32"

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        groups = (self.unit.groups,) if self.unit.groups > 1 else ()
        return (*groups, *((self.m,) if self.m > 1 else ()), self.unit.rows)

    def __str__(self) -> str:
        unit = self.unit
        code = f"{'s' if self.offset else 'u'}{unit.bits}{'z' if self.zeros else ''}"
        name = f"{self.m}x{unit.rows}x{UNIT_K}_{_SHORT[self.x_dtype]}{code}{_SHORT[self.acc_dtype]}"
        return name + ("_t" if unit.whole else "") + ("_g16" if unit.groups == 2 else "")

    @property
    def meaning(self) -> Meaning:
        """Operands codes uint8 [bytes], x [m, 32] or [32], zeros if there are any, and the sums."""
        unit, rows = self.unit, (self.m,) if self.m > 1 else ()
        groups = self.spatial[: unit.groups > 1]
        x_dtype = "int8" if self.x_dtype == "uint8" else self.x_dtype
        zeros = Operand("zeros", (*groups, unit.rows), "uint8", unit.rows)
        operands = (
            Operand("codes", (unit.nbytes,), "uint8", unit.vector_bytes),
            Operand("x", (*rows, UNIT_K), x_dtype, 4, strided=self.m > 1),
            *((zeros,) if self.zeros else ()),
            Operand("acc", self.spatial, self.acc_dtype, unit.vector_bytes),
        )
        return Meaning("dot", operands, self.spatial, (unit.vectors, 4), self._term)

    def _term(self, axes: Sequence[Expr], codes: Load, x: Load, *zeros: Load) -> Expr:
        from tvm import tirx

        *lead, r, j, c = axes
        group, row = lead[: self.unit.groups > 1], lead[self.unit.groups > 1 :]
        if group:
            j = group[0] * i64(self.unit.vectors) + j
        code = decode(self.unit, codes, j, r * i64(4) + c)
        value = x(*row, (j * i64(4), c))
        if self.x_dtype == "float32":
            return centred_code(self.unit, code, zeros[0](*group, r) if zeros else None) * value
        if self.x_dtype == "uint8":
            value = tirx.reinterpret("uint8", value)
        centred = code - tirx.const(self.offset, "int32") if self.offset else code
        return centred * value.astype("int32")


@dataclass(frozen=True)
class LookupDot:
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
    def meaning(self) -> Meaning:
        """Operands ``codes``, ``x`` [m, 32], ``table``, ``book`` if there are several, ``acc``."""
        codes, *rest = self._weights
        rows = (self.m,) if self.m > 1 else ()
        x = Operand("x", (*rows, UNIT_K), "int8", 4, strided=self.m > 1)
        acc = Operand("acc", self.spatial, "int32", self.unit.vector_bytes)
        reduced = (self.unit.vectors, 4, self.entries)
        return Meaning("dot", (codes, x, *rest, acc), self.spatial, reduced, self._product)

    @property
    def values(self) -> Meaning:
        """A unit's values: ``acc[v, r, c] += table[...]``, uint8 [8, R, 4] that were 0."""
        unit = self.unit
        acc = Operand("acc", (8, unit.rows, 4), "uint8", unit.vector_bytes)
        operands, reduced = (*self._weights, acc), (self.entries,)
        return Meaning("lookup", operands, acc.shape, reduced, self._value, index="int32")

    @property
    def _weights(self) -> tuple[Operand, ...]:
        unit = self.unit
        codes = Operand("codes", (unit.nbytes,), "uint8", unit.vector_bytes)
        table = Operand("table", (self.entries,), "uint8", 16)
        book = Operand("book", self.book_shape, "uint8", unit.rows)
        return (codes, table, book) if self.books > 1 else (codes, table)

    def _product(
        self, axes: Sequence[Expr], codes: Load, x: Load, table: Load, *book: Load
    ) -> Expr:
        """An entry times x where it is meant, else 0."""
        *at, j, c, entry = axes
        group, lead = at[: len(self.groups)], at[len(self.groups) : -1]
        vector = group[0] * i64(self.unit.vectors) + j if group else j
        value = table(entry).astype("int32") * x(*lead, vector * i64(4) + c).astype("int32")
        mine = book[0](*group, at[-1]) if book else None
        return self._choose(codes, mine, value, (vector, at[-1] * i64(4) + c, entry))

    def _value(self, axes: Sequence[Expr], codes: Load, table: Load, *book: Load) -> Expr:
        """An entry where it is meant, else 0."""
        v, r, c, entry = axes
        group = (v // self.unit.vectors,) if self.groups else ()
        mine = book[0](*group, r) if book else None
        return self._choose(codes, mine, table(entry), (v, r * 4 + c, entry))

    def _choose(
        self, codes: Load, book: Expr | None, value: Expr, at: tuple[Expr, Expr, Expr]
    ) -> Expr:
        """`value` if the weight's code means the table's entry, else 0.

        `book` is uint8, of the weight's group and row; `at` vector of the unit, byte of the vector,
        entry of the table.
        """
        from tvm import tirx

        vector, lane, entry = at
        code = decode(self.unit, codes, vector, lane)
        if book is not None:
            bits = tirx.const(self.unit.bits, "int32")
            code = code + tirx.shift_left(book.astype("int32"), bits)
        return tirx.Select(code == entry.astype("int32"), value, tirx.const(0, str(value.ty)))

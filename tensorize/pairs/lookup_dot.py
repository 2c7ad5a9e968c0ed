"""Dot products of one unit of packed codes that stand for values in a table: the meaning.

``acc[p, i, r] += Σ_k table[code[r, k] + (book[p, r] << bits)] x[i, k]`` over the k of group p of a
unit, for rows i of x and rows r of the weights; `book` is left out where there is one codebook.
TVM cannot match an index that depends on data, so the plain loops run over the table too and take
the entry that is meant. Axes of extent 1 are left out, as in `apq_tvm.tensorize.pairs.unit_dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, operand, whole
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode

Expr = Any  # tvm is untyped
Buffer = Any
Body = Callable[["LookupOperands"], None]


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
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        groups = (self.unit.groups,) if self.unit.groups > 1 else ()
        return (*groups, *((self.m,) if self.m > 1 else ()), self.unit.rows)

    @property
    def book_shape(self) -> tuple[int, ...]:
        """Shape of `book`."""
        groups = (self.unit.groups,) if self.unit.groups > 1 else ()
        return (*groups, self.unit.rows)

    def choose(
        self, load: Callable[[Expr], Expr], book: Expr | None, value: Expr, at: tuple[Expr, ...]
    ) -> Expr:
        """`value` if the weight's code means the table's entry, else 0.

        Parameters
        ----------
        load : callable
            Byte of the unit by its index.
        book : PrimExpr or None
            uint8, of the weight's group and row.
        value : PrimExpr
            Of that entry.
        at : tuple of PrimExpr
            Vector of the unit, byte of the vector, entry of the table.
        """
        from tvm import tirx

        vector, lane, entry = at
        code = decode(self.unit, load, vector, lane)
        if book is not None:
            bits = tirx.const(self.unit.bits, "int32")
            code = code + tirx.shift_left(book.astype("int32"), bits)
        return tirx.Select(code == entry.astype("int32"), value, tirx.const(0, str(value.ty)))


@dataclass(frozen=True)
class LookupOperands:
    """Buffers of one pair member: codes uint8 [bytes], table, book, x int8, sums int32."""

    dot: LookupDot
    codes: Buffer
    x: Buffer
    table: Buffer
    book: Buffer | None
    acc: Buffer

    def sums_at(self, group: int, row: int) -> list[Expr]:
        """Index of all lanes of one group and row of x."""
        from tvm import tirx

        unit = self.dot.unit
        lead = ([i64(group)] if unit.groups > 1 else []) + ([i64(row)] if self.dot.m > 1 else [])
        return [*lead, tirx.Ramp(i64(0), i64(1), unit.rows)]

    def x_at(self, row: int, k: int) -> list[Expr]:
        """Index of one activation."""
        return [i64(row), i64(k)] if self.dot.m > 1 else [i64(k)]


def make_decode_pair(dot: LookupDot, implement: Body) -> tuple[Any, Any]:
    """(desc, impl) of looking a unit's values up: ``values[v, r, c] += table[...]``, uint8.

    Operands are (codes, table, [book,] values uint8 [8, R, 4]); ``x`` of `LookupOperands` is None
    and `acc` the values.
    """
    return _decode_member(dot, _plain_decode), _decode_member(dot, implement)


def make_lookup_pair(dot: LookupDot, implement: Body) -> tuple[Any, Any]:
    """(desc, impl) of a unit's dot product."""
    return _member(dot, _plain_loops), _member(dot, implement)


def _member(dot: LookupDot, body: Body) -> Any:
    """PrimFunc (codes, x, table, [book,] acc) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    unit = dot.unit

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("lookup_dot")
        codes = operand("codes", (unit.nbytes,), "uint8", unit.vector_bytes, None)
        row_stride = ["row_stride", i64(1)] if dot.m > 1 else None
        x_shape = (dot.m, UNIT_K) if dot.m > 1 else (UNIT_K,)
        x = operand("x", x_shape, "int8", 4, row_stride)
        table = operand("table", (dot.entries,), "uint8", 16, None)
        book = None
        if dot.books > 1:
            book = operand("book", dot.book_shape, "uint8", unit.rows, None)
        acc = operand("acc", dot.spatial, "int32", unit.vector_bytes, None)
        with b.sblock("root"):
            inputs = [codes, x, table, *([] if book is None else [book])]
            b.reads(*(whole(buffer) for buffer in (acc, *inputs)))
            b.writes(whole(acc))
            body(LookupOperands(dot, codes, x, table, book, acc))
    return builder.get()


def _plain_loops(o: LookupOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    dot, unit = o.dot, o.dot.unit
    extents = [i64(e) for e in (*dot.spatial, unit.vectors, 4, dot.entries)]
    with b.grid(*extents) as loops, b.sblock("dot"):
        axes = b.axis.remap("S" * len(dot.spatial) + "RRR", loops)
        at, (j, c, entry) = tuple(axes[:-3]), axes[-3:]
        group, r = at[0] if unit.groups > 1 else None, at[-1]
        lead = (at[-2],) if dot.m > 1 else ()
        vector = j if group is None else group * i64(unit.vectors) + j
        book_at = (r,) if group is None else (group, r)
        b.reads(
            o.acc[at],
            o.codes[0 : unit.nbytes],
            o.x[(*lead, slice(0, UNIT_K))],
            o.table[entry],
            *([] if o.book is None else [o.book[book_at]]),
        )
        b.writes(o.acc[at])
        book = None if o.book is None else o.book[book_at]
        x = o.x[(*lead, vector * i64(4) + c)].astype("int32")
        value = o.table[entry].astype("int32") * x
        where = (vector, r * i64(4) + c, entry)
        term = dot.choose(lambda byte: o.codes[byte], book, value, where)
        b.buffer_store(o.acc, o.acc[at] + term, list(at))


def _decode_member(dot: LookupDot, body: Body) -> Any:
    """PrimFunc (codes, table, [book,] values) whose block holds `body`."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    unit = dot.unit

    def operand(name: str, shape: tuple[int, ...], align: int) -> Buffer:
        handle = b.arg(name, b.handle())
        return b.match_buffer(handle, shape, "uint8", offset_factor=1, align=align)

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("lookup")
        codes = operand("codes", (unit.nbytes,), unit.vector_bytes)
        table = operand("table", (dot.entries,), 16)
        book = operand("book", dot.book_shape, unit.rows) if dot.books > 1 else None
        values = operand("values", (8, unit.rows, 4), unit.vector_bytes)
        with b.sblock("root"):
            inputs = [codes, table, *([] if book is None else [book])]
            b.reads(*(whole(buffer) for buffer in (values, *inputs)))
            b.writes(whole(values))
            body(LookupOperands(dot, codes, None, table, book, values))
    return builder.get()


def _plain_decode(o: LookupOperands) -> None:
    from tvm.tirx.script.builder import ir as b

    dot, unit = o.dot, o.dot.unit
    with b.grid(8, unit.rows, 4, dot.entries) as loops, b.sblock("lookup"):
        v, r, c, entry = b.axis.remap("SSSR", loops)
        at, book = (v, r, c), None
        if o.book is not None:
            book = o.book[v // unit.vectors, r] if unit.groups > 1 else o.book[r]
        b.reads(
            o.acc[at], o.codes[0 : unit.nbytes], o.table[entry], *([] if book is None else [book])
        )
        b.writes(o.acc[at])
        where = (v, r * 4 + c, entry)
        term = dot.choose(lambda byte: o.codes[byte], book, o.table[entry], where)
        b.buffer_store(o.acc, o.acc[at] + term, list(at))

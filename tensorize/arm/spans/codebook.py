"""Dot products of interleaved codes with any number of codebooks on Arm: a span of 4 rows.

The index of an entry is a code with its group's book above it, put there by ``sli``, which needs no
mask: one instruction for a code that is low in its byte, two for others. ``tbl`` looks up as many
registers as the codebooks fill. It takes four at most (three uops, where one or two registers are
one): where 64 entries do not hold all codebooks, it gets those of the four rows of a group, which
are loaded by their number, and the row takes the place of the book in the index.

Scales are those of `spans.codebook_quads`, without SVE. A *bunch* is four groups,
whose small values make up whole words.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import (
    BYTES,
    Dot,
    as_float,
    inserted_left,
    kept,
    masked,
    shifted,
    table_lookup,
)
from apq_tvm.tensorize.arm.spans.span import (
    Totals,
    fma,
    instruction_name,
    load_low,
    start_of,
    sub_float,
    sub_nibbles,
    tables_of,
    unsigned,
    vector_constant,
    x_of,
)
from apq_tvm.tensorize.exprs import Expr, splat
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, VECTORS
from apq_tvm.tensorize.meaning.spans.kinds import BookUnitsDot
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, SpanOperands, span_pair
from apq_tvm.tensorize.registry import register

BUNCH = 4
"""Groups of a bunch."""

LONGEST = 64
"""Entries of the longest table of one ``tbl``."""


def book_units_intrinsic(dot: BookUnitsDot, fused: bool) -> str:
    """Register (once) and name the dot product of a span.

    Parameters
    ----------
    dot : BookUnitsDot
    fused : bool
        Whether there is ``sdot``.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` and `extra` are as for `books_intrinsic` without
        SVE.
    """
    name = f"apq_{instruction_name(fused, False)}_{dot.m}x{ROWS}x{dot.k}"
    name += f"_s8lut{dot.bits}b{dot.books}g{dot.group}f32"

    def implement(o: SpanOperands) -> None:
        tables = tables_of(o, _registers(dot.entries)) if dot.entries <= LONGEST else None
        totals = Totals(o)
        bunches, rest = divmod(dot.groups, BUNCH)
        if bunches:
            # A loop, and not unrolled: over a whole span LLVM would let registers spill.
            with b.serial(0, tirx.const(bunches, "int64")) as bunch:
                _Bunch(o, fused, tables, bunch, BUNCH).add_to(totals)
        if rest:
            _Bunch(o, fused, tables, tirx.const(bunches, "int64"), rest).add_to(totals)
        totals.finish()

    return register(name, lambda: span_pair(dot, implement))


def _registers(entries: int) -> list[list[int]]:
    return [list(range(first, first + BYTES)) for first in range(0, entries, BYTES)]


class _Bunch:
    """Some groups: their small values, and their products.

    Parameters
    ----------
    tables : sequence of PrimExpr or None
        All codebooks; None if those of each group are to be loaded.
    bunch : PrimExpr
        Its number.
    count : int
        Groups of it, up to four.
    """

    def __init__(
        self,
        o: SpanOperands,
        fused: bool,
        tables: Sequence[Expr] | None,
        bunch: Expr,
        count: int,
    ) -> None:
        assert isinstance(o.dot, BookUnitsDot)
        self._o, self._dot, self._fused, self._all = o, o.dot, fused, tables
        self._first, self._count = bunch * BUNCH, count
        self._subs = sub_nibbles(self._small("subs", 4))
        if tables is not None:
            self._books = self._spread()

    def _small(self, name: str, width: int) -> Expr:
        """uint8 [8]: the bytes with the groups' values, then zeros."""
        per_byte = 8 // width
        buffer, at = self._o.arrays[name], [self._first // per_byte, 0]
        if self._count > per_byte:
            return buffer.vload(at, "uint8x8")
        return _joined(buffer.vload(at, "uint8x4"), None, 4)

    def add_to(self, totals: Totals) -> None:
        """Add every group's products with its scales."""
        o, dot = self._o, self._dot
        for g in range(self._count):
            group = self._first + g
            dots = [Dot(self._fused, dot.offset, start_of(o, i, group)) for i in range(dot.m)]
            tables, book = self._tables(g)
            for vector in range(dot.group // 4):
                index = inserted_left(self._codes(g, vector), book, dot.bits)
                values = table_lookup(tables, index)
                k = group * dot.group + vector // 4 * 16
                for row, each in enumerate(dots):
                    each.add(values, x_of(o, row, k), vector % 4)
            sub = sub_float(self._subs[g % 2], g // 2)
            for row, each in enumerate(dots):
                xs = tirx.Broadcast(o.xs[tuple(o.at(row, group))], ROWS)
                factor = fma(sub, xs, o.extra.vload(o.at(row, group, 4), "float32x4"))
                totals.add(row, as_float(each.total()), factor)

    def _codes(self, g: int, vector: int) -> Expr:
        """uint8 [16]: codes of 4 rows and 4 k in the low bits, anything above them."""
        unit = self._dot.codes_unit
        units, vector = divmod(g * (self._dot.group // 4) + vector, VECTORS)
        at = self._first * self._dot.group // UNIT_K + units
        found = None
        for width, shift in unit.fields:
            raw = self._o.arrays["codes"].vload([at, 16 * (shift + vector % width)], "uint8x16")
            part = shifted(raw, -(vector // width * width))
            found = part if found is None else inserted_left(found, part, shift)
        return found

    def _tables(self, g: int) -> tuple[Sequence[Expr], Expr]:
        """Registers of the lookups of a group, and uint8 [16]: what goes above its codes."""
        rows = [i // 4 for i in range(BYTES)]
        if self._all is None:
            return self._loaded(g), vector_constant(rows)
        width = self._dot.book_bits
        per_byte = 8 // width
        book = shifted(self._books[g // per_byte], -(g % per_byte * width))
        if g % per_byte + 1 < per_byte:
            book = masked(book, (1 << width) - 1)
        return self._all, book

    def _spread(self) -> list[Expr]:
        """uint8 [16] each: a row's byte of books four times; of the first groups, of the others."""
        dot = self._dot
        buffer, at = self._o.arrays["index"], [self._first * dot.book_bits // 8, 0]
        words = -(-self._count * dot.book_bits // 8)
        packed = load_low(buffer, at, "float64" if words > 1 else "float32")
        orders = [[word * ROWS + i // 4 for i in range(BYTES)] for word in range(words)]
        found = [table_lookup([packed], vector_constant(order)) for order in orders]
        return [kept(unsigned(each)) for each in found]

    def _loaded(self, g: int) -> list[Expr]:
        """int8 [16] each: the codebooks of the four rows."""
        o, dot = self._o, self._dot
        size = 1 << dot.bits
        books = []
        for r in range(ROWS):
            byte = o.arrays["index"][(self._first + g) // 2, r].astype("int32")
            book = tirx.bitwise_and(tirx.shift_right(byte, tirx.const(g % 2 * 4, "int32")), 15)
            books.append(o.arrays["table"].vload([book * size], f"uint8x{size}"))
        if size < BYTES:
            books = [_joined(books[i], books[i + 1], size) for i in (0, 2)]
        raised = splat(dot.offset, "int8")
        return [tirx.reinterpret("int8x16", book) - raised for book in books]


def _joined(low: Expr, high: Expr | None, lanes: int) -> Expr:
    """uint8: two vectors of so many bytes, one after the other; None is zeros."""
    high = splat(0, "uint8", lanes) if high is None else high
    return tirx.Shuffle([low, high], [tirx.const(i, "int32") for i in range(2 * lanes)])

"""Dot products with weights of four codebooks on Arm: a span of 4 rows, and its scales.

As in `spans.nonlinear`, by ``tbl`` and ``sdot``, with scales of every 16 weights:

- sums start at `MAGIC`, which is in `extra`, so that a subtraction makes them floats;
- a sub-scale becomes a float that ``fmla`` multiplies (`spans.span`). There xs is
  `BooksScaling.acts` times the activations' scale, and its product with -2^-97 is in `extra`;
- with SVE a sub-scale is put into an int32 by ``tbl``, and ``mla`` adds its product with the sum of
  a group, which begins at 0 there, to `MAGIC`: below 15 * 16 * 127 * 64 < 2^21.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import (
    BYTES,
    Dot,
    as_float,
    inserted_left,
    kept,
    lane,
    long_lookup,
    masked,
    merged,
    shifted,
    table_lookup,
)
from apq_tvm.tensorize.arm.spans.quads import books_of
from apq_tvm.tensorize.arm.spans.span import (
    Order,
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
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.codebook_quads import BookDot
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, SpanOperands, span_pair
from apq_tvm.tensorize.registry import register

_NOWHERE = 128
"""Where no vector has a byte, nor after all steps from quad to quad."""


@dataclass(frozen=True)
class BooksScaling:
    """What scales of activations are multiplied by for `books_intrinsic`.

    Parameters
    ----------
    acts : float
        In `xs`.
    unit : float
        `SpanDot.unit`.
    factor : float
        In `extra`.
    """

    acts: float
    unit: float
    factor: float


def books_scaling(sve: bool) -> BooksScaling:
    """With SVE `extra` has the zeros that sums of a group begin at."""
    return BooksScaling(1.0, 1.0, 0.0) if sve else BooksScaling(2.0**64, 2.0**-104, -(2.0**-97))


def books_intrinsic(dot: BookDot, fused: bool, sve: bool, longer: bool = False) -> str:
    """Register (once) and name the dot product of a span of quads with four codebooks.

    Parameters
    ----------
    dot : BookDot
    fused, sve : bool
        As in `units_intrinsic`.
    longer : bool
        Whether vectors of SVE may have more than 16 bytes. How long they are, a program knows only
        when it runs: there are two versions then.

    Returns
    -------
    str
        The intrinsic's name. Its `xs` and `extra` are scaled by `books_scaling`; `extra` is per
        group `MAGIC` four times and four times the scaled scale.
    """
    longer = longer and dot.bits == 3
    name = f"apq_{instruction_name(fused, sve)}{'_long' if longer else ''}"
    name += f"_{dot.m}x{ROWS}x{dot.k}_s8lut{dot.bits}b4f32"

    def implement(o: SpanOperands) -> None:
        if not longer:
            lookups = _Lookups2(o, sve) if dot.bits == 2 else _Lookups3(o, sve)
            _add_quads(o, dot, fused, sve, lookups)
            return
        with b.If(tirx.vscale() >= tirx.const(2, "int32")):
            with b.Then():
                _add_quads(o, dot, fused, sve, _Lookups3(o, sve, long_lookup))
            with b.Else():
                _add_quads(o, dot, fused, sve, _Lookups3(o, sve))

    return register(name, lambda: span_pair(dot, implement))


def _add_quads(
    o: SpanOperands, dot: BookDot, fused: bool, sve: bool, lookups: _Lookups2 | _Lookups3
) -> None:
    """The products of a span."""
    totals = Totals(o)
    subs = _WholeSubs(o) if sve else _FloatSubs(o)
    # A loop, and not unrolled: over a whole span LLVM would let registers spill.
    with b.serial(0, tirx.const(dot.quads, "int64")) as loop:
        quad = loop if dot.quads > 1 else tirx.const(0, "int64")
        lookups.enter(quad)
        subs.enter(quad)
        for group in lookups.order:
            dots = [Dot(fused, dot.offset, subs.start(i, quad * 4 + group)) for i in range(dot.m)]
            for i in range(4):
                values = lookups.values(quad, group, i)
                for row, each in enumerate(dots):
                    each.add(values, x_of(o, row, quad * 64 + 16 * group), i)
            subs.choose(group)
            for row, each in enumerate(dots):
                totals.add(row, *subs.factors(row, quad, group, each.total()))
        lookups.leave()
        subs.leave()
    totals.finish()


class _FloatSubs:
    """Sub-scales become floats, unpacked quad by quad."""

    def __init__(self, o: SpanOperands) -> None:
        self._o = o

    def start(self, row: int, group: Any) -> Expr:
        """What the sums of a group begin at."""
        return start_of(self._o, row, group)

    def enter(self, quad: Expr) -> None:
        """Begin a quad: sub-scales of the even and of the odd groups, and bytes of 15."""
        # As bytes: a float64 put into a vector would become ``ld1`` of a lane, which takes a vector
        # pipe, where ``ldr d`` does not.
        loaded = self._o.arrays["subs"].vload([quad * (2 * ROWS)], "uint8x8")
        self._nibbles = sub_nibbles(loaded)

    def choose(self, group: int) -> None:
        """Go to a group."""
        self._sub = sub_float(self._nibbles[group % 2], group // 2)

    def factors(self, row: int, quad: Expr, group: int, total: Expr) -> tuple[Expr, Expr]:
        """float32 [4] each: sums, and sub-scales times the activations' scale."""
        four = self._o.xs.vload(self._o.at(row, quad * 4), "float32x4")
        extra = self._o.extra.vload(self._o.at(row, quad * 4 + group, 4), "float32x4")
        return as_float(total), fma(self._sub, lane(four, "float32x4", group), extra)

    def leave(self) -> None:
        """End a quad."""


class _WholeSubs:
    """Sub-scales of a whole span: four vectors, one for each group of a quad, byte 4 quad + row."""

    def __init__(self, o: SpanOperands) -> None:
        self._o = o
        loaded = [o.arrays["subs"].vload([at], "uint8x16") for at in (0, BYTES)]
        words = [tirx.reinterpret("int32x4", each) for each in loaded]
        self._groups = []
        for pair in range(2):  # groups 0 and 1, 2 and 3
            order = [tirx.const(pair + 2 * quad, "int32") for quad in range(4)]
            packed = unsigned(tirx.Shuffle(words, order))
            self._groups += [kept(masked(packed, 15)), kept(shifted(packed, -4))]
        self._order = Order([i // 4 if i % 4 == 0 else _NOWHERE for i in range(BYTES)])

    def start(self, row: int, group: Any) -> Expr:
        """0 in four lanes: a load, where a constant would have to be copied."""
        return tirx.reinterpret(
            "int32x4", self._o.extra.vload(self._o.at(row, group, 4), "float32x4")
        )

    def enter(self, quad: Expr) -> None:
        """Begin a quad."""

    def choose(self, group: int) -> None:
        """Go to a group: int32 [4]."""
        found = table_lookup([self._groups[group]], self._order.load(), sve=True)
        self._sub = tirx.reinterpret("int32x4", found)

    def factors(self, row: int, quad: Expr, group: int, total: Expr) -> tuple[Expr, Expr]:
        """float32 [4] each: sums times sub-scales, and the activations' scale."""
        four = self._o.xs.vload(self._o.at(row, quad * 4), "float32x4")
        product = total * self._sub + start_of(self._o, row, quad * 4 + group)
        return as_float(product), lane(four, "float32x4", group)

    def leave(self) -> None:
        """End a quad: the next one's are four bytes on."""
        self._order.advance()


class _Lookups2:
    """Codes of 2 bits: two nibbles with codes and books in one byte."""

    order = (0, 1, 2, 3)
    """Of groups."""

    def __init__(self, o: SpanOperands, sve: bool) -> None:
        self._o, self._sve = o, sve
        self._book_high, self._code_high = tables_of(
            o, [list(range(16)), [i % 4 * 4 + i // 4 for i in range(16)]]
        )

    def enter(self, quad: Expr) -> None:
        """Begin a quad: the byte with a row's books, four times."""
        order = vector_constant([i // 4 for i in range(BYTES)])
        packed = load_low(self._o.arrays["index"], [quad * ROWS], "float32")
        self._books = kept(unsigned(table_lookup([packed], order, self._sve)))

    def leave(self) -> None:
        """End a quad."""

    def values(self, quad: Expr, group: int, vector: int) -> Expr:
        """int8 [16] of 4 rows and 4 k."""
        codes, even = _codes(self._o, quad, vector), group % 2 == 0
        both = kept(merged(0xCC if even else 0x33, codes, self._books))
        index = shifted(both, -4) if group >= 2 else masked(both, 15)
        return table_lookup([self._code_high if even else self._book_high], index, self._sve)


class _Lookups3:
    """Codes of 3 bits, brought to the low bits, each below its book."""

    order = (2, 1, 0, 3)
    """Of groups."""

    def __init__(
        self,
        o: SpanOperands,
        sve: bool,
        lookup: Callable[[Sequence[Expr], Expr], Expr] = table_lookup,
    ) -> None:
        self._o, self._sve, self._lookup = o, sve, lookup
        self._tables = tables_of(o, [list(range(BYTES)), list(range(BYTES, 2 * BYTES))])
        index = o.arrays["index"].vload([0], "uint8x16")
        one, two, three = books_of(index)
        low = (masked(one, 3), shifted(one, -3), shifted(three, -3), shifted(two, -3))
        self._packed = [kept(each) for each in low]
        self._order = Order([i // 4 for i in range(BYTES)])

    def enter(self, quad: Expr) -> None:
        """Begin a quad: every group's book, four times."""
        order = self._order.load()
        self._books = [
            unsigned(table_lookup([packed], order, self._sve)) for packed in self._packed
        ]

    def leave(self) -> None:
        """End a quad: the next one's books are four bytes on."""
        self._order.advance()

    def values(self, quad: Expr, group: int, vector: int) -> Expr:
        """int8 [16] of 4 rows and 4 k."""
        odd = vector % 2
        if group == 1:
            code = shifted(_codes(self._o, quad, 4 + vector // 2), -2 - 3 * odd)
        else:
            code = _codes(self._o, quad, vector)
        if group == 2:
            high = shifted(_codes(self._o, quad, 4 + vector // 2), 2 - odd)
            code = kept(merged(3, code, high))
        elif group != 1:
            code = shifted(code, -2 - group)
        return self._lookup(self._tables, inserted_left(code, self._books[group], 3))


def _codes(o: SpanOperands, quad: Expr, register_: int) -> Expr:
    dot = o.dot
    assert isinstance(dot, BookDot)
    lead = [quad] if dot.quads > 1 else []
    return o.arrays["codes"].vload([*lead, 16 * register_], "uint8x16")

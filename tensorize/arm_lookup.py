"""Dot products with looked up weights on Arm: a span of 4 rows, and its scales.

Weights are looked up by ``tbl`` and multiplied by ``sdot`` by lane: a lane of the activations is
four k, a lane of the sums one row, so that nothing is summed across lanes. What is left beside is
the scaling, where conversions are what costs most (two uops on every Neoverse, of two cycles each
on N1):

- sums start at `MAGIC`, which comes with the activations (`extra`: a load, where a constant would
  have to be copied), so that a subtraction makes them floats;
- of a table that has no sub-scales, no subtraction is needed: the product of `MAGIC` with the
  activations' scale is in `extra`, and ``xs (MAGIC + sum) - xs MAGIC`` is one ``fmla``;
- a float16 scale becomes a float by a shift and a mask, 2^-112 too small; `UNITS_ACTS` in `xs` and
  `unit_scale` after the last sum bring back two halves of that;
- a sub-scale s of 4 bits is put by ``tbl`` into the mantissa of 2^-97, and one ``fmla`` makes
  ``2^-104 s xs = 2^-104 (128 + s) xs - 2^-97 xs`` of it, exact but for its one rounding. There xs
  is `BooksScaling.acts` times the activations' scale, and its product with -2^-97 is in `extra`;
- with SVE a
  sub-scale is put into an int32 by ``tbl``, and ``mla`` adds its product with the sum of a group,
  which begins at 0 there, to `MAGIC`: below 15 * 16 * 127 * 64 < 2^21.

A float16 scale below 2^-14 is a denormal on this way: a process that flushes those to zero loses
scales so small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.arm_loads import MODULE, load_vectors
from apq_tvm.tensorize.arm_lookup_ops import (
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
    shuffled,
    splat,
    table_lookup,
)
from apq_tvm.tensorize.arm_quads import books_of
from apq_tvm.tensorize.lookup_books import BookDot
from apq_tvm.tensorize.lookup_span import ROWS, SpanOperands, make_pair
from apq_tvm.tensorize.lookup_units import UnitsDot
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped

UNITS_ACTS = 2.0**56
"""What `xs` is multiplied by for `units_intrinsic`."""

UNITS_FACTOR = -1.5 * 2.0**23
"""What `extra` multiplies `xs` by for `units_intrinsic`: less the float of `MAGIC`."""

UNITS_UNIT = 2.0**-112
"""`SpanDot.unit` of `units_intrinsic`."""


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


_NOT_EXPONENT = ~0x70000000
"""Clears the copies that sign extension made between a float16's sign and its exponent."""

_HIGH_BYTE = 12
"""Where a vector with sub-scales has the high byte of 2^-97; bytes 8 to 11 are 0."""

_NOWHERE = 128
"""Where no vector has a byte, nor after all steps from quad to quad."""


def units_intrinsic(dot: UnitsDot, fused: bool, sve: bool, together: bool = False) -> str:
    """Register (once) and name the dot product of a group of 4-bit codes and one table.

    For 32 codes of 4 rows there are 8 products, 8 lookups, 8 masks or shifts, and 4 instructions
    for the scales: 7 cycles of four vector pipes, 14 of two at least, 1.65 times what the 17 of
    W4A8g32 take.

    Parameters
    ----------
    dot : UnitsDot
    fused : bool
        Whether there is ``sdot``.
    sve : bool
        Whether there is SVE.
    together : bool
        Whether four vectors of codes are loaded at a time (`apq_tvm.tensorize.arm_loads`).

    Returns
    -------
    str
        The intrinsic's name. Its `xs` has 22 bits and is scaled by `UNITS_ACTS`; `extra` is `MAGIC`
        four times and `UNITS_FACTOR` times `xs` four times.
    """
    name = f"apq_{instruction_name(fused, sve)}_{dot.m}x{ROWS}x{dot.k}_s8lut4f32"
    name += "_ld1" if together else ""

    def load(o: SpanOperands, unit: int) -> list[Expr]:
        from tvm import tirx

        codes, lead = o.arrays["codes"], [tirx.const(unit, "int64")] if dot.units > 1 else []
        if together:
            first = tirx.const(0, "int64")
            return load_vectors(tirx.address_of(codes[(*lead, first)]), 4)
        return [codes.vload([*lead, 16 * i], "uint8x16") for i in range(4)]

    def implement(o: SpanOperands) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        if not together:
            _add_units(o, dot, fused, sve, load)
            return
        with b.attr(tirx.const(0, "int32"), "pragma_import_llvm", MODULE):
            _add_units(o, dot, fused, sve, load)

    return register(name, lambda: make_pair(dot, implement))


def _add_units(
    o: SpanOperands,
    dot: UnitsDot,
    fused: bool,
    sve: bool,
    load: Callable[[SpanOperands, int], list[Expr]],
) -> None:
    """The products of a group."""
    from tvm import tirx

    (table,) = tables_of(o, [list(range(16))])
    dots = [Dot(fused, dot.offset, start_of(o, i, 0)) for i in range(dot.m)]
    for unit in range(dot.units):
        for i, codes in enumerate(load(o, unit)):
            for half, index in enumerate((masked(codes, 15), shifted(codes, -4))):
                values = table_lookup([table], index, sve)
                for row, each in enumerate(dots):
                    each.add(values, x_of(o, row, 32 * unit + 16 * half), i)
    halves = tirx.reinterpret("int16x4", o.scales.vload([0], "float16x4"))
    bits = tirx.shift_left(halves.astype("int32x4"), splat(13, "int32", 4))
    bits = tirx.bitwise_and(bits, splat(_NOT_EXPONENT, "int32", 4))
    scale = tirx.reinterpret("float32x4", bits)
    for row, each in enumerate(dots):
        xs = tirx.Broadcast(o.xs[tuple(o.at(row, 0))], ROWS)
        less = o.extra.vload(o.at(row, 0, 4), "float32x4")
        # Exact but for one rounding: xs has 22 bits, so its product with `MAGIC` is exact.
        value = fma(tirx.reinterpret("float32x4", each.total()), xs, less)
        store_sums(o, row, fma(value, scale, sums_of(o, row)))


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
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        if not longer:
            lookups = _Lookups2(o, sve) if dot.bits == 2 else _Lookups3(o, sve)
            _add_quads(o, dot, fused, sve, lookups)
            return
        with b.If(tirx.vscale() >= tirx.const(2, "int32")):
            with b.Then():
                _add_quads(o, dot, fused, sve, _Lookups3(o, sve, long_lookup))
            with b.Else():
                _add_quads(o, dot, fused, sve, _Lookups3(o, sve))

    return register(name, lambda: make_pair(dot, implement))


def _add_quads(
    o: SpanOperands, dot: BookDot, fused: bool, sve: bool, lookups: _Lookups2 | _Lookups3
) -> None:
    """The products of a span."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    totals = b.alloc_buffer((dot.m, ROWS), "float32", align=16)
    for row in range(dot.m):
        b.buffer_store(totals, splat(0.0, "float32", 4), [row, tirx.Ramp(0, 1, ROWS)])
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
                before = totals.vload([row, 0], "float32x4")
                value = fma(*subs.factors(row, quad, group, each.total()), before)
                b.buffer_store(totals, value, [row, tirx.Ramp(0, 1, ROWS)])
        lookups.leave()
        subs.leave()
    scale = o.scales.vload([0], "float16x4").astype("float32x4")
    for row in range(dot.m):
        total = totals.vload([row, 0], "float32x4")
        store_sums(o, row, fma(total, scale, sums_of(o, row)))


def instruction_name(fused: bool, sve: bool) -> str:
    """The part of an intrinsic's name that says what it needs."""
    return ("sdot" if fused else "smull") + ("_sve" if sve else "")


def fma(a: Expr, c: Expr, plus: Expr) -> Expr:
    """float32 [4]: a product and a sum with one rounding."""
    from tvm import tirx

    return tirx.call_llvm_pure_intrin("float32x4", "llvm.fma", a, c, plus)


def start_of(o: SpanOperands, row: int, group: Any) -> Expr:
    """`MAGIC` in four lanes."""
    from tvm import tirx

    return tirx.reinterpret("int32x4", o.extra.vload(o.at(row, group, 0), "float32x4"))


def x_of(o: SpanOperands, row: int, k: Any) -> Expr:
    """int8 [16] activations from column k on."""
    return o.x.vload(o.at(row, k), "int8x16")


def sums_of(o: SpanOperands, row: int) -> Expr:
    """float32 [4]: the sums so far of one row of x."""
    return o.acc.vload(o.at(row, 0), "float32x4")


def store_sums(o: SpanOperands, row: int, value: Expr) -> None:
    """Store what `sums_of` loads."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    b.buffer_store(o.acc, value, o.at(row, tirx.Ramp(tirx.const(0, "int64"), 1, ROWS)))


def tables_of(o: SpanOperands, orders: list[list[int]]) -> list[Expr]:
    """int8 [16] each: entries of the table in these orders, less the offset."""
    from tvm import tirx

    entries = o.dot.entries
    stored = o.arrays["table"].vload([0], f"uint8x{entries}")
    centred = tirx.reinterpret(f"int8x{entries}", stored) - splat(o.dot.offset, "int8", entries)
    return [shuffled(centred, entries, order) for order in orders]


def vector_constant(values: list[int]) -> Expr:
    """uint8 [16]."""
    from tvm import tirx

    return tirx.Shuffle([tirx.const(v, "uint8") for v in values], list(range(16)))


def _unsigned(vector: Expr) -> Expr:
    from tvm import tirx

    return tirx.reinterpret("uint8x16", vector)


def load_low(buffer: Any, at: list[Expr], dtype: str) -> Expr:
    """uint8 [16]: 4 or 8 bytes of a buffer, and zeros above them."""
    from tvm import tirx

    size = 4 if dtype == "float32" else 8
    value = tirx.reinterpret(dtype, buffer.vload(at, f"uint8x{size}"))
    lanes = BYTES // size
    zeros = [tirx.const(0, dtype)] * (lanes - 1)
    return tirx.reinterpret("uint8x16", tirx.Shuffle([value, *zeros], list(range(lanes))))


def sub_nibbles(loaded: Expr) -> list[Expr]:
    """uint8 [16] twice: low and high nibbles of uint8 [8], and what `sub_float` needs besides."""
    from tvm import tirx

    above = [tirx.const(0 if at < _HIGH_BYTE else 255, "uint8") for at in range(8, BYTES)]
    high = tirx.Shuffle(above, list(range(8)))  # whose nibbles are the high byte of 2^-97
    packed = kept(tirx.Shuffle([loaded, high], [tirx.const(i, "int32") for i in range(BYTES)]))
    return [masked(packed, 15), shifted(packed, -4)]


def sub_float(nibbles: Expr, word: int) -> Expr:
    """float32 [4]: 128 plus the sub-scales in a word of one of `sub_nibbles`, times 2^-104."""
    from tvm import tirx

    zero = 2 * ROWS
    order = [at for r in range(ROWS) for at in (zero, zero, word * ROWS + r, _HIGH_BYTE)]
    return tirx.reinterpret("float32x4", table_lookup([nibbles], vector_constant(order)))


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
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        self._o = o
        loaded = [o.arrays["subs"].vload([at], "uint8x16") for at in (0, BYTES)]
        words = [tirx.reinterpret("int32x4", each) for each in loaded]
        self._groups = []
        for pair in range(2):  # groups 0 and 1, 2 and 3
            order = [tirx.const(pair + 2 * quad, "int32") for quad in range(4)]
            packed = _unsigned(tirx.Shuffle(words, order))
            self._groups += [kept(masked(packed, 15)), kept(shifted(packed, -4))]
        self._order = b.alloc_buffer((BYTES,), "uint8", align=16)
        places = [i // 4 if i % 4 == 0 else _NOWHERE for i in range(BYTES)]
        self._set_order(vector_constant(places))

    def _set_order(self, order: Expr) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        b.buffer_store(self._order, order, [tirx.Ramp(0, 1, BYTES)])

    def start(self, row: int, group: Any) -> Expr:
        """0 in four lanes: a load, where a constant would have to be copied."""
        from tvm import tirx

        return tirx.reinterpret(
            "int32x4", self._o.extra.vload(self._o.at(row, group, 4), "float32x4")
        )

    def enter(self, quad: Expr) -> None:
        """Begin a quad."""

    def choose(self, group: int) -> None:
        """Go to a group: int32 [4]."""
        from tvm import tirx

        order = self._order.vload([0], "uint8x16")
        found = table_lookup([self._groups[group]], order, sve=True)
        self._sub = tirx.reinterpret("int32x4", found)

    def factors(self, row: int, quad: Expr, group: int, total: Expr) -> tuple[Expr, Expr]:
        """float32 [4] each: sums times sub-scales, and the activations' scale."""
        four = self._o.xs.vload(self._o.at(row, quad * 4), "float32x4")
        product = total * self._sub + start_of(self._o, row, quad * 4 + group)
        return as_float(product), lane(four, "float32x4", group)

    def leave(self) -> None:
        """End a quad: the next one's are four bytes on."""
        self._set_order(self._order.vload([0], "uint8x16") + splat(ROWS, "uint8"))


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
        self._books = kept(_unsigned(table_lookup([packed], order, self._sve)))

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
        from tvm.tirx.script.builder import ir as b

        self._o, self._sve, self._lookup = o, sve, lookup
        self._tables = tables_of(o, [list(range(BYTES)), list(range(BYTES, 2 * BYTES))])
        index = o.arrays["index"].vload([0], "uint8x16")
        one, two, three = books_of(index)
        low = (masked(one, 3), shifted(one, -3), shifted(three, -3), shifted(two, -3))
        self._packed = [kept(each) for each in low]
        self._order = b.alloc_buffer((BYTES,), "uint8", align=16)
        self._set_order(vector_constant([i // 4 for i in range(BYTES)]))

    def _set_order(self, order: Expr) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        b.buffer_store(self._order, order, [tirx.Ramp(0, 1, BYTES)])

    def enter(self, quad: Expr) -> None:
        """Begin a quad: every group's book, four times."""
        order = self._order.vload([0], "uint8x16")
        self._books = [
            _unsigned(table_lookup([packed], order, self._sve)) for packed in self._packed
        ]

    def leave(self) -> None:
        """End a quad: the next one's books are four bytes on."""
        self._set_order(self._order.vload([0], "uint8x16") + splat(ROWS, "uint8"))

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

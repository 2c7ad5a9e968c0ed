"""A span of 256 codes of 3 bits of 4 rows with four codebooks, as written assembly.

There are two tables, with the book above the code in an index, and below it. Of the 22 instructions
for the indices of a quad, six merge codes at bits 4-2 with the book below (``bif``), six insert
codes that are at bits 7-5 below a book (``sri``), and ten put group 2 together: a shift that may
insert, a merge or none, and a merge with the book. The books of four quads are made ready at once
(`arm_quads.books_of`) and spread over a quad's vectors by three ``tbl``.

A ``tbl`` of two registers takes twice as long on Neoverse V1 as SVE's of one, which holds a table
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from apq_tvm.tensorize.arm.written.codebook_asm import Span
from apq_tvm.tensorize.arm.written.straight import Value
from apq_tvm.tensorize.meaning.codebook_quads import SPAN_QUADS

_BIF = "bif {d}.16b, {1}.16b, {2}.16b"

_SRI = "sri {d}.16b, {1}.16b, #5"

_WAITING = 3
"""Lookups that are written before the product with the first of them, on a core that issues in
order; others find what they need themselves, and registers are scarce."""


@dataclass
class _Group:
    x: Value
    total: Value
    other: Callable[[], Value]
    count: int = 0


class Quads3(Span):
    """A program with codes of 3 bits."""

    def quad(self, quad: int) -> None:
        """All that belongs to a quad."""
        if not quad:
            self.begin()
        self.groups: dict[int, _Group] = {}
        self.places: dict[int, Value] = {}
        self.x: dict[int, Value] = {}
        self.spread = self.load("places", 16 * quad)
        waiting: list[tuple[int, int, Value]] = []
        for group, i, value in self.lookups(quad):
            waiting.append((group, i, value))
            if len(waiting) > _WAITING * self.style.in_order:
                self.product(quad, *waiting.pop(0))
        for each in waiting:
            self.product(quad, *each)

    def begin(self) -> None:
        """What is to be merged with the codes of four quads (`arm_quads.books_of`)."""
        s, c = self.code, self.constant
        index = self.load("index", 0)
        nibble = c["nibble"] if self.style.sve else self.pairs[0][1]
        apart = s.make("ushr {d}.16b, {0}.16b, #1", index)
        left = s.make("shl {d}.16b, {0}.16b, #1", index)
        apart = s.change("bit {d}.16b, {1}.16b, {2}.16b", apart, left, nibble)
        five = s.make("orr {d}.16b, {0}.16b, {1}.16b", c["above"], c["below"])
        text = "and {d}.16b, {0}.16b, {1}.16b"
        self.packed = [
            s.make(text, index, five),
            s.make("ushr {d}.16b, {0}.16b, #3", index),
            s.make(text, apart, five),
        ]

    def tables(self, first: int) -> list[Value]:
        """Registers of one of two tables."""
        count = 1 if self.style.long else 2
        return [self.constant[f"table{first * count + i}"] for i in range(count)]

    def lookups(self, quad: int) -> Iterator[tuple[int, int, Value]]:
        """Group, vector and what is looked up.

        Codes are loaded twice, since they or what they are merged with is overwritten. An insertion
        overwrites the code that the one before it put below a book.
        """
        s, below = self.code, self.constant["below"]
        first = self.books(0)
        for i, code in enumerate(self.load_codes(quad, 4)):
            index = s.change(_BIF, code, first, below)
            yield 0, i, self.lookup(self.tables(1), index)
        second, other = self.books(1), self.load_codes(quad, 2, 4)
        for i, code in enumerate(other):
            index = s.change(_BIF, code, second, below)
            yield 1, 2 * i, self.lookup(self.tables(1), index)
        other = self.load_codes(quad, 2, 4)
        for i, code in enumerate(other):
            first = s.change(_SRI, first, code)
            yield 1, 2 * i + 1, self.lookup(self.tables(0), first)
        codes = self.load_codes(quad, 4)
        for i, code in enumerate(codes):
            second = s.change(_SRI, second, code)
            yield 3, i, self.lookup(self.tables(0), second)
        third = self.books(2)
        for i, code in enumerate(codes):
            index = s.change(
                _BIF, self.split(i, code, other[i // 2]), third, self.constant["above"]
            )
            yield 2, i, self.lookup(self.tables(0), index)

    def books(self, i: int) -> Value:
        """Of a quad, to be merged with codes."""
        return self.lookup([self.packed[i]], self.spread)

    def split(self, i: int, low: Value, high: Value) -> Value:
        """Codes of group 2, put together."""
        if i % 2:
            both = self.code.make("shl {d}.16b, {0}.16b, #1", high)
            return self.code.change(_BIF, both, low, self.constant["below"])
        return self.code.change("sli {d}.16b, {1}.16b, #2", low, high)

    def product(self, quad: int, group: int, i: int, value: Value) -> None:
        """One of four; the last one ends a group."""
        s = self.code
        if group not in self.groups:
            start, other = self.load_extra(quad, group)
            self.groups[group] = _Group(self.activations(quad, group), start, other)
        found = self.groups[group]
        text = f"sdot {{d}}.4s, {{1}}.16b, {{2}}.4b[{i}]"
        found.total = s.change(text, found.total, value, found.x)
        found.count += 1
        if found.count == 4:
            self.add(group, found.total, self.sub(quad, group), found.other())

    def activations(self, quad: int, group: int) -> Value:
        """16 of a group; where slots are scarce, of two groups at once."""
        if not self.style.slots:
            return self.load("x", 64 * quad + 16 * group)
        if group not in self.x:
            first = group // 2 * 2
            at = f"[{self.pointer['x']}, #{64 * quad + 16 * first}]"
            both = self.code.make_run(f"ldp {{d0:q}}, {{d1:q}}, {at}", 2)
            self.x |= {first: both[0], first + 1: both[1]}
        return self.x[group]

    def place(self, at: int) -> Value:
        """Some `sub_places`, from memory."""
        if at not in self.places:
            self.places[at] = self.load("places", 16 * (SPAN_QUADS + at))
        return self.places[at]

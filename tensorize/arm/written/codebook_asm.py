"""A span of 256 codes of 3 bits of 4 rows with four codebooks and one row of x, as assembly.

Codes lie in quads (`apq_tvm.tensorize.meaning.codebook_quads`). Per quad (256 products of 4 rows)
there are 16 sdot, 16 ``tbl``, 22 instructions that make indices of codes and books, and 16 for the
scales of the four groups. Of a group's four for the scales one gives the rows' sub-scales, one
multiplies them, one makes a float of the sum (it began at `MAGIC`) and one adds. So a quad takes 70
vector instructions at least, 17.5 cycles of four pipes (V1, V2), 35 of two (N1), where W4A8g32 has
34: 2.1 times as many. What spreads the books comes to 4.75 more; without SVE unpacking sub-scales
takes 1.5.

It is written because LLVM makes more of the same product (`spans.codebook_quads`):
instructions of a call, 512 rows of 2048, scales included (``apq-tvm bench static``):

=============  =======  =======  =====
core           written  LLVM's   saved
=============  =======  =======  =====
Neoverse N1    398 686  488 152  18 %
Neoverse V1    471 403  501 863   6 %
Neoverse V2    449 365  506 452  11 %
Cortex-A55     466 781  527 578  12 %
=============  =======  =======  =====

- There are two tables, with the book above the code in an index, and below it. Six instructions
  merge codes at bits 4-2 with the book below (``bif``), six insert codes that are at bits 7-5 below
  a book (``sri``), and ten put group 2 together: a shift that may insert, a merge or none, and a
  merge with the book. The books of four quads are made ready at once
  (`spans.quads.books_of`) and spread over a quad's vectors by three ``tbl``.
- A ``tbl`` of two registers takes twice as long on Neoverse V1 as SVE's of one, which holds a table
  there.
- A byte of a sub-scale s, ``tbl``, and one of 15 make the float ``2^-104 (128 + s)``, as in
  `spans.span`. Where a product of int32 is cheap (SVE), s is an int32, a mask or a
  shift of a byte that is loaded as a word.
- What an instruction overwrites (codes to be merged twice, what sums begin at) is loaded for each,
  rather than copied, since loads take no vector pipe.
- On Neoverse N1 one instruction loads several vectors: instructions are what it is short of.
- On cores that issue in order a load from base and register takes as long as a product, so that
  both go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from apq_tvm.tensorize.arm.spans.quads import BOOK_ABOVE, BOOK_BELOW
from apq_tvm.tensorize.arm.written.straight import Straight, Value, together
from apq_tvm.tensorize.meaning.codebook_quads import SPAN_QUADS, quad_bytes
from apq_tvm.tensorize.meaning.spans.lookup import EXTRA, ROWS

POINTERS = ("codes", "subs", "index", "scales", "x", "xs", "extra", "places")
"""Operands 1 and on; 0 is the sums."""

BITS = 3
"""Of a code."""

_PAGE = 256
"""Bytes that one pointer reaches with an offset in a register, for a core that issues in order."""

_OFFSETS = (*range(9, 18), *range(20, 26))
"""Registers with such offsets: 16 and so on; x18 belongs to the platform, x19 may to LLVM."""

_BEYOND = {"codes": 26, "extra": 27}
"""Registers that point to what is `_PAGE` further on."""

SCRATCH = (*_OFFSETS, *_BEYOND.values())
"""General registers that a program overwrites."""

_BIF = "bif {d}.16b, {1}.16b, {2}.16b"

_SRI = "sri {d}.16b, {1}.16b, #5"

_WAITING = 3
"""Lookups that are written before the product with the first of them, on a core that issues in
order; others find what they need themselves, and registers are scarce."""

_ORDER = (20, 1)
"""How far `Straight.lines` looks ahead on a core that issues in order, and what it spares: the best
by llvm-mca."""


@dataclass(frozen=True)
class Style:
    """What suits a core.

    Parameters
    ----------
    sve : bool
        Whether there is SVE: its ``tbl`` of one register, and cheap products of int32.
    several : bool
        Whether one instruction had better load several vectors.
    in_order : bool
        Whether it is a Cortex-A55 or its like.
    long : bool
        Whether a vector of SVE has 32 bytes at least: a whole table of 32 entries.
    """

    sve: bool = False
    several: bool = False
    in_order: bool = False
    long: bool = False

    @property
    def tables(self) -> int:
        """How many registers with entries of the table there are."""
        return 2 if self.long else 4

    @property
    def constants(self) -> dict[str, list[int] | None]:
        """Bytes of every vector that a program wants as an operand; None for parts of the table."""
        found: dict[str, list[int] | None] = {f"table{i}": None for i in range(self.tables)}
        found["magic"] = [0, 0, 0x40, 0x4B] * 4
        if self.sve:
            found["nibble"] = [15] * 16
        return found | {"above": [BOOK_ABOVE] * 16, "below": [BOOK_BELOW] * 16}

    @property
    def fixed(self) -> dict[str, int]:
        """The registers of constants that have to be in certain ones: those of a ``tbl`` of two."""
        return {} if self.long else {f"table{i}": 28 + i for i in range(self.tables)}

    @property
    def registers(self) -> int:
        """How many vectors a program overwrites: those that neither constants nor sums are in."""
        return 31 - len(self.constants)


def places() -> list[int]:
    """Bytes in memory that a program wants besides."""
    spread = [4 * quad + i // 4 for quad in range(SPAN_QUADS) for i in range(16)]
    subs = [[at for r in range(ROWS) for at in (255, 255, 4 * n + r, 16)] for n in range(4)]
    return spread + [at for place in subs for at in place]


def in_order_start(pointer: Mapping[str, str]) -> list[str]:
    """Lines that set what `in_order_load` uses."""
    lines = [f"mov x{x}, #{16 * i + 16}" for i, x in enumerate(_OFFSETS)]
    return lines + [f"add x{x}, {pointer[n]}, #{_PAGE}" for n, x in _BEYOND.items()]


def in_order_load(name: str, pointer: str, offset: int) -> str:
    """The text of a load by base and register, which takes as long as other instructions.

    Parameters
    ----------
    name : str
        Of an operand; ``codes`` and ``extra`` may be two pages long.
    pointer : str
        To it.
    offset : int
        Bytes, a multiple of 16.
    """
    page, rest = divmod(offset, _PAGE)
    base = f"x{_BEYOND[name]}" if page else pointer
    index = f"x{_OFFSETS[rest // 16 - 1]}" if rest else "xzr"
    return f"ldr {{d:q}}, [{base}, {index}]"


@dataclass
class _Group:
    x: Value
    total: Value
    other: Callable[[], Value]
    count: int = 0


class Span:
    """The program."""

    def __init__(self, style: Style) -> None:
        self.style, self.code = style, Straight()
        first = 1 + len(POINTERS)
        self.constant = {n: Value(first + i) for i, n in enumerate(style.constants)}
        for name, register in style.fixed.items():
            self.constant[name] = Value(register=register)
        self.pointer = {n: f"${i + 1}" for i, n in enumerate(POINTERS)}
        self.total: Value | None = None
        self.pairs: list[list[Value]] = []
        self.addresses: dict[int, int] = {}
        self.words: dict[int, Value] = {}

    def lines(self) -> list[str]:
        """The lines of assembly; constants are operands after the pointers."""
        s, style = self.code, self.style
        if style.sve:
            s.write("ptrue p0.s, vl4")
        for quad in range(SPAN_QUADS):
            self.xs = self.load("xs", 16 * quad)
            if not style.sve and quad % 2 == 0:
                self.subs = self.sub_scales(quad // 2)
            if not quad:
                self.begin()
            self.quad(quad)
        scale = s.make(f"ldr {{d:d}}, [{self.pointer['scales']}]")
        scale = s.make("fcvtl {d}.4s, {0}.4h", scale)
        assert self.total is not None
        s.write("fmla $0.4s, {0}.4s, {1}.4s", self.total, scale)
        before = in_order_start(self.pointer) if style.in_order else []
        codes = self.pointer["codes"]
        before += [f"add x{x}, {codes}, #{at}" for at, x in self.addresses.items()]
        return before + s.lines(style.registers, *(_ORDER if style.in_order else ()))

    def load(self, name: str, offset: int) -> Value:
        """A vector; in order by base and register, which takes as long as other instructions."""
        if self.style.in_order:
            return self.code.make(in_order_load(name, self.pointer[name], offset))
        return self.code.make(f"ldr {{d:q}}, [{self.pointer[name]}, #{offset}]")

    def load_codes(self, quad: int, count: int, first: int = 0) -> list[Value]:
        """Some vectors of a quad."""
        base = quad * quad_bytes(BITS) + 16 * first
        if not self.style.several:
            return [self.load("codes", base + 16 * i) for i in range(count)]
        names = ", ".join(f"{{d{i}}}.16b" for i in range(count))
        at = self.pointer["codes"]
        if base:
            at = f"x{self.addresses.setdefault(base, SCRATCH[len(self.addresses)])}"
        return self.code.make_run(f"ld1 {{{{{names}}}}}, [{at}]", count)

    def load_extra(self, quad: int, group: int) -> tuple[Value, Callable[[], Value]]:
        """What the sums of a group begin at, and how to get the other half of `extra`."""
        offset, sve = 4 * EXTRA * (4 * quad + group), self.style.sve
        if self.style.several:
            text = f"ldp {{d0:q}}, {{d1:q}}, [{self.pointer['extra']}, #{offset}]"
            both = self.code.make_run(text, 2)
            return both[sve], lambda: both[not sve]
        start = self.load("extra", offset + 16 * sve)
        return start, lambda: self.load("extra", offset + 16 * (not sve))

    def sub_scales(self, pair: int) -> list[list[Value]]:
        """Of two quads: what `sub` looks up for even and for odd groups."""
        s = self.code
        raw = self.load("subs", 16 * pair)
        texts = ("and {d}.16b, {1}.16b, {2}.16b", "ushr {d}.16b, {1}.16b, #4")
        if not pair:
            self.pairs = [list(together([Value(), Value()])) for _ in texts]
            for both in self.pairs:
                s.make_into(both[1], "movi {d}.16b, #15")
        for both, text in zip(self.pairs, texts, strict=True):
            if pair:
                both[0] = s.change(text, both[0], raw, both[1])
            else:
                s.make_into(both[0], text, raw, raw, both[1])
        return [list(both) for both in self.pairs]

    def lookup(self, tables: list[Value], index: Value) -> Value:
        """Bytes of one register or more."""
        s = self.code
        if len(tables) > 1:
            names = ", ".join(f"{{{i}}}.16b" for i in range(len(tables)))
            text = f"tbl {{d}}.16b, {{{{{names}}}}}, {{{len(tables)}}}.16b"
            return s.make(text, *tables, index)
        if self.style.sve:
            return s.make("tbl {d:z}.b, {{{0:z}.b}}, {1:z}.b", *tables, index)
        return s.make("tbl {d}.16b, {{{0}.16b}}, {1}.16b", *tables, index)

    def sub(self, quad: int, group: int) -> Value:
        """A group's sub-scales."""
        s, word = self.code, 2 * quad + group // 2
        if not self.style.sve:
            return self.lookup(self.subs[group % 2], self.place(word % 4))
        if word not in self.words:
            at = f"add x9, {self.pointer['subs']}, #{4 * word}"
            self.words[word] = s.make(at + "\nld1b {{{d:z}.s}}, p0/z, [x9]")
        if group % 2:
            return s.make("ushr {d}.4s, {0}.4s, #4", self.words[word])
        return s.make("and {d}.16b, {0}.16b, {1}.16b", self.words[word], self.constant["nibble"])

    def add(self, group: int, total: Value, sub: Value, more: Value) -> None:
        """A sum times its scales; `more` is `MAGIC` or what else there is in `extra`."""
        s, factor, lanes = self.code, self.xs, f"{{2}}.s[{group}]"
        if self.style.sve:
            total = s.change("mla {d}.4s, {1}.4s, {2}.4s", more, total, sub)
        else:
            factor = s.change(f"fmla {{d}}.4s, {{1}}.4s, {lanes}", more, sub, self.xs)
            lanes = "{2}.4s"
        value = s.make("fsub {d}.4s, {0}.4s, {1}.4s", total, self.constant["magic"])
        if self.total is None:
            self.total = s.make(f"fmul {{d}}.4s, {{1}}.4s, {lanes}", value, value, factor)
        else:
            self.total = s.change(f"fmla {{d}}.4s, {{1}}.4s, {lanes}", self.total, value, factor)

    def quad(self, quad: int) -> None:
        """All that belongs to a quad."""
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
        """What is to be merged with the codes of four quads: `spans.quads`."""
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
        if not self.style.several:
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

"""A span of 256 codes of 4 rows with four codebooks and one row of x, as written assembly.

Codes of 2 and 3 bits lie in quads (`apq_tvm.tensorize.meaning.codebook_quads`), codes of 4 bits in
interleaved units, of which two take the place of a quad; sub-scales and books lie alike.

Per quad (256 products of 4 rows) there are 16 sdot, 16 ``tbl``, 24 or 22 instructions that make
indices of codes and books, and 16 for the scales of the four groups: with 2 bits, merges with the
books (8), masks (8) and shifts (8), with 3 bits one for each of twelve vectors and 10 for the other
four (`apq_tvm.tensorize.arm.written.codebook_quads_asm`). Of a group's four for the scales one
gives the rows' sub-scales, one multiplies them, one makes a float of the sum (it began at `MAGIC`)
and one adds. So these layouts take 72 or 70 vector instructions at least, 18 or 17.5 cycles of four
pipes (V1, V2), 36 or 35 of two (N1), where W4A8g32 has 34: 2.1 times as many. What spreads the
books comes to 1.5 more with 2 bits, to 4.75 with 3; without SVE unpacking sub-scales takes 1.5.
With 4 bits a ``tbl`` of four registers counts three times: 104 and 9.

- A byte of a sub-scale s, ``tbl``, and one of 15 make the float ``2^-104 (128 + s)``, as in
  `apq_tvm.tensorize.arm.span`. Where a product of int32 is cheap (SVE), s is an int32, a mask or a
  shift of a byte that is loaded as a word.
- What an instruction overwrites (codes to be merged twice, what sums begin at) is loaded for each,
  rather than copied, since loads take no vector pipe.
- The books of a row are spread over its four k by two ``zip``, six for four quads; with 3 bits by
  ``tbl``, of what is to be merged.
- Neoverse N1 has slots for three instructions a cycle in LLVM's model (`arm_slots`).
- On cores that issue in order a load from base and register takes as long as a product, so that
  both go together (`apq_tvm.tensorize.arm.written.in_order`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from apq_tvm.tensorize.arm.quads import BOOK_ABOVE, BOOK_BELOW
from apq_tvm.tensorize.arm.written.slots import filled
from apq_tvm.tensorize.arm.written.straight import Straight, Value, together
from apq_tvm.tensorize.meaning.codebook_quads import SPAN_QUADS, quad_bytes
from apq_tvm.tensorize.meaning.lookup_span import EXTRA, ROWS

POINTERS = ("codes", "subs", "index", "scales", "x", "xs", "extra")
"""Operands 1 and on, with 3 bits ``places`` besides; 0 is the sums."""

_PAGE = 256
"""Bytes that one pointer reaches with an offset in a register, for a core that issues in order."""

_OFFSETS = (*range(9, 18), *range(20, 26))
"""Registers with such offsets: 16 and so on; x18 belongs to the platform, x19 may to LLVM."""

_BEYOND = {"codes": 26, "extra": 27}
"""Registers that point to what is `_PAGE` further on."""

SCRATCH = (*_OFFSETS, *_BEYOND.values())
"""General registers that a program overwrites."""


@dataclass(frozen=True)
class Style:
    """What suits a core.

    Parameters
    ----------
    sve : bool
        Whether there is SVE: its ``tbl`` of one register, and cheap products of int32.
    slots : bool
        Whether slots are scarce rather than vector pipes.
    in_order : bool
        Whether it is a Cortex-A55 or its like.
    long : bool
        Whether a vector of SVE has 32 bytes at least: a whole table of 32 entries.
    """

    sve: bool = False
    slots: bool = False
    in_order: bool = False
    long: bool = False

    def order(self, bits: int) -> tuple[int, int]:
        """How far `Straight.lines` looks ahead, and what it spares: the best by llvm-mca."""
        if self.in_order:
            return {2: (16, 1), 3: (20, 1), 4: (8, 3)}[bits]
        if self.slots:
            return (0, 0) if bits == 4 else (24, 0)
        return (8, 2) if bits == 4 else (0, 0)


def pointers(bits: int) -> tuple[str, ...]:
    """Operands after the sums."""
    return (*POINTERS, "places") if bits == 3 else POINTERS


def constants(bits: int, style: Style) -> dict[str, list[int] | None]:
    """Bytes of every vector that a program wants as an operand; None for parts of the table."""
    found: dict[str, list[int] | None] = {f"table{i}": None for i in range(tables(bits, style))}
    found["magic"] = [0, 0, 0x40, 0x4B] * 4
    if bits < 3 or style.sve:
        found["nibble"] = [15] * 16
    if bits == 3:
        return found | {"above": [BOOK_ABOVE] * 16, "below": [BOOK_BELOW] * 16}
    found["mask"] = [0x33 if bits == 2 else 3] * 16
    if style.sve:
        return found
    return found | {f"place{place}": sub_places(place) for place in range(4)}


def sub_places(place: int) -> list[int]:
    """Where `Span.sub_scales` has what becomes float32 of a group."""
    return [at for r in range(ROWS) for at in (255, 255, 4 * place + r, 16)]


def places(bits: int) -> list[int]:
    """Bytes in memory that a program wants besides."""
    if bits != 3:
        return []
    spread = [4 * quad + i // 4 for quad in range(SPAN_QUADS) for i in range(16)]
    return spread + [at for place in range(4) for at in sub_places(place)]


def tables(bits: int, style: Style) -> int:
    """How many registers with entries of the table there are."""
    return 2 if bits == 2 or style.long else 4


def fixed(bits: int, style: Style) -> dict[str, int]:
    """The registers of constants that have to be in certain ones."""
    count = tables(bits, style)
    return {f"table{i}": 32 - count + i for i in range(count)} if count == 4 else {}


def registers(bits: int, style: Style) -> int:
    """How many vectors a program overwrites: those that neither constants nor sums are in."""
    return 31 - len(constants(bits, style))


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


class Span:
    """A program with codes of 2 or 4 bits."""

    def __init__(self, bits: int, style: Style) -> None:
        self.bits, self.style, self.code = bits, style, Straight()
        first = 1 + len(pointers(bits))
        names = enumerate(constants(bits, style))
        self.constant = {n: Value(first + i) for i, n in names}
        for name, register in fixed(bits, style).items():
            self.constant[name] = Value(register=register)
        self.pointer = {n: f"${i + 1}" for i, n in enumerate(pointers(bits))}
        self.total: Value | None = None
        self.pairs: list[list[Value]] = []
        self.addresses: dict[int, int] = {}
        self.words: dict[int, Value] = {}

    def lines(self) -> list[str]:
        """The lines of assembly; constants are operands after the pointers."""
        s = self.code
        if self.style.sve:
            s.write("ptrue p0.s, vl4")
        for quad in range(SPAN_QUADS):
            self.xs = self.load("xs", 16 * quad)
            if not self.style.sve and quad % 2 == 0:
                self.subs = self.sub_scales(quad // 2)
            self.quad(quad)
        scale = s.make(f"ldr {{d:d}}, [{self.pointer['scales']}]")
        scale = s.make("fcvtl {d}.4s, {0}.4h", scale)
        assert self.total is not None
        s.write("fmla $0.4s, {0}.4s, {1}.4s", self.total, scale)
        before = []
        if self.style.in_order:
            before = in_order_start(self.pointer)
        if self.style.slots:
            codes = self.pointer["codes"]
            before = [f"add x{x}, {codes}, #{at}" for at, x in self.addresses.items()]
        count, order = registers(self.bits, self.style), filled if self.style.slots else None
        return before + s.lines(count, *self.style.order(self.bits), order)

    def load(self, name: str, offset: int) -> Value:
        """A vector; in order by base and register, which takes as long as other instructions."""
        if self.style.in_order:
            return self.code.make(in_order_load(name, self.pointer[name], offset))
        return self.code.make(f"ldr {{d:q}}, [{self.pointer[name]}, #{offset}]")

    def load_codes(self, quad: int, count: int, first: int = 0) -> list[Value]:
        """Some vectors of a quad."""
        base = quad * quad_bytes(self.bits) + 16 * first
        if not self.style.slots:
            return [self.load("codes", base + 16 * i) for i in range(count)]
        names = ", ".join(f"{{d{i}}}.16b" for i in range(count))
        at = self.pointer["codes"]
        if base:
            at = f"x{self.addresses.setdefault(base, SCRATCH[len(self.addresses)])}"
        return self.code.make_run(f"ld1 {{{{{names}}}}}, [{at}]", count)

    def load_extra(self, quad: int, group: int) -> tuple[Value, Callable[[], Value]]:
        """What the sums of a group begin at, and how to get the other half of `extra`."""
        offset, sve = 4 * EXTRA * (4 * quad + group), self.style.sve
        if self.style.slots and self.bits < 4:
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

    def multiply(self, quad: int, tables: list[Value], index: dict[int, list[Value]]) -> None:
        """Products of some groups, and their scales.

        Parameters
        ----------
        quad : int
        tables : list of Value
        index : mapping
            Group to its four vectors of entries.
        """
        s = self.code
        extra = {g: self.load_extra(quad, g) for g in index}
        x = {g: self.load("x", 64 * quad + 16 * g) for g in index}
        sums = {g: start for g, (start, _) in extra.items()}
        waiting: list[dict[int, Value]] = []
        for i in range(5):
            if i < 4:
                waiting.append({g: self.lookup(tables, four[i]) for g, four in index.items()})
            if i:  # the vectors that were looked up before these
                for g, value in waiting.pop(0).items():
                    text = f"sdot {{d}}.4s, {{1}}.16b, {{2}}.4b[{i - 1}]"
                    sums[g] = s.change(text, sums[g], value, x[g])
        subs = {g: self.sub(quad, g) for g in index}
        for g, (_, other) in extra.items():
            self.add(g, sums[g], subs[g], other())

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

    def place(self, at: int) -> Value:
        """Some `sub_places`."""
        return self.constant[f"place{at}"]

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
        s = self.code
        if quad % 2 == 0:
            index = self.load("index", 0)
            text = f"zip{quad // 2 + 1} {{d}}.16b, {{0}}.16b, {{0}}.16b"
            self.doubled = s.make(text, index)
        spread = s.make(f"zip{quad % 2 + 1} {{d}}.16b, {{0}}.16b, {{0}}.16b", self.doubled)
        if self.bits == 2:
            self.quad2(quad, spread)
        else:
            self.quad4(quad, spread)

    def quad2(self, quad: int, books: Value) -> None:
        """Products of a quad of 2-bit codes."""
        s, c = self.code, self.constant
        for parity, (mnemonic, table) in enumerate((("bit", "table1"), ("bif", "table0"))):
            text = mnemonic + " {d}.16b, {1}.16b, {2}.16b"
            merged = [s.change(text, v, books, c["mask"]) for v in self.load_codes(quad, 4)]
            low = [s.make("and {d}.16b, {0}.16b, {1}.16b", m, c["nibble"]) for m in merged]
            high = [s.change("ushr {d}.16b, {0}.16b, #4", m) for m in merged]
            self.multiply(quad, [c[table]], {parity: low, parity + 2: high})

    def quad4(self, quad: int, spread: Value) -> None:
        """Products of what takes a quad's place where codes have 4 bits."""
        s = self.code
        tables = [v for n, v in self.constant.items() if n.startswith("table")]
        for even in (0, 2):
            codes = self.load_codes(quad, 4, 2 * even)
            odd = [s.make("ushr {d}.16b, {0}.16b, #4", v) for v in codes]
            index = {}
            for group, vectors in ((even, codes), (even + 1, odd)):
                book = self.book(spread, group)
                index[group] = [s.change("sli {d}.16b, {1}.16b, #4", v, book) for v in vectors]
            self.multiply(quad, tables, index)

    def book(self, spread: Value, group: int) -> Value:
        """The rows' books of a group, four times each."""
        s = self.code
        moved = s.make(f"ushr {{d}}.16b, {{0}}.16b, #{2 * group}", spread) if group else spread
        if group == 3:
            return moved
        return s.make("and {d}.16b, {0}.16b, {1}.16b", moved, self.constant["mask"])

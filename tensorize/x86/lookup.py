"""Dot products with values looked up in registers, on x86.

Sixteen values are one ``pshufb``; 32 are two and a blend by bit 4 of the index, 64 four and three
blends. With VBMI ``vpermb`` looks up 64 values in one 512-bit register. Three-bit codes of four
codebooks take the blend by their own high bit: its field needs no mask then, only a shift that
brings the bit to the byte's top, which is all that a blend looks at. The other two bits stand above
the codebook's number, which thus is never shifted.

``vpmaddubsw`` adds two products to an int16 without saturation where the values are at most 127
(2 * 127 * 127 = 32258), and two of its results can be summed where they are at most 64
(4 * 64 * 127 = 32512); then ``vpmaddwd`` widens. ``vpdpbusd`` has no such limit. Sources: Intel 64
and IA-32 Software Developer's Manual, volume 2 (PSHUFB, VPERMB, PBLENDVB, PMADDUBSW, VPDPBUSD);
LLVM's IntrinsicsX86.td for the names.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Expr, llvm, prefetch, shuffled
from apq_tvm.tensorize.meaning.packed_dot import LookupDot
from apq_tvm.tensorize.meaning.scaffold import Bound, bound_pair
from apq_tvm.tensorize.pairs.packed_dot import decoded
from apq_tvm.tensorize.registry import register
from apq_tvm.tensorize.x86.dot import DotInstruction, add_products
from apq_tvm.tensorize.x86.vectors import masked, shifted

MOST_ENTRIES = 64
"""Values that stay in registers."""

_INT16_SUMS_TOP = 64
"""Largest value of which two vpmaddubsw results fit one int16."""


def lookup_intrinsic(
    instruction: DotInstruction,
    dot: LookupDot,
    top: int,
    vbmi: bool = False,
    ahead: int = 0,
) -> str:
    """Register (once) and name the dot product of one unit.

    Parameters
    ----------
    instruction : DotInstruction
    dot : LookupDot
        Its rows must be the instruction's.
    top : int
        Largest value in the table, at most 127.
    vbmi : bool
        Whether there is ``vpermb`` on 512-bit vectors.
    ahead : int
        Bytes ahead of the unit to prefetch, 0 for none.

    Returns
    -------
    str
        The intrinsic's name.
    """
    unit = dot.unit
    permute = vbmi and unit.rows == 16 and dot.entries > 16
    name = f"apq_{instruction.name}_{dot.m}x{unit.rows}x32_s8lut{unit.bits}b{dot.books}s32"
    name += f"_{'vpermb' if permute else 'pshufb'}_t{top}"
    name += ("_g16" if unit.groups == 2 else "") + (f"_pf{ahead}" if ahead else "")

    def implement(o: Bound) -> None:
        prefetch(o.codes, unit.nbytes, ahead)
        tables = _permute_table(o) if permute else _shuffle_tables(o)
        for group in range(unit.groups):
            book = _book(o, group)

            def value(vector: int, book: Expr = book) -> Expr:
                return _value(o, tables, permute, vector, book)

            add_products(instruction, o, group, value, 2 if top <= _INT16_SUMS_TOP else 1)

    return register(name, lambda: bound_pair(dot, dot.meaning, implement))


def decode_intrinsic(dot: LookupDot, vbmi: bool = False) -> str:
    """Register (once) and name the lookup of one unit's values, added to bytes that are 0.

    Parameters
    ----------
    dot : LookupDot
    vbmi : bool
        Whether there is ``vpermb`` on 512-bit vectors.

    Returns
    -------
    str
        The intrinsic's name.
    """
    unit = dot.unit
    permute = vbmi and unit.rows == 16 and dot.entries > 16
    name = f"apq_{'vpermb' if permute else 'pshufb'}_{unit.rows}x32_lut{unit.bits}b{dot.books}u8"

    def implement(o: Bound) -> None:
        tables = _permute_table(o) if permute else _shuffle_tables(o)
        for group in range(unit.groups):
            book = _book(o, group)
            for vector in range(group * unit.vectors, (group + 1) * unit.vectors):
                size = unit.vector_bytes
                before = o.acc.vload([vector, 0, 0], f"uint8x{size}")
                value = before + _value(o, tables, permute, vector, book)
                b.buffer_store(o.acc, value, [vector, 0, tirx.Ramp(0, 1, size)])

    name += "_g16" if unit.groups == 2 else ""
    return register(name, lambda: bound_pair(dot, dot.values, implement))


def _whole_table(o: Bound) -> Expr:
    zero = tirx.const(0, "int64")
    return o.table.vload([zero], f"uint8x{o.dot.entries}")


def _books_below(o: Bound) -> bool:
    """Whether the index is the codebook below two bits of the code, so that neither is shifted.

    So with four codebooks of codes of 2 bits, or of 3 whose high bit, a field of its own, chooses
    between two tables.
    """
    return o.dot.books == 4 and o.dot.unit.bits in (2, 3)


def _shuffle_tables(o: Bound) -> list[Expr]:
    """Sixteen values each, repeated in every 128 bits; fewer are repeated within."""
    dot, unit = o.dot, o.dot.unit
    table, lanes = _whole_table(o), [i % 16 for i in range(unit.vector_bytes)]
    parts = range(max(1, dot.entries // 16))
    if _books_below(o):
        size = 1 << unit.bits
        orders = [[i % 4 * size + 4 * high + i // 4 for i in lanes] for high in parts]
    else:
        orders = [[(16 * part + i) % dot.entries for i in lanes] for part in parts]
    return [shuffled(table, dot.entries, order) for order in orders]


def _permute_table(o: Bound) -> list[Expr]:
    """All values in 64 bytes, repeated where there are fewer."""
    return [shuffled(_whole_table(o), o.dot.entries, [i % o.dot.entries for i in range(64)])]


def _book(o: Bound, group: int) -> Expr | None:
    """Codebook of every row, in each of the row's four bytes; None if there is one codebook."""
    if "book" not in o.arrays:
        return None
    unit, zero = o.dot.unit, tirx.const(0, "int64")
    at = [tirx.const(group, "int64"), zero] if unit.groups > 1 else [zero]
    books = o.book.vload(at, f"uint8x{unit.rows}")
    return shuffled(books, unit.rows, [i // 4 for i in range(unit.vector_bytes)])


def _value(o: Bound, tables: list[Expr], permute: bool, vector: int, book: Expr | None) -> Expr:
    """uint8 [4R]: what the codes of one vector stand for."""
    unit = o.dot.unit
    size = unit.vector_bytes
    if _books_below(o) and not permute:
        index = tirx.bitwise_or(_two_bits_up(o, vector), book)
        if unit.bits == 2:
            return _pshufb(tables[0], index, size)
        _, high_shift = unit.fields[1]
        at = tirx.const(size * high_shift, "int64")
        plane = o.codes.vload([at], f"uint8x{size}")  # bit t of every byte is vector t's
        return _blend(tables[0], tables[1], index, shifted(plane, 7 - vector), size)
    index = decoded(unit, o.codes, vector)
    if book is not None:
        index = tirx.bitwise_or(index, _scaled(book, unit.bits, size))
    if permute:
        return llvm(f"uint8x{size}", "llvm.x86.avx512.permvar.qi.512", tables[0], index)
    if len(tables) == 1:
        return _pshufb(tables[0], index, size)
    upper = shifted(index, 3)  # bit 4 at the top
    if len(tables) == 2:
        return _blend(tables[0], tables[1], index, upper, size)
    halves = [_blend(tables[i], tables[i + 1], index, upper, size) for i in (0, 2)]
    return _choose(halves[0], halves[1], shifted(index, 2), size)


def _two_bits_up(o: Bound, vector: int) -> Expr:
    """The two low bits of a vector's codes, at bits 2 and 3."""
    size = o.dot.unit.vector_bytes
    (width, shift), *_ = o.dot.unit.fields
    assert (width, shift) == (2, 0)
    part = o.codes.vload([tirx.const(size * (vector % 2), "int64")], f"uint8x{size}")
    return masked(shifted(part, 2 - vector // 2 * 2), 0x0C)


def _scaled(book: Expr, bits: int, size: int) -> Expr:
    return tirx.shift_left(book, tirx.Broadcast(tirx.const(bits, "uint8"), size))


def _pshufb(table: Expr, index: Expr, size: int) -> Expr:
    """Bits 0..3 of the index choose; bit 7 must be 0."""
    name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[size]
    return llvm(f"uint8x{size}", f"llvm.x86.{name}", table, index)


def _blend(low: Expr, high: Expr, index: Expr, choice: Expr, size: int) -> Expr:
    return _choose(_pshufb(low, index, size), _pshufb(high, index, size), choice, size)


def _choose(low: Expr, high: Expr, choice: Expr, size: int) -> Expr:
    """`high` where the top bit of `choice` is set: a vpblendvb, or a mask register's blend."""
    signed = tirx.reinterpret(f"int8x{size}", choice)
    zero = tirx.Broadcast(tirx.const(0, "int8"), size)
    return tirx.Select(signed < zero, high, low)

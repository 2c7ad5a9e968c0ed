"""Records of super-blocks: everything a row block needs of K, in the order it is read.

A decode kernel waits for memory, and every array it walks through is one more stream of cache lines
to keep in flight. So codes, sub-scales, minima and scales of R rows lie in one array: per
super-block up to four *chunks* of 64 columns, then the scales::

    chunk:  subs [2, R]   byte u of a row: sub-scales of k 32u..32u+15 (low nibble) and 32u+16..
            mins [2, R]   the same of minima
            codes         vectors of R rows x 4 bytes, below
    scales: [2, R]        low bytes, then high bytes, of the float16 scales
            [2, R]        and of the minima's

Group g of a chunk (16 columns) has k ``16 g + 4 i + c`` of a row in byte c of vector i at bits 2g
and 2g + 1. A mask takes a group's codes out where they stand, 4^g too large: the shift that brings
them down is a factor of the group's sum. Three-bit codes have their high bits in two more vectors:
those of i are in vector 4 + i // 2, at bit 2g + 2 + i % 2 for g < 3 and at bit i % 2 for g = 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand

CHUNK = 64
"""Columns of a chunk."""

GROUP = 16
"""Columns that share a sub-scale and a minimum."""

GROUPS = CHUNK // GROUP
"""Groups of a chunk."""

SUPER = 256
"""Columns that share two float16 scales."""


def high_bit(group: Expr, i: Expr) -> Expr:
    """Which bit of its byte the high bit of a 3-bit code is, for integers or expressions."""
    return (2 * group + 2) % 8 + i % 2


@dataclass(frozen=True)
class Records:
    """Where things lie in the records of one row block.

    Parameters
    ----------
    bits : int
        Of a code, 2 or 3.
    rows : int
        R.
    """

    bits: int
    rows: int

    @property
    def vector(self) -> int:
        """Bytes of a vector of codes."""
        return 4 * self.rows

    @property
    def codes(self) -> int:
        """Byte of a chunk where its codes start."""
        return 4 * self.rows

    @property
    def chunk(self) -> int:
        """Bytes of a chunk."""
        return self.codes + self.vector * (4 if self.bits == 2 else 6)

    @property
    def scales(self) -> int:
        """Bytes of the scales of a super-block."""
        return 4 * self.rows

    @property
    def record(self) -> int:
        """Bytes of a whole super-block."""
        return SUPER // CHUNK * self.chunk + self.scales

    def nbytes(self, k: int) -> int:
        """Bytes of a row block of `k` columns."""
        chunks, supers = -(-k // CHUNK), -(-k // SUPER)
        return chunks * self.chunk + supers * self.scales

    def chunk_at(self, k: Expr) -> Expr:
        """Byte of a row block where the chunk of column `k` starts."""
        return k // SUPER * self.record + k % SUPER // CHUNK * self.chunk

    def scales_at(self, span: Expr, nbytes: int) -> Expr:
        """Byte of a row block of `nbytes` where the scales of super-block `span` start."""
        from tvm import tirx

        # The last super-block may have fewer chunks in front of its scales.
        whole = span * self.record + (self.record - self.scales)
        return tirx.min(whole, tirx.const(nbytes - self.scales, str(whole.ty)))

    def code(self, load: Load, r: Expr, k: Expr) -> Expr:
        """int32 code of row `r`, column `k` of a chunk, whose bytes `load` gives."""
        from tvm import tirx

        g, i, byte = k // GROUP, k % GROUP // 4, r * 4 + k % 4

        def field(vector: Expr, shift: Expr, width: int) -> Expr:
            down = tirx.shift_right(
                load(self.codes + vector * self.vector + byte), shift.astype("uint8")
            )
            return tirx.bitwise_and(down, tirx.const((1 << width) - 1, "uint8")).astype("int32")

        code = field(i, 2 * g, 2)
        if self.bits == 2:
            return code
        return code + field(4 + i // 2, high_bit(g, i), 1) * tirx.const(4, "int32")

    def small(self, load: Load, r: Expr, k: Expr, least: bool) -> Expr:
        """uint8 sub-scale, or minimum, of the group of column `k` of a chunk."""
        from tvm import tirx

        byte = load(k // (2 * GROUP) * self.rows + r + (2 * self.rows if least else 0))
        shift = (k // GROUP % 2 * 4).astype("uint8")
        return tirx.bitwise_and(tirx.shift_right(byte, shift), tirx.const(15, "uint8"))

    def scale(self, load: Load, r: Expr, least: bool) -> Expr:
        """float32 scale, or scale of minima, of a row, from the bytes of the scales."""
        from tvm import tirx

        first = 2 * self.rows if least else 0
        low, high = (load(first + i * self.rows + r).astype("uint16") for i in range(2))
        both = tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(8, "uint16")))
        return tirx.reinterpret("float16", both).astype("float32")


@dataclass(frozen=True)
class RecordDot:
    """Products of a chunk of a row block with rows of x: two sums per row, before the scales.

    And the end of a super-block, where they are scaled.

    Parameters
    ----------
    records : Records
    m : int
        Rows of x.
    k : int
        Columns multiplied: 64, or 32 of the last chunk.
    """

    records: Records
    m: int
    k: int = CHUNK

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of rows of x, left out where there is one."""
        return (self.m,) if self.m > 1 else ()

    @property
    def meaning(self) -> Meaning:
        """Operands ``chunk``, ``x``, ``xs``, ``factors``, which the meaning ignores
        (`apq_tvm.ops.activations.factors`), and ``acc`` float32 [2, m, R]: which sum, 0 with codes
        and sub-scales, 1 with minima."""
        many, groups, rec = self.m > 1, self.k // GROUP, self.records
        shape = (2, *self.lead, rec.rows)
        operands = (
            Operand("chunk", (rec.chunk,), "uint8", rec.rows),
            Operand("x", (*self.lead, self.k), "int8", 4, many),
            Operand("xs", (*self.lead, groups), "float32", 4, many),
            Operand("factors", (*self.lead, groups, 2), "float32", 4, many, 2),
            Operand("acc", shape, "float32", 4 * rec.rows),
        )
        return Meaning("dot", operands, shape, (self.k,), self._product)

    def _product(self, axes: Sequence[Expr], chunk: Load, x: Load, xs: Load, factors: Load) -> Expr:
        from tvm import tirx

        which, *m, r, k = axes
        rec = self.records
        sub, least = (rec.small(chunk, r, k, b).astype("int32") for b in (False, True))
        first = rec.code(chunk, r, k) * sub
        value = tirx.Select(which == tirx.const(0, str(which.ty)), first, least)
        product = value * x(*m, k).astype("int32")
        return product.astype("float32") * xs(*m, k // i64(GROUP))

    @property
    def scaling(self) -> Meaning:
        """Two totals [2, m, R], scaled, are added to the sums [m, R]: ``scales``, ``totals``,
        ``acc``."""
        rec, rows = self.records, self.records.rows
        shape = (*self.lead, rows)
        operands = (
            Operand("scales", (rec.scales,), "uint8", rows),
            Operand("totals", (2, *shape), "float32", 4 * rows),
            Operand("acc", shape, "float32", 4 * rows),
        )
        return Meaning("scale", operands, shape, (), self._scaled)

    def _scaled(self, axes: Sequence[Expr], scales: Load, totals: Load) -> Expr:
        total, least = (
            totals(i, *axes) * self.records.scale(scales, axes[-1], i == 1) for i in range(2)
        )
        return total - least

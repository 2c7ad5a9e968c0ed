"""What products with looked up weights share on Arm: operands of a span of 4 rows, and sub-scales.

A sub-scale s of 4 bits is put by ``tbl`` into the mantissa of 2^-97, so that one ``fmla`` makes
``2^-104 s xs = 2^-104 (128 + s) xs - 2^-97 xs`` of it, exact but for its one rounding.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.lookup import BYTES, kept, masked, shifted, table_lookup
from apq_tvm.tensorize.exprs import Expr, shuffled, splat
from apq_tvm.tensorize.meaning.spans.lookup import ROWS, SpanOperands

_HIGH_BYTE = 12
"""Where a vector with sub-scales has the high byte of 2^-97; bytes 8 to 11 are 0."""


def instruction_name(fused: bool, sve: bool) -> str:
    """The part of an intrinsic's name that says what it needs."""
    return ("sdot" if fused else "smull") + ("_sve" if sve else "")


def fma(a: Expr, c: Expr, plus: Expr) -> Expr:
    """float32 [4]: a product and a sum with one rounding."""
    return tirx.call_llvm_pure_intrin("float32x4", "llvm.fma", a, c, plus)


def start_of(o: SpanOperands, row: int, group: Any) -> Expr:
    """`MAGIC` in four lanes."""
    return tirx.reinterpret("int32x4", o.extra.vload(o.at(row, group, 0), "float32x4"))


def x_of(o: SpanOperands, row: int, k: Any) -> Expr:
    """int8 [16] activations from column k on."""
    return o.x.vload(o.at(row, k), "int8x16")


def sums_of(o: SpanOperands, row: int) -> Expr:
    """float32 [4]: the sums so far of one row of x."""
    return o.acc.vload(o.at(row, 0), "float32x4")


def store_sums(o: SpanOperands, row: int, value: Expr) -> None:
    """Store what `sums_of` loads."""
    b.buffer_store(o.acc, value, o.at(row, tirx.Ramp(tirx.const(0, "int64"), 1, ROWS)))


class Totals:
    """float32 [4] of every row of x: a span's sums before its scale."""

    def __init__(self, o: SpanOperands) -> None:
        self._o, self._rows = o, range(o.dot.m)
        self._buffer = b.alloc_buffer((o.dot.m, ROWS), "float32", align=16)
        for row in self._rows:
            self._store(row, splat(0.0, "float32", 4))

    def _store(self, row: int, value: Expr) -> None:
        b.buffer_store(self._buffer, value, [row, tirx.Ramp(0, 1, ROWS)])

    def _load(self, row: int) -> Expr:
        return self._buffer.vload([row, 0], "float32x4")

    def add(self, row: int, a: Expr, c: Expr) -> None:
        """Add a product."""
        self._store(row, fma(a, c, self._load(row)))

    def finish(self) -> None:
        """Add them, scaled, to the sums."""
        scale = self._o.scales.vload([0], "float16x4").astype("float32x4")
        for row in self._rows:
            store_sums(self._o, row, fma(self._load(row), scale, sums_of(self._o, row)))


class Order:
    """uint8 [16] for `table_lookup`, which goes on by the bytes of four rows."""

    def __init__(self, order: list[int]) -> None:
        self._buffer = b.alloc_buffer((BYTES,), "uint8", align=16)
        self._set(vector_constant(order))

    def _set(self, order: Expr) -> None:
        b.buffer_store(self._buffer, order, [tirx.Ramp(0, 1, BYTES)])

    def load(self) -> Expr:
        """Where it is."""
        return self._buffer.vload([0], "uint8x16")

    def advance(self) -> None:
        """Go on by four bytes."""
        self._set(self.load() + splat(ROWS, "uint8"))


def tables_of(o: SpanOperands, orders: list[list[int]]) -> list[Expr]:
    """int8 [16] each: entries of the table in these orders, less the offset."""
    entries = o.dot.entries
    stored = o.arrays["table"].vload([0], f"uint8x{entries}")
    centred = tirx.reinterpret(f"int8x{entries}", stored) - splat(o.dot.offset, "int8", entries)
    return [shuffled(centred, entries, order) for order in orders]


def vector_constant(values: list[int]) -> Expr:
    """uint8 [16]."""
    return tirx.Shuffle([tirx.const(v, "uint8") for v in values], list(range(16)))


def unsigned(vector: Expr) -> Expr:
    """The same 16 bytes as uint8."""
    return tirx.reinterpret("uint8x16", vector)


def load_low(buffer: Any, at: list[Expr], dtype: str) -> Expr:
    """uint8 [16]: 4 or 8 bytes of a buffer, and zeros above them."""
    size = 4 if dtype == "float32" else 8
    value = tirx.reinterpret(dtype, buffer.vload(at, f"uint8x{size}"))
    lanes = BYTES // size
    zeros = [tirx.const(0, dtype)] * (lanes - 1)
    return tirx.reinterpret("uint8x16", tirx.Shuffle([value, *zeros], list(range(lanes))))


def sub_nibbles(loaded: Expr) -> list[Expr]:
    """uint8 [16] twice: low and high nibbles of uint8 [8], and what `sub_float` needs besides."""
    above = [tirx.const(0 if at < _HIGH_BYTE else 255, "uint8") for at in range(8, BYTES)]
    high = tirx.Shuffle(above, list(range(8)))  # whose nibbles are the high byte of 2^-97
    packed = kept(tirx.Shuffle([loaded, high], [tirx.const(i, "int32") for i in range(BYTES)]))
    return [masked(packed, 15), shifted(packed, -4)]


def sub_float(nibbles: Expr, word: int) -> Expr:
    """float32 [4]: 128 plus the sub-scales in a word of one of `sub_nibbles`, times 2^-104."""
    zero = 2 * ROWS
    order = [at for r in range(ROWS) for at in (zero, zero, word * ROWS + r, _HIGH_BYTE)]
    return tirx.reinterpret("float32x4", table_lookup([nibbles], vector_constant(order)))

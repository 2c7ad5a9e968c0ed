"""Decoding of units to panels of int8 on Arm (`apq_tvm.tensorize.meaning.decoded`).

Codes are brought to the order of pairs while still packed, where that is fewer vectors
(`apq_tvm.tensorize.arm.gemm_panel`). Looked up planes are whole rows: 2 rows x 8 k take a zip of
64-bit lanes, 4 rows x 4 k a transpose of words.

Instructions: Arm Architecture Reference Manual, DDI 0487 (TBL, ZIP1, ZIP2, MLS, UMULL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.balance import code_vectors, quotients
from apq_tvm.tensorize.arm.gemm_panel import (
    centred,
    centred_pairs,
    row_bytes,
    unpacked_code,
    zipped_words,
)
from apq_tvm.tensorize.arm.lookup import inserted_left, kept, masked, merged, shifted, table_lookup
from apq_tvm.tensorize.arm.planes import lookups
from apq_tvm.tensorize.arm.spans.quads import (
    BOOK_ABOVE,
    BOOK_BELOW,
    ORDERS,
    books_of,
    split_index,
)
from apq_tvm.tensorize.exprs import Buffer, Expr, shuffled, splat
from apq_tvm.tensorize.meaning.codebook_quads import BOOKS, QUAD
from apq_tvm.tensorize.meaning.decoded import DecodedUnit, decode_pair
from apq_tvm.tensorize.meaning.decoded_formats import NIBBLES
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit
from apq_tvm.tensorize.meaning.mixed import TILE_K
from apq_tvm.tensorize.meaning.planes import PlanesStep
from apq_tvm.tensorize.registry import register

Buffers = Mapping[str, Buffer]

_BYTES = 16


def decode_intrinsic(unit: DecodedUnit, pairs: bool, sve: bool) -> str:
    """Register (once) and name ``apq_neon_decode_{unit}_{lanes or pairs}[_sve]``.

    Parameters
    ----------
    unit : DecodedUnit
    pairs : bool
        Order of the panel.
    sve : bool
        Whether there is SVE, whose lookup of one register is faster.
    """
    body = _BODIES[unit.kind]
    name = f"apq_neon_decode_{unit}_{'pairs' if pairs else 'lanes'}{'_sve' if sve else ''}"

    def emit(buffers: Buffers, out: Buffer) -> None:
        for (step, vector, half), value in body(pairs, sve, buffers, *unit.data):
            # 16 bytes over the last two axes, which are contiguous.
            column = 2 * vector + half if pairs else vector
            b.buffer_store(out, value, [step, column, 0, tirx.Ramp(0, 1, _BYTES)])

    return register(name, lambda: decode_pair(unit, pairs, emit))


Values = Iterator[tuple[tuple[int, int, int], Expr]]
"""(step along k, vector of rows, half of its rows in pairs) and 16 bytes of the panel."""


def _steps(pairs: bool, k: int = UNIT_K) -> list[tuple[int, int]]:
    """(step along k, half of the rows) of a unit."""
    return [(step, half) for step in range(k // (8 if pairs else 4)) for half in range(1 + pairs)]


def _rows(buffer: Buffer, pairs: bool, at: Any = 0) -> list[Expr]:
    """Bytes of 4 rows as `row_bytes` spreads them, by half."""
    packed = buffer.vload([at], "uint8x4")
    return [row_bytes(packed, pairs, half) for half in range(1 + pairs)]


def _signed(value: Expr) -> Expr:
    return tirx.reinterpret("int8x16", value)


def _uniform(pairs: bool, sve: bool, buffers: Buffers, unit: Unit, zeros: bool) -> Values:
    for step, half in _steps(pairs):
        some = None
        if zeros:
            group = [step // (unit.vectors // (1 + pairs))] if unit.groups > 1 else []
            some = row_bytes(buffers["zeros"].vload([*group, 0], "uint8x4"), pairs, half)
        if unit.run == 8:
            value = centred_pairs(unit, buffers["codes"], 2 * step + half, some)
        else:
            value = centred(unit, unpacked_code(unit, pairs, buffers["codes"], step, half), some)
        yield (step, 0, half), _signed(value)


def _table(pairs: bool, sve: bool, buffers: Buffers, offset: int) -> Values:
    table = _signed(buffers["table"].vload([0], "uint8x16")) - splat(offset, "int8")
    for step, half in _steps(pairs):
        code = unpacked_code(NIBBLES, pairs, buffers["codes"], step, half)
        yield (step, 0, half), table_lookup([table], code, sve)


def _super(pairs: bool, sve: bool, buffers: Buffers, unit: Unit) -> Values:
    # A step's columns are of one group: k below 16, or above.
    subs = [
        [kept(masked(whole, 15)), kept(shifted(whole, -4))]
        for whole in _rows(buffers["subs"], pairs)
    ]
    for step, half in _steps(pairs):
        code = unpacked_code(unit, pairs, buffers["codes"], step, half)
        yield (step, 0, half), _signed(code * subs[half][step // (2 if pairs else 4)])


def _books(pairs: bool, sve: bool, buffers: Buffers, bits: int, offset: int) -> Values:
    lookups = _BOOKS[bits](bits, offset, pairs, sve, buffers)
    per_group = 2 if pairs else 4
    for step, half in _steps(pairs, QUAD):
        yield (step, 0, half), lookups.value(step // per_group, step % per_group, half)


class _Books:
    """Lookups of 64 k with four codebooks."""

    def __init__(self, bits: int, offset: int, pairs: bool, sve: bool, buffers: Buffers) -> None:
        self.pairs, self.sve, self.codes = pairs, sve, buffers["codes"]
        self.books = [kept(rows) for rows in _rows(buffers["index"], pairs)]
        entries = BOOKS << bits
        stored = tirx.reinterpret(
            f"int8x{entries}", buffers["table"].vload([0], f"uint8x{entries}")
        )
        self._entries, self._centred = entries, stored - splat(offset, "int8", entries)
        self.tables = self.ordered_tables(list(range(entries)))

    def ordered_tables(self, order: list[int]) -> list[Expr]:
        """int8 [16] each: entries of the table."""
        firsts = range(0, len(order), _BYTES)
        return [shuffled(self._centred, self._entries, order[at : at + _BYTES]) for at in firsts]

    def register(self, i: int) -> Expr:
        """A vector of a quad."""
        return self.codes.vload([_BYTES * i], "uint8x16")

    def ordered(self, make: Callable[[int], Expr], step: int, half: int) -> Expr:
        """One of the vectors that `make` gives, or half of two."""
        value = _in_order(self.pairs, make, step, half)
        return kept(value) if self.pairs else value


class _Books2(_Books):
    def __init__(self, *operands: Any) -> None:
        super().__init__(*operands)
        self.tables = self.ordered_tables([i % 4 * 4 + i // 4 for i in range(_BYTES)]) + self.tables

    def value(self, group: int, step: int, half: int) -> Expr:
        """int8 [16] of a step and half of the rows."""
        even, codes = group % 2 == 0, self.ordered(self.register, step, half)
        both = kept(merged(0xCC if even else 0x33, codes, self.books[half]))
        index = shifted(both, -4) if group >= 2 else masked(both, 15)
        return table_lookup([self.tables[0 if even else 1]], index, self.sve)


class _Books3(_Books):
    def __init__(self, *operands: Any) -> None:
        super().__init__(*operands)
        self.merged = [[kept(each) for each in books_of(packed)] for packed in self.books]
        self.below = self.ordered_tables(ORDERS[1])

    def value(self, group: int, step: int, half: int) -> Expr:
        """int8 [16] of a step and half of the rows."""
        books = self.merged[half]
        if group == 1:
            code = self.ordered(self._apart, step, half)
            return self._looked_up(merged(BOOK_ABOVE, code, books[0]))
        codes = self.ordered(self.register, step, half)
        if group == 2:
            high = self.ordered(self._high, step, half)
            return self._looked_up(split_index(codes, high, books[2]))
        if group == 3:
            return self._looked_up(merged(BOOK_ABOVE, shifted(codes, -5), books[1]))
        return table_lookup(self.below, merged(BOOK_BELOW, codes, books[0]))

    def _looked_up(self, index: Expr) -> Expr:
        return table_lookup(self.tables, index)

    def _apart(self, i: int) -> Expr:
        return shifted(self.register(4 + i // 2), -2 - i % 2 * 3)

    def _high(self, i: int) -> Expr:
        return shifted(self.register(4 + i // 2), 2 - i % 2)


class _Books4(_Books):
    def value(self, group: int, step: int, half: int) -> Expr:
        """int8 [16] of a step and half of the rows."""
        book = masked(shifted(self.books[half], -2 * group), 3)
        per_group, per_unit = (2, 4) if self.pairs else (4, 8)
        at = group * per_group + step
        part = _Row(self.codes, at // per_unit)
        code = unpacked_code(NIBBLES, self.pairs, part, at % per_unit, half)
        return table_lookup(self.tables, inserted_left(code, book, 4))


_BOOKS: Mapping[int, type[_Books2 | _Books3 | _Books4]] = {2: _Books2, 3: _Books3, 4: _Books4}


class _Row:
    """One row of a buffer of two axes."""

    def __init__(self, buffer: Buffer, row: int) -> None:
        self._buffer, self._row = buffer, row

    def vload(self, at: list[Any], dtype: str) -> Expr:
        """Elements of the row."""
        return self._buffer.vload([self._row, *at], dtype)


def _in_order(pairs: bool, vector: Callable[[int], Expr], step: int, half: int) -> Expr:
    """One of the vectors of 4 rows x 4 k that `vector` gives, or halves of two."""
    if not pairs:
        return vector(step)
    return zipped_words(vector(2 * step), vector(2 * step + 1), half == 1)


def _balance(pairs: bool, sve: bool, buffers: Buffers, centre: int) -> Values:
    vectors, five = code_vectors(buffers["codes"]), splat(5, "uint8")
    for step, half in _steps(pairs):
        code = kept(_in_order(pairs, vectors.__getitem__, step, half))
        fifth, last = map(kept, quotients(code))
        digits = (code - fifth * five, fifth - last * five, last)
        for third, value in enumerate(digits):
            yield (step, third, half), _signed(value - splat(centre, "uint8"))


def _planes(pairs: bool, sve: bool, buffers: Buffers, bits: int, tables: int) -> Values:
    width, looked = 8 if pairs else 4, PlanesStep(bits, tables, UNIT_K, _BYTES, 0)
    planes, table = buffers["planes"], buffers["table"]
    for first in range(0, UNIT_K, _BYTES):
        rows = lookups(looked, planes, table, tirx.const(first, "int64"), sve)
        step = first // width
        if pairs:
            for r in range(0, 8, 2):
                for e in range(2):
                    value = _zip(rows[r], rows[r + 1], "int64", e == 1)
                    yield (step + e, r // 4, r % 4 // 2), value
            continue
        for v in range(2):
            for q, value in enumerate(_transposed(rows[4 * v : 4 * v + 4])):
                yield (step + q, v, 0), value


def _zip(first: Expr, second: Expr, lane: str, high: bool) -> Expr:
    """zip1 or zip2 of lanes of a type, int8 [16]."""
    lanes = 16 // (int(lane[3:]) // 8)
    both = [tirx.reinterpret(f"{lane}x{lanes}", v) for v in (first, second)]
    start = lanes // 2 if high else 0
    order = [side * lanes + start + i for i in range(lanes // 2) for side in range(2)]
    mixed = tirx.Shuffle(both, [tirx.const(i, "int32") for i in order])
    return tirx.reinterpret("int8x16", mixed)


def _transposed(rows: list[Expr]) -> list[Expr]:
    """Words of 4 rows x 16 k: 4 rows x 4 k each."""
    out = []
    for high in (False, True):
        even = _zip(rows[0], rows[1], "int32", high)
        odd = _zip(rows[2], rows[3], "int32", high)
        out += [_zip(even, odd, "int64", part) for part in (False, True)]
    return out


def _signs(pairs: bool, sve: bool, buffers: Buffers, bits: int, plane: int) -> Values:
    """0 where the bit is set, else -1; with the lowest bit set that is +1 and -1."""
    per_step = 8 if pairs else 4
    for step, half in _steps(pairs):
        k = step * per_step
        bytes_ = _rows(buffers["codes"], pairs, (k // 8 * bits + plane) * _BYTES)[half]
        bit = tirx.Shuffle(
            [tirx.const(1 << (k % 8 + i % per_step), "uint8") for i in range(_BYTES)],
            [tirx.const(i, "int32") for i in range(_BYTES)],
        )
        clear = tirx.EQ(tirx.bitwise_and(bytes_, bit), splat(0, "uint8"))
        yield (step, 0, half), tirx.Select(clear, splat(-1, "int8"), splat(1, "int8"))


def _offset(pairs: bool, sve: bool, buffers: Buffers, wide: bool) -> Values:
    zeros = [kept(rows) for rows in _rows(buffers["zeros"], pairs)]

    def vector(j: int) -> Expr:
        at, down = (j % 2 * 32, j // 2 * -4) if wide else (0, -2 * j)
        return shifted(buffers["codes"].vload([at], "uint8x16"), down)

    for step, half in _steps(pairs, TILE_K):
        code = masked(_in_order(pairs, vector, step, half), 15 if wide else 3)
        yield (step, 0, half), _signed(code - zeros[half])


_BODIES: dict[str, Callable[..., Values]] = {
    "uniform": _uniform,
    "table": _table,
    "super": _super,
    "books": _books,
    "balance": _balance,
    "planes": _planes,
    "signs": _signs,
    "offset": _offset,
}

"""Decoding of units to panels of int8 on Arm (`apq_tvm.tensorize.meaning.decoded`).

Codes are brought to the order of pairs while still packed, where that is fewer vectors
(`apq_tvm.tensorize.arm.gemm_panel`). Looked up planes are whole rows: 2 rows x 8 k take a zip of
64-bit lanes, 4 rows x 4 k a transpose of words.

Instructions: Arm Architecture Reference Manual, DDI 0487 (TBL, ZIP1, ZIP2, MLS, UMULL).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.arm.balance import code_vectors, quotients
from apq_tvm.tensorize.arm.gemm_panel import row_bytes, unpacked_code, zipped_words
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
from apq_tvm.tensorize.meaning.decoded import DecodedUnit, decode_pair
from apq_tvm.tensorize.meaning.decoded_formats import (
    NIBBLES,
    BalanceUnit,
    BooksUnit,
    OffsetUnit,
    PlanesUnit,
    SignsUnit,
    SuperUnit,
    TableUnit,
)
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
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
    body = _BODIES[type(unit)]
    name = f"apq_neon_decode_{unit}_{'pairs' if pairs else 'lanes'}{'_sve' if sve else ''}"

    def emit(buffers: Buffers, out: Buffer) -> None:
        body(unit, pairs, sve, buffers, out)

    return register(name, lambda: decode_pair(unit, pairs, emit))


def _store(out: Buffer, at: tuple[int, int], value: Expr, pairs: bool, half: int = 0) -> None:
    """16 bytes of the panel, over its last two axes: step along k and vector of rows."""
    step, vector = at
    column = 2 * vector + half if pairs else vector
    b.buffer_store(out, value, [step, column, 0, tirx.Ramp(0, 1, _BYTES)])


def _steps(pairs: bool) -> list[tuple[int, int]]:
    """(step along k, half of the rows) of a unit."""
    return [(step, half) for step in range(4 if pairs else 8) for half in range(1 + pairs)]


def _table(unit: TableUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    stored = tirx.reinterpret("int8x16", buffers["table"].vload([0], "uint8x16"))
    table = stored - splat(unit.offset, "int8")
    for step, half in _steps(pairs):
        code = unpacked_code(NIBBLES, pairs, buffers["codes"], step, half)
        _store(out, (step, 0), table_lookup([table], code, sve), pairs, half)


def _super(unit: SuperUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    packed = buffers["subs"].vload([0], "uint8x4")
    # A step's columns are of one group: k below 16, or above.
    subs = [
        [kept(masked(whole, 15)), kept(shifted(whole, -4))]
        for whole in (row_bytes(packed, pairs, half) for half in range(1 + pairs))
    ]
    for step, half in _steps(pairs):
        code = unpacked_code(unit.codes, pairs, buffers["codes"], step, half)
        group = step // (2 if pairs else 4)
        value = tirx.reinterpret("int8x16", code * subs[half][group])
        _store(out, (step, 0), value, pairs, half)


def _books(unit: BooksUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    lookups = _BOOKS[unit.bits](unit, pairs, sve, buffers)
    per_group = 2 if pairs else 4
    for group in range(4):
        for step in range(per_group):
            for half in range(1 + pairs):
                value = lookups.value(group, step, half)
                _store(out, (group * per_group + step, 0), value, pairs, half)


class _Books:
    """Lookups of 64 k with four codebooks."""

    def __init__(self, unit: BooksUnit, pairs: bool, sve: bool, buffers: Buffers) -> None:
        self.pairs, self.sve, self.codes = pairs, sve, buffers["codes"]
        packed = buffers["index"].vload([0], "uint8x4")
        self.books = [kept(row_bytes(packed, pairs, half)) for half in range(1 + pairs)]
        entries = unit.entries
        stored = tirx.reinterpret(
            f"int8x{entries}", buffers["table"].vload([0], f"uint8x{entries}")
        )
        self._entries, self._centred = entries, stored - splat(unit.offset, "int8", entries)
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
        if not self.pairs:
            return make(step)
        return kept(zipped_words(make(2 * step), make(2 * step + 1), half == 1))


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


def _balance(unit: BalanceUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    vectors, five = code_vectors(buffers["codes"]), splat(5, "uint8")
    for step, half in _steps(pairs):
        if pairs:
            code = zipped_words(vectors[2 * step], vectors[2 * step + 1], half == 1)
        else:
            code = vectors[step]
        code = kept(code)
        fifth, last = map(kept, quotients(code))
        digits = (code - fifth * five, fifth - last * five, last)
        for third, value in enumerate(digits):
            centred = tirx.reinterpret("int8x16", value - splat(unit.centre, "uint8"))
            _store(out, (step, third), centred, pairs, half)


def _planes(unit: PlanesUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    width, looked = 8 if pairs else 4, PlanesStep(unit.bits, unit.tables, UNIT_K, _BYTES, 0)
    planes, table = buffers["planes"], buffers["table"]
    for first in range(0, UNIT_K, _BYTES):
        rows = lookups(looked, planes, table, tirx.const(first, "int64"), sve)
        step = first // width
        if pairs:
            for r in range(0, 8, 2):
                for e in range(2):
                    value = _zip(rows[r], rows[r + 1], "int64", e == 1)
                    _store(out, (step + e, r // 4), value, True, r % 4 // 2)
            continue
        for v in range(2):
            for q, value in enumerate(_transposed(rows[4 * v : 4 * v + 4])):
                _store(out, (step + q, v), value, False)


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


def _signs(unit: SignsUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    """0 where the bit is set, else -1; with the lowest bit set that is +1 and -1."""
    per_step = 8 if pairs else 4
    for step, half in _steps(pairs):
        k = step * per_step
        packed = buffers["codes"].vload([unit.byte(k // 8)], "uint8x4")
        bytes_ = row_bytes(packed, pairs, half)
        bits = tirx.Shuffle(
            [tirx.const(1 << (k % 8 + i % per_step), "uint8") for i in range(_BYTES)],
            [tirx.const(i, "int32") for i in range(_BYTES)],
        )
        clear = tirx.EQ(tirx.bitwise_and(bytes_, bits), splat(0, "uint8"))
        value = tirx.Select(clear, splat(-1, "int8"), splat(1, "int8"))
        _store(out, (step, 0), value, pairs, half)


def _offsets(unit: OffsetUnit, pairs: bool, sve: bool, buffers: Buffers, out: Buffer) -> None:
    packed = buffers["zeros"].vload([0], "uint8x4")
    zeros = [kept(row_bytes(packed, pairs, half)) for half in range(1 + pairs)]
    mask = 15 if unit.wide else 3

    def vector(j: int) -> Expr:
        if unit.wide:
            return shifted(buffers["codes"].vload([j % 2 * 32], "uint8x16"), j // 2 * -4)
        return shifted(buffers["codes"].vload([0], "uint8x16"), -2 * j)

    for step in range(2 if pairs else 4):
        for half in range(1 + pairs):
            if pairs:
                code = zipped_words(vector(2 * step), vector(2 * step + 1), half == 1)
            else:
                code = vector(step)
            value = tirx.reinterpret("int8x16", masked(code, mask) - zeros[half])
            _store(out, (step, 0), value, pairs, half)


_BODIES: dict[type[DecodedUnit], Callable[..., None]] = {
    TableUnit: _table,
    SuperUnit: _super,
    BooksUnit: _books,
    BalanceUnit: _balance,
    PlanesUnit: _planes,
    SignsUnit: _signs,
    OffsetUnit: _offsets,
}

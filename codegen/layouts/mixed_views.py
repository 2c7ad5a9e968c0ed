"""Where kernels find what in the packed arrays of ``mixed24``: apart, or in one stream of records.

A *record* is everything that 16 rows, which share second-order scales, need but their outliers:
a decode kernel waits for memory, and every array it walks through is one more stream of cache lines
to keep in flight::

    low bytes of float16 super_scales [3T], their high bytes, uint8 super_zeros [3T]
    low bytes of float16 scales [16], their high bytes, uint8 zeros [16]
    padding to whole cache lines
    blocks of R rows, each T word rows: three 2-bit tiles, their zeros and sub-scales, a 4-bit tile

A word row takes 22R bytes: two of 16 rows are eleven cache lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apq_tvm.formats.mixed import SUPER
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.mixed import TRIPLE, triple_word, words_at
from apq_tvm.types import U8

Arrays = Mapping[str, Any]

_LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class MixedRecords:
    """Bytes of a record.

    Parameters
    ----------
    rows : int
        R.
    triples : int
        T, word rows.
    """

    rows: int
    triples: int

    @property
    def narrow(self) -> int:
        """Bytes of three 2-bit tiles with their zeros and sub-scales."""
        return words_at(self.rows) + 2 * self.rows

    @property
    def word(self) -> int:
        """Bytes of a word row."""
        return self.narrow + 8 * self.rows

    @property
    def header(self) -> int:
        """Bytes before the word rows."""
        return -(-(self.scales + 3 * SUPER) // _LINE) * _LINE

    @property
    def scales(self) -> int:
        """Byte where scales of 4-bit groups start."""
        return 3 * TRIPLE * self.triples

    @property
    def blocks(self) -> int:
        """Row blocks of a record."""
        return SUPER // self.rows

    @property
    def nbytes(self) -> int:
        """All of a record."""
        return self.header + self.blocks * self.triples * self.word

    def join(self, parts: Mapping[str, NDArray[Any]]) -> U8:
        """Records of arrays as `SplitViews` reads them, with as many row blocks as there are."""
        records = np.zeros((-(-len(parts["codes"]) // self.blocks), self.nbytes), np.uint8)
        at = 0
        for key in ("super_scales", "super_zeros", "scales", "zeros"):
            values = parts[key]
            if key in ("scales", "zeros"):
                values = self._records_of(values).reshape(len(records), SUPER)
            for plane in _planes(values):
                records[:, at : at + plane.shape[1]] = plane
                at += plane.shape[1]
        words = np.concatenate((parts["codes"], parts["wide_codes"]), axis=2)
        body = self._records_of(words)  # [NB, T, 22R]
        records[:, self.header :] = body.reshape(len(records), -1)
        return records

    def split(self, records: U8, blocks: int) -> dict[str, NDArray[Any]]:
        """Inverse of `join` for so many row blocks."""
        count, narrow = TRIPLE * self.triples, self.narrow
        at, end = self.scales, self.scales + 3 * SUPER
        flat = records[:, at:end].reshape(len(records), 3, self.blocks, self.rows)
        # [B, 3, 16 / R, R] -> [NB, 3, R]
        flat = flat.transpose(0, 2, 1, 3).reshape(-1, 3, self.rows)[:blocks]
        body = records[:, self.header :].reshape(-1, self.triples, self.word)[:blocks]
        return {
            "codes": body[:, :, :narrow],
            "wide_codes": body[:, :, narrow:],
            "super_scales": _halves(records[:, :count], records[:, count : 2 * count]),
            "super_zeros": records[:, 2 * count : 3 * count],
            "scales": _halves(flat[:, 0], flat[:, 1]),
            "zeros": flat[:, 2],
        }

    def _records_of(self, values: NDArray[Any]) -> NDArray[Any]:
        """[NB, ...] with row blocks of zeros at the end, for whole records."""
        missing = -len(values) % self.blocks
        return np.concatenate((values, np.zeros((missing, *values.shape[1:]), values.dtype)))


def _planes(values: NDArray[Any]) -> list[U8]:
    """Bytes, or low and high bytes of float16."""
    if values.dtype == np.uint8:
        return [values]
    words = values.view(np.uint16)
    return [(words & 255).astype(np.uint8), (words >> 8).astype(np.uint8)]


def _halves(low: U8, high: U8) -> NDArray[np.float16]:
    """float16 of low and high bytes."""
    return (low | high.astype(np.uint16) << 8).view(np.float16)


@dataclass(frozen=True)
class Place:
    """A stretch of the last axis of a buffer, from `start` on; called, it gives an element."""

    buffer: Any
    lead: tuple[Expr, ...]
    start: Expr

    def __call__(self, at: Expr) -> Expr:
        return self.buffer[(*self.lead, self.start + at)]


class SplitViews:
    """TensorIR expressions of what lies in arrays apart."""

    def __init__(self, arrays: Arrays, rows: int) -> None:
        self.arrays, self.rows = arrays, rows

    def narrow(self, block: Expr, of: Expr) -> Place:
        """A triple of 2-bit tiles with its zeros and sub-scales."""
        return Place(self.arrays["codes"], (block, of), 0)

    def wide(self, block: Expr, of: Expr) -> Place:
        """Codes of a 4-bit tile."""
        return Place(self.arrays["wide_codes"], (block, of), 0)

    def word(self, block: Expr, of: Expr, r: Expr) -> Expr:
        """int32: 16 bits of zeros and sub-scales of a triple and row."""
        return triple_word(self.narrow(block, of), self.rows, r)

    def words(self, block: Expr, of: Expr, first: Expr, rows: int) -> Expr:
        """The same of so many rows, a vector of uint16."""
        from tvm import tirx

        place = self.narrow(block, of)
        at = place.start + words_at(self.rows) + first * 2
        load = place.buffer.vload([*place.lead, at], f"uint8x{2 * rows}")
        return tirx.reinterpret(f"uint16x{rows}", load)

    def super_scale(self, block: Expr, j: Expr) -> Expr:
        """float32 second-order scale of 2-bit group `j`."""
        at = block * self.rows // SUPER, j
        return self.arrays["super_scales"][at].astype("float32")

    def super_zero(self, block: Expr, j: Expr) -> Expr:
        """int32 second-order zero."""
        return self.arrays["super_zeros"][block * self.rows // SUPER, j].astype("int32")

    def scale(self, block: Expr, r: Expr) -> Expr:
        """float32 scale of a row's 4-bit groups."""
        return self.arrays["scales"][block, r].astype("float32")

    def zero(self, block: Expr, r: Expr) -> Expr:
        """int32 zero point of a row's 4-bit groups."""
        return self.arrays["zeros"][block, r].astype("int32")

    def header(self, block: Expr) -> tuple[Place, int] | None:
        """What comes before a row block's word rows in one stream with them, and its bytes."""
        return None


class RecordViews(SplitViews):
    """The same of ``records``."""

    def __init__(self, arrays: Arrays, rec: MixedRecords) -> None:
        super().__init__(arrays, rec.rows)
        self.rec, self.records = rec, arrays["records"]

    def narrow(self, block: Expr, of: Expr) -> Place:
        return self._word(block, of, 0)

    def wide(self, block: Expr, of: Expr) -> Place:
        return self._word(block, of, self.rec.narrow)

    def super_scale(self, block: Expr, j: Expr) -> Expr:
        return self._half(block, j, TRIPLE * self.rec.triples)

    def super_zero(self, block: Expr, j: Expr) -> Expr:
        at = j + 2 * TRIPLE * self.rec.triples
        return self.records[self._record(block), at].astype("int32")

    def scale(self, block: Expr, r: Expr) -> Expr:
        return self._half(block, self._row(block, r, self.rec.scales), SUPER)

    def zero(self, block: Expr, r: Expr) -> Expr:
        at = self._row(block, r, self.rec.scales + 2 * SUPER)
        return self.records[self._record(block), at].astype("int32")

    def header(self, block: Expr) -> tuple[Place, int] | None:
        return Place(self.records, (self._record(block),), 0), self.rec.header

    def _record(self, block: Expr) -> Expr:
        return block // self.rec.blocks if self.rec.blocks > 1 else block

    def _word(self, block: Expr, of: Expr, start: int) -> Place:
        rec = self.rec
        at = of * rec.word + (rec.header + start)
        if rec.blocks > 1:
            at = at + block % rec.blocks * (rec.triples * rec.word)
        return Place(self.records, (self._record(block),), at)

    def _row(self, block: Expr, r: Expr, start: int) -> Expr:
        """Byte of one of 16 rows."""
        if self.rec.blocks > 1:
            start = block % self.rec.blocks * self.rows + start
        return r + start

    def _half(self, block: Expr, at: Expr, apart: int) -> Expr:
        """float32 of the low byte `at` and the high byte so many behind it."""
        from tvm import tirx

        low, high = (self.records[self._record(block), at + i].astype("uint16") for i in (0, apart))
        both = tirx.bitwise_or(low, tirx.shift_left(high, tirx.const(8, "uint16")))
        return tirx.reinterpret("float16", both).astype("float32")

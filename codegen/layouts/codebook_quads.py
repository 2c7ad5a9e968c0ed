"""The layout ``cb{bits}c4g16r4q64`` for vectors of 16 bytes: four codebooks, quads of 64 k.

``codes`` [NB, Q, 32 * bits] of quads (`apq_tvm.tensorize.meaning.codebook_quads` draws them),
``scales`` float16 [NB, S, 4], ``subs`` [NB, S, 32], ``index`` [NB, S, 16]: byte ``4 (q % 4) + r``
has the codebooks of the four groups of row r, quad q; ``table`` uint8 as in
`apq_tvm.codegen.layouts.codebook`. K is padded to whole quads, the arrays by span to whole spans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from apq_tvm.codegen.layouts.codebook import CodebookLayout
from apq_tvm.codegen.layouts.layout import NARROW, Details, Shapes
from apq_tvm.codegen.layouts.spans import Arrays
from apq_tvm.formats import codebook
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning import codebook_quads as books
from apq_tvm.types import U8, Array, QuantizedTensor, Scheme

ROWS = 4
"""R, rows of one block."""


@dataclass(frozen=True)
class CodebookQuads(CodebookLayout):
    """How one matrix with four codebooks lies in memory."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"cb([23])c4g16r4q64\Z")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Everything comes from the scheme."""
        return cls.choose(scheme, details, NARROW)

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """Of `NARROW` lanes alone; None for other schemes or vectors."""
        if scheme is None or scheme.family != codebook.NAME or lanes != NARROW:
            return None
        if (codebook.codebook_count(scheme), scheme.group_size) != (books.BOOKS, books.GROUP):
            return None
        return cls(scheme.bits, ROWS, books.GROUP) if scheme.bits in books.BITS else None

    @property
    def name(self) -> str:
        """``cb{bits}c4g16r4q64``."""
        return f"cb{self.bits}c4g16r4q64"

    def padded_k(self, k: int) -> int:
        """K rounded up to whole quads."""
        return -(-k // books.QUAD) * books.QUAD

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks, spans = self.row_blocks(n), self.spans(k)
        quads = self.padded_k(k) // books.QUAD
        return {
            "codes": ((blocks, quads, books.quad_bytes(self.bits)), "uint8"),
            "scales": ((blocks, spans, ROWS), "float16"),
            "subs": ((blocks, spans, 8 * books.SPAN_QUADS), "uint8"),
            "index": ((blocks, spans, ROWS * books.SPAN_QUADS), "uint8"),
            "table": ((self.entries,), "uint8"),
        }

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        k, spans = tensor.codes.shape[1], self.spans(tensor.codes.shape[1])
        table = tensor.tables["codebooks"].astype(np.int16).ravel() + self.offset
        return {
            "codes": self._pack_codes(self._by_row(tensor.codes, self.padded_k(k))),
            "scales": self.interleave(tensor.scales, spans),
            "subs": self._pack_subs(self._by_row(tensor.tables["subs"], 16 * spans)),
            "index": self._pack_index(self._by_row(tensor.tables["index"], 16 * spans)),
            "table": table.astype(np.uint8),
        }

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        groups = -(-k // self.group)
        tables = {
            "subs": self._rows(self._unpack_subs(arrays["subs"]), n, groups),
            "index": self._rows(self._unpack_index(arrays["index"]), n, groups),
            "codebooks": self._centroids(arrays),
        }
        codes = self._rows(self._unpack_codes(arrays["codes"]), n, k)
        scales = self.deinterleave(arrays["scales"], n, -(-k // self.span))
        return QuantizedTensor(codes, scales, None, scheme, tables)

    def _by_row(self, values: Array, width: int) -> U8:
        """[N, length] -> [NB, 4, width], padded with 0."""
        padded = np.zeros((self.row_blocks(len(values)) * ROWS, width), np.uint8)
        padded[: len(values), : values.shape[1]] = values
        return padded.reshape(-1, ROWS, width)

    @staticmethod
    def _rows(values: U8, n: int, width: int) -> U8:
        """Inverse of `_by_row`."""
        return np.ascontiguousarray(values.reshape(-1, values.shape[-1])[:n, :width])

    def _pack_codes(self, codes: U8) -> U8:
        """[NB, 4, Kp] -> [NB, Q, bytes]."""
        split = codes.reshape(len(codes), ROWS, -1, 4, 4, 4)  # [NB, row, quad, group, vector, k]
        quads = split.shape[2]
        packed = np.zeros((len(codes), quads, 2 * self.bits, ROWS, 4), np.uint8)
        for group in range(4):
            for vector in range(4):
                values = split[:, :, :, group, vector].transpose(0, 2, 1, 3)  # [NB, quad, row, k]
                for register, shift, width, down in books.parts(self.bits, group, vector):
                    part = values >> down & ((1 << width) - 1)
                    packed[:, :, register] |= (part << shift).astype(np.uint8)
        return packed.reshape(len(codes), quads, -1)

    def _unpack_codes(self, packed: Array) -> U8:
        """Inverse of `_pack_codes`."""
        quads = packed.reshape(*packed.shape[:2], -1, ROWS, 4)
        codes = np.zeros((len(packed), ROWS, packed.shape[1], 4, 4, 4), np.uint8)
        for group in range(4):
            for vector in range(4):
                for register, shift, width, up in books.parts(self.bits, group, vector):
                    part = quads[:, :, register] >> shift & ((1 << width) - 1)
                    codes[:, :, :, group, vector] |= (part << up).transpose(0, 2, 1, 3)
        return codes.reshape(len(packed), ROWS, -1)

    def _pack_index(self, index: U8) -> U8:
        """[NB, 4, 16 S] -> [NB, S, 16]."""
        split = index.reshape(len(index), ROWS, -1, books.SPAN_QUADS, 4)
        packed = np.zeros(split.shape[:-1], np.uint8)  # [NB, row, span, quad]
        for group in range(4):
            for shift, width, down in books.book_parts(self.bits, group):
                packed |= (split[..., group] >> down & ((1 << width) - 1)) << shift
        whole = packed.transpose(0, 2, 3, 1).reshape(len(index), split.shape[2], -1)
        return np.ascontiguousarray(whole)

    def _unpack_index(self, packed: Array) -> U8:
        """Inverse of `_pack_index`."""
        split = packed.reshape(*packed.shape[:2], books.SPAN_QUADS, ROWS).transpose(0, 3, 1, 2)
        index = np.zeros((*split.shape, 4), np.uint8)
        for group in range(4):
            for shift, width, up in books.book_parts(self.bits, group):
                index[..., group] |= (split >> shift & ((1 << width) - 1)) << up
        return index.reshape(len(packed), ROWS, -1)

    @staticmethod
    def _pack_subs(subs: U8) -> U8:
        """[NB, 4, 16 S] -> [NB, S, 32]."""
        split = subs.reshape(len(subs), ROWS, -1, books.SPAN_QUADS, 2, 2)
        packed = (split[..., 0] | split[..., 1] << 4).transpose(0, 2, 3, 4, 1)
        return np.ascontiguousarray(packed.reshape(len(subs), packed.shape[1], -1))

    @staticmethod
    def _unpack_subs(packed: Array) -> U8:
        """Inverse of `_pack_subs`."""
        split = packed.reshape(*packed.shape[:2], books.SPAN_QUADS, 2, ROWS)
        subs: U8 = np.stack([split & 15, split >> 4], -1).transpose(0, 4, 1, 2, 3, 5)
        return subs.reshape(len(packed), ROWS, -1)

    def _centroids(self, arrays: Mapping[str, Array]) -> Array:
        values = (arrays["table"].astype(np.int16) - self.offset).astype(np.int8)
        return values.reshape(self.codebooks, -1)

    def value(self, arrays: Arrays, block: Expr, lane: Expr, k: Expr) -> Expr:
        """What a weight's code stands for, as stored (`offset` too large), int32."""
        from tvm import tirx

        quad = k // books.QUAD
        code = books.code_of(
            self.bits, lambda at: arrays["codes"][block, quad, at], lane, k % books.QUAD
        )
        book = self.book(arrays, block, k // self.group, lane)
        code = code + tirx.shift_left(book, tirx.const(self.bits, "int32"))
        return arrays["table"][code].astype("int32")

    def sub(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr:
        """A group's sub-scale, uint8."""
        at = books.sub_byte(group % 16 // 4, group % 4, lane)
        return books.sub_of(arrays["subs"][block, group // 16, at], group % 4)

    def book(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr:
        """A group's codebook, int32."""
        byte = arrays["index"][block, group // 16, group % 16 // 4 * ROWS + lane]
        return books.book_of(self.bits, byte, group % 4)

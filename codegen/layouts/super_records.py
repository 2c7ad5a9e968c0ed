"""The layout ``W{bits}sr{R}c64`` of uniform super-blocks: one stream of records a row block.

``records`` uint8 [NB, bytes] (`apq_tvm.tensorize.meaning.super_records` draws them). Columns past K
have sub-scale and minimum 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from apq_tvm.codegen.layouts.layout import NARROW, Details, Shapes
from apq_tvm.codegen.layouts.spans import Arrays
from apq_tvm.codegen.layouts.superblock import SuperBlockLayout
from apq_tvm.formats.superblock import GROUP, NAME, SUPER
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.super_records import CHUNK, GROUPS, Records, high_bit
from apq_tvm.types import U8, Array, QuantizedTensor, Scheme

_SPAN_CHUNKS = SUPER * GROUP // CHUNK


@dataclass(frozen=True)
class SuperRecordsLayout(SuperBlockLayout):
    """How one matrix of uniform super-blocks lies in memory on devices with long vectors."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"W(\d)sr(\d+)c64\Z")

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """Of more than `NARROW` lanes; None for other schemes or vectors."""
        if scheme is None or scheme.family != NAME or lanes == NARROW:
            return None
        return cls(scheme.bits, lanes, GROUP)

    @property
    def name(self) -> str:
        """``W{bits}sr{R}c64``."""
        return f"W{self.bits}sr{self.rows}c64"

    @property
    def records(self) -> Records:
        """Where things lie."""
        return Records(self.bits, self.rows)

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        return {"records": ((self.row_blocks(n), self.records.nbytes(k)), "uint8")}

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        tables, rec = tensor.tables, self.records
        chunks = -(-k // CHUNK)
        small = [self._by_chunk(tables[key], GROUPS, chunks) for key in ("subs", "mins")]
        parts = [s[..., 0::2] | s[..., 1::2] << 4 for s in small]  # [NB, chunk, R, 2]
        codes = self._pack_codes(self._by_chunk(tensor.codes, CHUNK, chunks))
        blocks = self.row_blocks(n)
        body = np.concatenate(
            [*(p.transpose(0, 1, 3, 2).reshape(blocks, chunks, -1) for p in parts), codes], axis=2
        )  # [NB, chunk, bytes]
        scales = self._pack_scales([tensor.scales, tables["min_scales"]])  # [NB, span, 4R]
        out = []
        for span in range(scales.shape[1]):
            mine = body[:, span * _SPAN_CHUNKS : (span + 1) * _SPAN_CHUNKS]
            out += [mine.reshape(blocks, -1), scales[:, span]]
        records = np.ascontiguousarray(np.concatenate(out, axis=1))
        assert records.shape[1] == rec.nbytes(k)
        return {"records": records}

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        rec, chunks, blocks = self.records, -(-k // CHUNK), self.row_blocks(n)
        whole = arrays["records"]
        bodies, scales = [], []
        for span in range(-(-chunks // _SPAN_CHUNKS)):
            first, count = span * rec.record, min(_SPAN_CHUNKS, chunks - span * _SPAN_CHUNKS)
            end = first + count * rec.chunk
            bodies.append(whole[:, first:end].reshape(blocks, count, rec.chunk))
            scales.append(whole[:, end : end + rec.scales].reshape(blocks, 2, 2, self.rows))
        body = np.concatenate(bodies, axis=1)  # [NB, chunk, bytes]
        small = body[:, :, : rec.codes].reshape(blocks, chunks, 2, 2, self.rows)
        groups = -(-k // self.group)
        # [NB, chunk, which, byte, R, nibble] -> [NB, R, chunk, byte, nibble]
        nibbles = np.stack([small & 15, small >> 4], -1)
        subs, mins = (
            self._rows(part.transpose(0, 3, 1, 2, 4).reshape(-1, chunks * GROUPS), n, groups)
            for part in (nibbles[:, :, 0], nibbles[:, :, 1])
        )
        codes = self._rows(self._unpack_codes(body[:, :, rec.codes :]), n, k)
        halves = np.stack(scales, 1).astype(np.uint16)  # [NB, span, which, byte, R]
        values = (halves[:, :, :, 0] | halves[:, :, :, 1] << 8).view(np.float16)
        d, m = (
            np.ascontiguousarray(values[:, :, i].transpose(0, 2, 1).reshape(-1, len(scales))[:n])
            for i in range(2)
        )
        tables: dict[str, Array] = {"min_scales": m, "subs": subs, "mins": mins}
        return QuantizedTensor(codes, d, None, scheme, tables)

    def _by_chunk(self, values: Array, width: int, chunks: int) -> U8:
        """[N, length] -> [NB, chunk, R, width], padded with 0."""
        blocks = self.row_blocks(len(values))
        padded = np.zeros((blocks * self.rows, chunks * width), np.uint8)
        padded[: len(values), : values.shape[1]] = values
        split = padded.reshape(blocks, self.rows, chunks, width)
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3))

    @staticmethod
    def _rows(values: U8, n: int, width: int) -> U8:
        return np.ascontiguousarray(values[:n, :width])

    def _pack_codes(self, codes: U8) -> U8:
        """[NB, chunk, R, 64] -> [NB, chunk, bytes]."""
        split = codes.reshape(*codes.shape[:3], GROUPS, 4, 4)  # [NB, chunk, R, group, i, c]
        vectors = 4 if self.bits == 2 else 6
        packed = np.zeros((*codes.shape[:2], vectors, self.rows, 4), np.uint8)
        for group in range(GROUPS):
            for i in range(4):
                code = split[:, :, :, group, i]
                packed[:, :, i] |= (code & 3) << 2 * group
                if self.bits == 3:
                    packed[:, :, 4 + i // 2] |= code >> 2 << high_bit(group, i)
        return packed.reshape(*codes.shape[:2], -1)

    def _unpack_codes(self, packed: U8) -> U8:
        """Inverse of `_pack_codes`, as [NB * R, columns]."""
        vectors = packed.reshape(*packed.shape[:2], -1, self.rows, 4)
        blocks, chunks = packed.shape[:2]
        codes = np.zeros((blocks, self.rows, chunks, GROUPS, 4, 4), np.uint8)
        for group in range(GROUPS):
            for i in range(4):
                code = vectors[:, :, i] >> 2 * group & 3
                if self.bits == 3:
                    code = code | (vectors[:, :, 4 + i // 2] >> high_bit(group, i) & 1) << 2
                codes[:, :, :, group, i] = code.transpose(0, 2, 1, 3)
        return codes.reshape(blocks * self.rows, -1)

    def _pack_scales(self, scales: list[Array]) -> U8:
        """float16 [N, S], twice -> [NB, S, 4R]: low and high bytes of one, then of the other."""
        parts = []
        for values in scales:
            words = self.interleave(values, values.shape[1]).view(np.uint16)  # [NB, S, R]
            parts += [(words & 255).astype(np.uint8), (words >> 8).astype(np.uint8)]
        return np.concatenate(parts, axis=2)

    def _load(self, arrays: Mapping[str, object], block: Expr, first: Expr) -> Expr:
        records: Expr = arrays["records"]
        return lambda byte: records[block, first + byte]

    def value(self, arrays: Arrays, block: Expr, lane: Expr, k: Expr) -> Expr:
        """A weight's code, int32."""
        return self.value_of(arrays, block, lane, self.records.chunk_at(k), k % CHUNK)

    def value_of(self, arrays: Arrays, block: Expr, lane: Expr, chunk: Expr, k: Expr) -> Expr:
        """As `value`, in column `k` of the chunk that starts at byte `chunk`."""
        return self.records.code(self._load(arrays, block, chunk), lane, k)

    def sub(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr:
        """A group's sub-scale, uint8."""
        return self._small(arrays, block, group, lane, False)

    def minimum(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr:
        """A group's minimum, uint8."""
        return self._small(arrays, block, group, lane, True)

    def _small(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr, least: bool) -> Expr:
        rec, k = self.records, group * self.group
        return rec.small(self._load(arrays, block, rec.chunk_at(k)), lane, k % CHUNK, least)

    def scale(self, arrays: Arrays, block: Expr, span: Expr, lane: Expr) -> Expr:
        """A super-block's scale, float32."""
        return self._scale(arrays, block, span, lane, False)

    def min_scale(self, arrays: Arrays, block: Expr, span: Expr, lane: Expr) -> Expr:
        """A super-block's scale of minima, float32."""
        return self._scale(arrays, block, span, lane, True)

    def _scale(self, arrays: Arrays, block: Expr, span: Expr, lane: Expr, least: bool) -> Expr:
        rec = self.records
        first = rec.scales_at(span, int(arrays["records"].shape[1]))
        return rec.scale(self._load(arrays, block, first), lane, least)

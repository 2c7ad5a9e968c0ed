"""What layouts of formats with small groups share: interleaved codes, and nibbles per group.

Codes lie as in `apq_tvm.codegen.layouts.interleaved`: units of R rows x 32 k. A *span* is the
stretch of K that shares a float16 scale: a super-block of 16 groups, or one group. Per-group values
of few bits lie [NB, bytes, R]: byte i of a row holds those of consecutive groups, low bits first.

Kernels and the generic `weight` ask a layout for its values by the methods that `SpanLayout` lists,
so that they know properties, not formats::

    w = scale * sub * (value - offset) - min_scale * minimum
    value = table[code + book], or the code itself where there is no table
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.interleaved import InterleavedLayout
from apq_tvm.codegen.layouts.layout import Shapes, WeightLayout
from apq_tvm.errors import PackError
from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, decode
from apq_tvm.types import Array, QuantizedTensor, Scheme

Arrays = Mapping[str, Any]

LANES = (4, 8, 16)
"""Rows a unit may interleave."""


@dataclass(frozen=True)
class SpanLayout(WeightLayout):
    """How one matrix [N, K] lies in memory.

    Parameters
    ----------
    bits : int
        Of a code.
    rows : int
        R, rows interleaved: 4, 8 or 16.
    group : int
        Weights of a group: 16 or a multiple of 32.

    Raises
    ------
    PackError
        If the rows are none of these.
    """

    bits: int
    rows: int
    group: int

    span_groups: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.rows not in LANES:
            raise PackError(f"layout {self.name}: 4, 8 or 16 rows are possible")

    @property
    @abstractmethod
    def family(self) -> str:
        """`Scheme.family` of what it holds."""

    @property
    def span(self) -> int:
        """Weights along K that share a float scale."""
        return self.span_groups * self.group

    @property
    def unit(self) -> Unit:
        """A unit of codes as intrinsics describe it."""
        fields = tuple((f.width, f.shift) for f in self._codes.fields)
        return Unit(self.bits, self.rows, fields, 2 if self.group < UNIT_K else 1)

    @property
    def entries(self) -> int:
        """Values of the table, 0 if there is none."""
        return 0

    @property
    def offset(self) -> int:
        """What stored values are too large by, so that they are not negative."""
        return 0

    @property
    def unit_scale(self) -> float:
        """What every weight is multiplied by besides its scales."""
        return 1.0

    @property
    def minima(self) -> bool:
        """Whether groups have a minimum."""
        return False

    @property
    def _codes(self) -> InterleavedLayout:
        return InterleavedLayout(self.bits, self.rows)

    def padded_k(self, k: int) -> int:
        """K rounded up to whole units and whole groups."""
        step = max(UNIT_K, self.group)
        return -(-k // step) * step

    def groups(self, k: int) -> int:
        """Groups of a packed row."""
        return self.padded_k(k) // self.group

    def spans(self, k: int) -> int:
        """Spans of a packed row; the last one may be short."""
        return -(-self.padded_k(k) // self.span)

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks = self.row_blocks(n)
        units = self.padded_k(k) // UNIT_K
        return {
            "codes": ((blocks, units, self.unit.nbytes), "uint8"),
            "scales": ((blocks, self.spans(k), self.rows), "float16"),
            **self.more_shapes(blocks, k),
        }

    def more_shapes(self, blocks: int, k: int) -> Shapes:
        """Shapes of what there is besides codes and scales."""
        return {}

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        padded = np.zeros((n, self.padded_k(k)), np.uint8)
        padded[:, :k] = tensor.codes
        whole = QuantizedTensor(padded, np.zeros((n, 1), np.float16), None, Scheme(self.bits))
        return {
            "codes": self._codes.arrays(whole)["codes"],
            "scales": self.interleave(tensor.scales, self.spans(k)),
            **self.pack_more(tensor, k),
        }

    def pack_more(self, tensor: QuantizedTensor, k: int) -> dict[str, Array]:
        """The arrays of `more_shapes`."""
        return {}

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        scales = np.zeros((self.row_blocks(n), 1, self.rows), np.float16)
        codes = {"codes": arrays["codes"], "scales": scales}
        whole = self._codes.tensor(codes, n, self.padded_k(k), Scheme(self.bits))
        spans = -(-k // self.span)
        return QuantizedTensor(
            np.ascontiguousarray(whole.codes[:, :k]),
            self.deinterleave(arrays["scales"], n, spans),
            None,
            scheme,
            self.unpack_more(arrays, n, k),
        )

    def unpack_more(self, arrays: Mapping[str, Array], n: int, k: int) -> dict[str, Array]:
        """The tables of the tensor that `pack_more` was given."""
        return {}

    def interleave(self, values: Array, length: int) -> Array:
        """[N, G] -> [NB, length, R], padded with 0."""
        n, count = values.shape
        padded = np.zeros((self.row_blocks(n) * self.rows, length), values.dtype)
        padded[:n, :count] = values
        blocks = padded.reshape(-1, self.rows, length)
        return np.ascontiguousarray(blocks.transpose(0, 2, 1))

    def deinterleave(self, values: Array, n: int, count: int) -> Array:
        """[NB, length, R] -> [n, count]."""
        rows = values.transpose(0, 2, 1).reshape(-1, values.shape[1])
        return np.ascontiguousarray(rows[:n, :count])

    def small_shape(self, blocks: int, k: int, width: int) -> tuple[tuple[int, ...], str]:
        """Shape of per-group values of `width` bits."""
        return (blocks, -(-self.groups(k) // (8 // width)), self.rows), "uint8"

    def pack_small(self, values: NDArray[np.uint8], k: int, width: int) -> NDArray[np.uint8]:
        """[N, G] of `width` bits -> [NB, bytes, R]."""
        per_byte = 8 // width
        length = -(-self.groups(k) // per_byte) * per_byte
        blocks = self.interleave(values, length)
        split = blocks.reshape(len(blocks), -1, per_byte, self.rows)  # [NB, bytes, groups, R]
        shifts = (np.arange(per_byte) * width).astype(np.uint8)[:, None]
        packed: NDArray[np.uint8] = np.bitwise_or.reduce(split << shifts, axis=2).astype(np.uint8)
        return packed

    def unpack_small(self, packed: Array, n: int, k: int, width: int) -> NDArray[np.uint8]:
        """Inverse of `pack_small`."""
        per_byte = 8 // width
        shifts = (np.arange(per_byte) * width).astype(np.uint8)[:, None]
        split = (packed[:, :, None] >> shifts) & ((1 << width) - 1)
        whole = split.astype(np.uint8).reshape(len(packed), -1, self.rows)
        return self.deinterleave(whole, n, -(-k // self.group))

    def small(self, array: Any, block: Expr, group: Expr, lane: Expr, width: int) -> Expr:
        """One per-group value, as a uint8 expression."""
        from tvm import tirx

        per_byte = 8 // width
        byte = array[block, group // per_byte, lane]
        down = (group % per_byte * width).astype("uint8")
        return tirx.bitwise_and(tirx.shift_right(byte, down), tirx.const((1 << width) - 1, "uint8"))

    def sub(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's sub-scale, uint8; None if there is none."""
        return None

    def minimum(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's minimum, uint8; None if there is none."""
        return None

    def book(self, arrays: Arrays, block: Expr, group: Expr, lane: Expr) -> Expr | None:
        """A group's codebook, uint8; None if there is one or none."""
        return None

    def scale(self, arrays: Arrays, block: Expr, span: Expr, lane: Expr) -> Expr:
        """A span's scale, float32."""
        return arrays["scales"][block, span, lane].astype("float32")

    def min_scale(self, arrays: Arrays, block: Expr, span: Expr, lane: Expr) -> Expr:
        """A span's scale of minima, float32."""
        return arrays["min_scales"][block, span, lane].astype("float32")

    def value(self, arrays: Arrays, block: Expr, lane: Expr, k: Expr) -> Expr:
        """What a weight's code stands for, as stored (`offset` too large), int32."""
        from tvm import tirx

        codes, unit = arrays["codes"], k // UNIT_K
        vector, byte = k % UNIT_K // 4, lane * 4 + k % 4
        code = decode(self.unit, lambda at: codes[block, unit, at], vector, byte)
        if not self.entries:
            return code
        book = self.book(arrays, block, k // self.group, lane)
        if book is not None:
            code = code + tirx.shift_left(book.astype("int32"), tirx.const(self.bits, "int32"))
        return arrays["table"][code].astype("int32")

    def weight(self, arrays: Arrays, block: Expr, lane: Expr, k: Expr, bits: int = 0) -> Expr:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        from tvm import tirx

        group, span = k // self.group, k // self.span
        centred = self.value(arrays, block, lane, k) - tirx.const(self.offset, "int32")
        scale = self.scale(arrays, block, span, lane) * tirx.const(self.unit_scale, "float32")
        sub = self.sub(arrays, block, group, lane)
        if sub is not None:
            scale = scale * sub.astype("float32")
        value = centred.astype("float32") * scale
        least = self.minimum(arrays, block, group, lane)
        if least is None:
            return value
        return value - self.min_scale(arrays, block, span, lane) * least.astype("float32")

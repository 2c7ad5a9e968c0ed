"""The layouts of ``mixed24``: ``mixed24r{R}c64`` and ``mixed24r{R}c48``, R rows interleaved.

A *tile* is R rows x one group of 16 input channels, as four *vectors* of 4R bytes: byte ``4r + i``
of vector j is row r, channel 4j + i, the operand order of maddubs and vpdpbusd::

    2-bit tile, one load of 4R bytes:  bits 2j..2j+1 = v[j]
    4-bit tile, two loads of 4R bytes: low nibble of load i = v[i], high nibble = v[i + 2]

The paper (section 3.3, "Memory Alignment") puts three 2-bit groups and half a 4-bit group of an
output channel in one 128-bit word, the other half in a second matrix: threads of a GPU load
aligned words. A CPU reads cache lines in streams that it prefetches: with three 2-bit tiles, a
whole 4-bit tile and their zeros and sub-scales side by side, a *word row* of R rows x 64 channels,
there is one stream. That is ``c64``, where a quarter of the groups has 4 bits: everything but
outliers is in *records* of 16 rows (`apq_tvm.codegen.layouts.mixed_views` draws them). Other ratios
are ``c48``, arrays apart: 2-bit tiles by threes, with their zeros and sub-scales, and 4-bit tiles.

Groups come in the order of their word rows, so activations must too: ``permutation`` says where a
group of 16 channels goes, and the quantization of activations puts it there.

=================  ========================  ==================================================
``records``        uint8 [B, bytes]          ``c64``: of 16 rows each, all but what follows below
``codes``          uint8 [NB, T, 14R]        ``c48``: three 2-bit tiles; per row 16 bits of zeros,
                                             3 * 2 bits, and sub-scales, 4 + 3 + 3
``wide_codes``     uint8 [NB, T4, 8R]        4-bit tiles
``super_scales``   float16 [B, 3T]           of 16 rows each
``super_zeros``    uint8 [B, 3T]
``scales``         float16 [NB, R]           of the 4-bit groups
``zeros``          uint8 [NB, R]
``permutation``    int32 [G]                 both: place of a group among 4T (``c64``) or 3T + T4
``row_start``      int32 [NB * R + 1]        with outliers only: CSR
``columns``        uint16 or int32 [nnz]     input channel, not permuted
``outliers``       float16 [nnz]
=================  ========================  ==================================================

Padding: missing groups have scales 0; rows past N have codes, scales and zeros 0 and no outliers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.layout import Details, Shapes, WeightLayout
from apq_tvm.codegen.layouts.mixed_tiles import MixedTiles
from apq_tvm.codegen.layouts.mixed_views import MixedRecords, RecordViews, SplitViews
from apq_tvm.errors import PackError
from apq_tvm.formats.mixed import (
    DEFAULT_RATIO,
    GROUP,
    Sizes,
    options_of,
)
from apq_tvm.tensorize.meaning.mixed import (
    TRIPLE,
    narrow_code,
    sub_scale,
    sub_zero,
    wide_byte,
    wide_code,
    words_at,
)
from apq_tvm.types import U8, Array, QuantizedTensor, Scheme


@dataclass(frozen=True)
class MixedLayout(WeightLayout):
    """How one ``mixed24`` matrix lies in memory.

    Parameters
    ----------
    rows : int
        R, 8 or 16.
    scheme : Scheme

    Raises
    ------
    PackError
        If R is another or the scheme is of another family.
    """

    rows: int
    scheme: Scheme

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"mixed24r(8|16)(c64|c48)\Z")

    def __post_init__(self) -> None:
        if self.rows not in (8, 16):
            raise PackError(f"mixed24 layout rows={self.rows}: 8 or 16 is possible")
        if self.scheme.family != "mixed":
            raise PackError(f"mixed24 layouts hold no {self.scheme}")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """The ratio comes from the scheme."""
        return None if scheme is None else cls(int(match[1]), scheme)

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """16 rows for as many lanes, else 8; None for another family."""
        if scheme is None or scheme.family != "mixed":
            return None
        return cls(16 if lanes >= 16 else 8, scheme)

    @property
    def one_stream(self) -> bool:
        """Whether word rows hold 2-bit and 4-bit groups 3:1."""
        return options_of(self.scheme).ratio == DEFAULT_RATIO

    @property
    def name(self) -> str:
        """``mixed24r{R}c64`` or ``mixed24r{R}c48``."""
        return f"mixed24r{self.rows}{'c64' if self.one_stream else 'c48'}"

    def triples(self, k: int) -> int:
        """T: triples of 2-bit groups, at least 1; in ``c64`` also word rows."""
        sizes = Sizes.of(self.scheme, 1, k)
        return max(1, sizes.triples, sizes.wide if self.one_stream else 0)

    def wide_groups(self, k: int) -> int:
        """T4: 4-bit groups with padding, at least 1."""
        return self.triples(k) if self.one_stream else max(1, Sizes.of(self.scheme, 1, k).wide)

    def places(self, k: int) -> int:
        """Groups with padding, in the order that activations have."""
        return TRIPLE * self.triples(k) + self.wide_groups(k)

    def padded_k(self, k: int) -> int:
        """Channels of permuted activations."""
        return GROUP * self.places(k)

    def narrow_place(self, j: Any) -> Any:
        """Place of 2-bit group j; of numbers and of arrays."""
        return j // TRIPLE * (TRIPLE + 1) + j % TRIPLE if self.one_stream else j

    def wide_place(self, j: Any, k: int) -> Any:
        """Place of 4-bit group j."""
        if self.one_stream:
            return j * (TRIPLE + 1) + TRIPLE
        return TRIPLE * self.triples(k) + j

    @property
    def narrow_bytes(self) -> int:
        """Bytes of a triple of 2-bit tiles with its zeros and sub-scales."""
        return words_at(self.rows) + 2 * self.rows

    @property
    def wide_bytes(self) -> int:
        """Bytes of a 4-bit tile."""
        return 8 * self.rows

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        sizes = Sizes.of(self.scheme, n, k)
        shapes = self._dense_shapes(n, k)
        if self.one_stream:
            shapes = {"records": ((sizes.super_rows, self.records(k).nbytes), "uint8")}
        shapes |= {"permutation": ((sizes.groups,), "int32")}
        if sizes.outliers:
            shapes |= {
                "row_start": ((self.row_blocks(n) * self.rows + 1,), "int32"),
                "columns": ((sizes.outliers,), "uint16" if k <= 1 << 16 else "int32"),
                "outliers": ((sizes.outliers,), "float16"),
            }
        return shapes

    def _dense_shapes(self, n: int, k: int) -> Shapes:
        """Arrays of which records are made."""
        blocks, triples = self.row_blocks(n), self.triples(k)
        supers = Sizes.of(self.scheme, n, k).super_rows
        return {
            "codes": ((blocks, triples, self.narrow_bytes), "uint8"),
            "wide_codes": ((blocks, self.wide_groups(k), self.wide_bytes), "uint8"),
            "super_scales": ((supers, TRIPLE * triples), "float16"),
            "super_zeros": ((supers, TRIPLE * triples), "uint8"),
            "scales": ((blocks, self.rows), "float16"),
            "zeros": ((blocks, self.rows), "uint8"),
        }

    def records(self, k: int) -> MixedRecords:
        """Bytes of a record."""
        return MixedRecords(self.rows, self.triples(k))

    def views(self, arrays: Mapping[str, Any]) -> SplitViews:
        """Where kernels find what in the packed arrays."""
        if not self.one_stream:
            return SplitViews(arrays, self.rows)
        groups = int(arrays["permutation"].shape[0])
        return RecordViews(arrays, self.records(GROUP * groups))

    def holds(self, tensor: QuantizedTensor) -> bool:
        """Whether its weights are of the scheme; activations may be others."""
        return tensor.scheme.weights == self.scheme.weights

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        wide = tensor.tables["wide"].astype(bool)
        narrow_codes, wide_codes = self._split(self._padded_codes(tensor), wide, k)
        tiles = MixedTiles(self.rows)
        words = tiles.pack_words(tensor.tables, self.row_blocks(n), self.triples(k))
        arrays: dict[str, Array] = {
            "codes": np.concatenate((tiles.pack_narrow(narrow_codes), words), axis=2),
            "wide_codes": tiles.pack_wide(wide_codes),
            **self._pack_scales(tensor),
        }
        if self.one_stream:
            arrays = {"records": self.records(k).join(arrays)}
        arrays["permutation"] = self._permutation(wide, k)
        if Sizes.of(self.scheme, n, k).outliers:
            arrays |= self._pack_sparse(tensor)
        return arrays

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme | None
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        arrays, sizes = dict(arrays), Sizes.of(self.scheme, n, k)
        if self.one_stream:
            arrays |= self.records(k).split(arrays["records"], self.row_blocks(n))
        wide = self._wide(arrays["permutation"], k)
        codes = np.zeros((self.row_blocks(n) * self.rows, sizes.groups, GROUP), np.uint8)
        narrow_tiles, words = np.split(arrays["codes"], [words_at(self.rows)], axis=2)
        tiles = MixedTiles(self.rows)
        codes[:, ~wide] = tiles.unpack_narrow(narrow_tiles)[:, : sizes.narrow]
        codes[:, wide] = tiles.unpack_wide(arrays["wide_codes"])[:, : sizes.wide]
        tables: dict[str, Array] = {"wide": wide.astype(np.uint8)}
        tables |= tiles.unpack_words(words, n, sizes.narrow)
        for key in ("super_scales", "super_zeros"):
            tables[key] = arrays[key][:, : sizes.narrow].copy()
        tables["row_start"] = arrays.get("row_start", np.zeros(n + 1, np.int32))[: n + 1].copy()
        tables["columns"] = arrays.get("columns", np.zeros(0)).astype(np.int32)
        tables["outliers"] = arrays.get("outliers", np.zeros(0, np.float16)).copy()
        flat = np.ascontiguousarray(codes.reshape(len(codes), -1)[:n, :k])
        scales, zeros = (arrays[key].reshape(-1)[:n, None].copy() for key in ("scales", "zeros"))
        return QuantizedTensor(flat, scales, zeros, scheme or self.scheme, tables)

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of one weight without its outlier (`sparse`)."""
        from tvm import tirx

        views = self.views(arrays)
        groups = int(arrays["permutation"].shape[0])
        place, column = arrays["permutation"][k // GROUP].astype("int64"), k % GROUP
        if self.one_stream:
            is_wide, j = place % 4 == 3, tirx.min(place % 4, 2)
            narrow_of = wide_of = place // 4
        else:
            triples = self.triples(GROUP * groups)
            is_wide, j = place >= TRIPLE * triples, place % TRIPLE
            narrow_of = tirx.min(place // TRIPLE, triples - 1)
            wide_of = tirx.max(place - TRIPLE * triples, 0)
        vector, byte = column // 4, lane * 4 + column % 4
        word = views.word(block, narrow_of, lane)
        code = narrow_code(views.narrow(block, narrow_of)(j * (4 * self.rows) + byte), vector)
        plus = views.super_zero(block, TRIPLE * narrow_of + j)
        level = (sub_scale(word, j) + plus) * (code - sub_zero(word, j))
        value = views.super_scale(block, TRIPLE * narrow_of + j) * level.astype("float32")
        byte4 = views.wide(block, wide_of)(wide_byte(self.rows, vector) + byte)
        code4 = wide_code(byte4, vector) - views.zero(block, lane)
        value4 = views.scale(block, lane) * code4.astype("float32")
        return tirx.Select(is_wide, value4, value)

    def sparse(self, arrays: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """(row_start, columns, values) of the CSR matrix that is added to `weight`, or None."""
        if "outliers" not in arrays:
            return None
        return arrays["row_start"], arrays["columns"], arrays["outliers"]

    def _permutation(self, wide: NDArray[np.bool_], k: int) -> NDArray[np.int32]:
        places = np.empty(len(wide), np.int32)
        places[~wide] = self.narrow_place(np.arange((~wide).sum()))
        places[wide] = self.wide_place(np.arange(wide.sum()), k)
        return places

    def _wide(self, permutation: Array, k: int) -> NDArray[np.bool_]:
        """bool [G]: which groups have 4 bits."""
        if self.one_stream:
            return np.asarray(permutation % 4 == 3)
        return np.asarray(permutation >= TRIPLE * self.triples(k))

    def _padded_codes(self, tensor: QuantizedTensor) -> U8:
        """uint8 [NB * R, G, 16]; past K the zero point of group and row."""
        n, k = tensor.codes.shape
        groups = -(-k // GROUP)
        padded = np.zeros((self.row_blocks(n) * self.rows, groups * GROUP), np.uint8)
        padded[:n, :k] = tensor.codes
        if k % GROUP:
            short = tensor.tables["wide"][-1]
            zeros = tensor.zeros if short else tensor.tables["sub_zeros"][:, -1:]
            padded[:n, k:] = zeros
        return padded.reshape(-1, groups, GROUP)

    def _split(self, codes: U8, wide: NDArray[np.bool_], k: int) -> tuple[U8, U8]:
        """2-bit and 4-bit groups with padding: [NB * R, 3T, 16], [NB * R, T4, 16]."""
        narrow = np.zeros((len(codes), TRIPLE * self.triples(k), GROUP), np.uint8)
        four = np.zeros((len(codes), self.wide_groups(k), GROUP), np.uint8)
        narrow[:, : (~wide).sum()] = codes[:, ~wide]
        four[:, : wide.sum()] = codes[:, wide]
        return narrow, four

    def _pack_scales(self, tensor: QuantizedTensor) -> dict[str, Array]:
        (n, k), t = tensor.codes.shape, tensor.tables
        packed: dict[str, Array] = {}
        shapes = self._dense_shapes(n, k)
        for key in ("super_scales", "super_zeros"):
            packed[key] = np.zeros(*shapes[key])
            packed[key][:, : t[key].shape[1]] = t[key]
        assert tensor.zeros is not None
        for key, values in (("scales", tensor.scales), ("zeros", tensor.zeros)):
            packed[key] = np.zeros(*shapes[key])
            packed[key].reshape(-1)[:n] = values[:, 0]
        return packed

    def _pack_sparse(self, tensor: QuantizedTensor) -> dict[str, Array]:
        n, k = tensor.codes.shape
        shapes, t = self.shapes(n, k), tensor.tables
        start = np.full(shapes["row_start"][0], len(t["outliers"]), np.int32)
        start[: n + 1] = t["row_start"]
        columns = t["columns"].astype(shapes["columns"][1])
        return {"row_start": start, "columns": columns, "outliers": t["outliers"]}

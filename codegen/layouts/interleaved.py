"""The integer weight layouts ``W{bits}r{R}k{run}``: R rows interleaved by 4 or 8 consecutive k.

A *unit* is R rows x 32 k. Its *vectors* v0..v7 have 4R bytes each: byte ``4r + i`` of vector j is
row r, k = 4j + i, which is the operand order of maddubs + madd, vpdpbusd, sdot and dp4a: each
32-bit lane holds four k of one row, so a lane accumulates one row and no horizontal sum is needed.

Bits are split into fields of 4, 2 and 1 (7 = 4 + 2 + 1, low-order bits first). A field of width w
takes w loads of 4R bytes; load i holds vectors i, i + w, i + 2w, ... at bits 0, w, 2w, ... of
every byte, so a load, a shift and a mask give a whole vector::

    4 bits: load i (0..3) low nibble = v[i], high nibble = v[i + 4]
    2 bits: load i (0..1) bits 2t..2t+1 = v[i + 2t]
    1 bit:  load 0        bit t = v[t]
    8 bits: load i (0..7) = v[i]

``rows=1`` is the layout of embedding tables: byte p of a field of width w holds codes
``p, p + 4w, p + 8w, ...`` of one row's 32-code unit (W4: 16 bytes, low nibbles are codes 0..15,
high nibbles 16..31). W8 is the plain row.

``W{bits}r4k8s`` and ``r8k8s`` interleave by 8: byte ``8r + i`` of vectors 2o and 2o + 1 together is
row r, k = 8o + i. So 16 bytes are 2 rows x 8 k, an operand of smmla; all else is as above.

``W{bits}r4k4s`` has the top bit of every byte inverted. sdot takes its bytes signed: of a raw byte
it then multiplies ``byte - 128``, so that the topmost part of a field needs no unpacking at all
(`apq_tvm.tensorize.arm.fold`); an arithmetic shift right gives it centred. ``W{bits}r4k4t`` too has
it inverted, and has no fields: most codes of 3, 5, 6 and 7 bits lie whole in the top bits of a byte
(`apq_tvm.tensorize.meaning.whole_codes`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.grouped import GroupedRows
from apq_tvm.codegen.layouts.layout import NARROW, Details, Shapes
from apq_tvm.errors import PackError
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, centred_code, decode
from apq_tvm.tensorize.meaning.whole_codes import WIDTHS, pieces
from apq_tvm.types import Array, QuantizedTensor, Scheme

ROWS = (1, 4, 8, 16)
"""Rows a unit may interleave: 1 for lookups, then 128-, 256- and 512-bit vectors."""

RUNS = (4, 8)
"""Consecutive k of a row that may stand together."""


@dataclass(frozen=True)
class Field:
    """Some bits of every code, stored together.

    Parameters
    ----------
    width : int
        1, 2, 4 or 8 bits.
    shift : int
        Position of the field's lowest bit in the code. The field's bytes start at
        ``4 * R * shift`` of a unit.
    """

    width: int
    shift: int

    @property
    def mask(self) -> int:
        """Bits of the field, shifted down to 0."""
        return (1 << self.width) - 1

    @property
    def per_byte(self) -> int:
        """Codes that share one byte."""
        return 8 // self.width


def split_fields(bits: int) -> tuple[Field, ...]:
    """Split 1..8 bits into fields of 8, 4, 2 and 1, widest first at the low-order end."""
    fields: list[Field] = []
    shift = 0
    for width in (8, 4, 2, 1):
        if bits - shift >= width:
            fields.append(Field(width, shift))
            shift += width
    return tuple(fields)


@dataclass(frozen=True)
class InterleavedLayout(GroupedRows):
    """How one quantized matrix [N, K] lies in memory.

    Parameters
    ----------
    bits : int
        1..8.
    rows : int
        R, rows interleaved: 1, 4, 8 or 16.
    group_size : int
        Codes along K that share a scale; -1 for a whole row.
    zero_points : bool
        True if there is an array ``zeros``.
    inverted : bool
        True if the top bit of every byte of codes is inverted.
    whole : bool
        True if codes lie whole in a byte wherever they fit; top bits are inverted then.
    run : int
        Consecutive k of a row: 4, or 8 where there are 4 or 8 rows.

    Raises
    ------
    PackError
        If a parameter is out of range.
    """

    bits: int
    rows: int
    group_size: int = -1
    zero_points: bool = False
    inverted: bool = False
    whole: bool = False
    run: int = 4

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"W([1-8])r(\d+)k([48])([st]?)\Z")

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise PackError(f"layout bits={self.bits}: 1..8 are possible")
        if self.rows not in ROWS:
            raise PackError(f"layout rows={self.rows}: one of {ROWS} is possible")
        if self.group_size != -1 and not (
            self.group_size == 16 or (self.group_size > 0 and self.group_size % UNIT_K == 0)
        ):
            raise PackError(
                f"layout group_size={self.group_size}: 16, a multiple of {UNIT_K} or -1 is possible"
            )
        if self.whole and not (self.inverted and self.rows > 1 and self.bits in WIDTHS):
            raise PackError(
                f"layout of {self.bits} bits, {self.rows} rows: codes whole in bytes are of "
                f"{WIDTHS} bits and several rows, with top bits inverted"
            )
        if self.run not in RUNS or (self.run == 8 and (self.whole or self.rows not in (4, 8))):
            raise PackError(
                f"layout of {self.rows} rows by {self.run} k: runs are of 4, or of 8 with 4 or 8 "
                "rows and codes in fields"
            )

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Groups and zero points come from the scheme."""
        if scheme is None or scheme.family != "int":
            return None
        variant = bool(match[4]), match[4] == "t", int(match[3])
        return cls(scheme.bits, int(match[2]), scheme.group_size, scheme.zero_points, *variant)

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """One vector of int32 lanes, for uniform integers."""
        if scheme is None or scheme.family != "int":
            return None
        return cls.of_lanes(scheme, lanes)

    @classmethod
    def of_lanes(cls, scheme: Scheme, lanes: int) -> Self:
        """The layout of integers where vectors have `lanes` int32 lanes: 4 mean Arm's sdot.

        Bit-serial products, of activations of fewer than 8 bits, want fields.
        """
        arm = lanes == NARROW
        whole = arm and scheme.bits in WIDTHS and scheme.act_bits == 8 and scheme.group_size != 16
        return cls(scheme.bits, lanes, scheme.group_size, scheme.zero_points, arm, whole)

    @classmethod
    def of_pairs(cls, scheme: Scheme, rows: int) -> Self:
        """The layout of integers as smmla takes them, 8 k of a row together: Arm's 4x8 and 8x8."""
        return cls(scheme.bits, rows, scheme.group_size, scheme.zero_points, True, False, 8)

    @property
    def name(self) -> str:
        """E.g. ``W4r4k4``, then ``t`` if codes are whole, or ``s`` if top bits are inverted."""
        variant = "t" if self.whole else "s" if self.inverted else ""
        return f"W{self.bits}r{self.rows}k{self.run}{variant}"

    @property
    def unit(self) -> Unit:
        """The unit as intrinsics describe it."""
        fields = () if self.whole else tuple((f.width, f.shift) for f in self.fields)
        groups = 2 if self.group_size == 16 else 1
        return Unit(self.bits, self.rows, fields, groups, self.inverted, self.whole, self.run)

    @property
    def half_unit(self) -> Unit:
        """4 rows of a unit of 8 in runs of 8; the others' bytes are 32 further on.

        Raises
        ------
        PackError
            If rows are not 8 in runs of 8, or bits are not of one field of 2 or more.
        """
        if (self.rows, self.run) != (8, 8) or self.fields[0].width != self.bits or self.bits == 1:
            raise PackError(f"layout {self.name} has no halves of 4 rows that lie alike")
        return replace(self.unit, rows=4, half=True)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Bit fields in storage order, low-order bits first, unless codes are whole."""
        return split_fields(self.bits)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector, 4R."""
        return 4 * self.rows

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of R rows x 32 k."""
        return self.vector_bytes * self.bits

    @property
    def pad_code(self) -> int:
        """Code of padding where there are no zero points, and of rows past N: means 0 there."""
        return 0 if self.zero_points else 1 << (self.bits - 1)

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks, groups = self.row_blocks(n), self.padded_groups(k)
        shapes: Shapes = {
            "codes": ((blocks, self.padded_k(k) // UNIT_K, self.unit_bytes), "uint8"),
            "scales": ((blocks, groups, self.rows), "float16"),
        }
        if self.zero_points:
            shapes["zeros"] = ((blocks, groups, self.rows), "uint8")
        return shapes

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked.

        Codes past K are their group's zero point (W1 has no code for 0: its padding is 1, and the
        activations are 0 there).
        """
        n, k = tensor.codes.shape
        codes = self._padded_codes(tensor)  # [NB * R, Kp]
        arrays: dict[str, Array] = {
            "codes": self._pack_codes(codes),
            "scales": self.interleave(tensor.scales, n, k),
        }
        if tensor.zeros is not None:
            arrays["zeros"] = self.interleave(tensor.zeros, n, k)
        return arrays

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme | None
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are; of int8 activations by default."""
        codes = self._unpack_codes(arrays["codes"])[:n, :k]
        scales = self.deinterleave(arrays["scales"], n, k)
        zeros = self.deinterleave(arrays["zeros"], n, k) if self.zero_points else None
        if scheme is None:
            scheme = Scheme(self.bits, self.zero_points, group_size=self.group_size)
        return QuantizedTensor(np.ascontiguousarray(codes), scales, zeros, scheme)

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        unit, group = k // UNIT_K, 0 if self.group_size == -1 else k // self.group_size
        codes, shape = arrays["codes"], self.unit
        if self.rows == 1:
            raise PackError(f"layout {self.name} is for lookups, not for products")
        place = shape.place(lane, k % UNIT_K // 4, k % 4)
        code = decode(shape, lambda byte: codes[block, unit, byte], *place)
        zero = arrays["zeros"][block, group, lane] if self.zero_points else None
        return centred_code(shape, code, zero) * self.step(arrays, block, group, lane)

    @property
    def minima(self) -> bool:
        """Whether groups have a float minimum (`least`), from which codes are counted."""
        return False

    def step(self, arrays: Mapping[str, Any], block: Any, group: Any, lane: Any) -> Any:
        """TensorIR float32 expression of what a group's codes are multiplied by."""
        return arrays["scales"][block, group, lane].astype("float32")

    def least(self, arrays: Mapping[str, Any], block: Any, group: Any, lane: Any) -> Any:
        """TensorIR float32 expression of what is taken off a group's weights; None for nothing."""
        return None

    @property
    def _run_dtype(self) -> type[np.unsignedinteger[Any]]:
        """A number of as many bytes as a run."""
        return np.uint32 if self.run == 4 else np.uint64

    def _padded_codes(self, tensor: QuantizedTensor) -> NDArray[np.uint8]:
        n, k = tensor.codes.shape
        kp = self.padded_k(k)
        padded = np.full((self.row_blocks(n) * self.rows, kp), self.pad_code, np.uint8)
        padded[:n, :k] = tensor.codes
        if tensor.zeros is not None and k < kp:
            last_group_end = kp if self.group_size == -1 else self.groups(k) * self.group_size
            padded[:n, k:last_group_end] = tensor.zeros[:, -1:]
        return padded

    def _pack_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB * R, Kp] -> [NB, Kp / 32, 4 * bits * R]."""
        blocks, units = codes.shape[0] // self.rows, codes.shape[1] // UNIT_K
        runs = codes.view(self._run_dtype).reshape(blocks, self.rows, -1)
        # [NB, Kp / run, R] of `run` k each: vectors in order of j
        vectors = np.ascontiguousarray(runs.transpose(0, 2, 1)).view(np.uint8)
        if self.whole:
            return self._pack_whole(vectors.reshape(blocks, units, 8, -1))
        out = np.empty((blocks, units, self.unit_bytes), np.uint8)
        for f in self.fields:
            start, size = self.vector_bytes * f.shift, self.vector_bytes * f.width
            # [NB, units, t, w loads of V bytes]: slice t goes to bits w*t of every byte
            part = vectors.reshape(blocks, units, f.per_byte, size)
            target = out[:, :, start : start + size]
            for t in range(f.per_byte):
                bits = ((part[:, :, t] >> f.shift) & f.mask) << (f.width * t)
                if t == 0:
                    target[...] = bits
                else:
                    target |= bits
        return out ^ np.uint8(0x80) if self.inverted else out

    def _pack_whole(self, vectors: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB, Kp / 32, 8, 4R] -> [NB, Kp / 32, 4 * bits * R]."""
        out = np.zeros((*vectors.shape[:2], self.bits, self.vector_bytes), np.uint8)
        for v in range(8):
            for byte, place, width, shift in pieces(self.bits, v):
                out[:, :, byte] |= ((vectors[:, :, v] >> shift) & ((1 << width) - 1)) << place
        return out.reshape(*vectors.shape[:2], -1) ^ np.uint8(0x80)

    def _unpack_whole(self, packed: NDArray[np.uint8], vectors: NDArray[np.uint8]) -> None:
        """[NB, Kp / 32, 4 * bits * R], top bits as they were -> [NB, Kp / 32, 8, 4R], zeroed."""
        source = packed.reshape(*packed.shape[:2], self.bits, self.vector_bytes)
        for v in range(8):
            for byte, place, width, shift in pieces(self.bits, v):
                vectors[:, :, v] |= ((source[:, :, byte] >> place) & ((1 << width) - 1)) << shift

    def _unpack_codes(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB, Kp / 32, 4 * bits * R] -> [NB * R, Kp]."""
        blocks, units, _ = packed.shape
        packed = packed ^ np.uint8(0x80) if self.inverted else packed
        vectors = np.zeros((blocks, units, 8 * self.vector_bytes), np.uint8)
        if self.whole:
            self._unpack_whole(packed, vectors.reshape(blocks, units, 8, -1))
        for f in () if self.whole else self.fields:
            start, size = self.vector_bytes * f.shift, self.vector_bytes * f.width
            source = packed[:, :, start : start + size]
            part = vectors.reshape(blocks, units, f.per_byte, size)
            for t in range(f.per_byte):
                part[:, :, t] |= ((source >> (f.width * t)) & f.mask) << f.shift
        # [NB, Kp / run, R] of `run` k each -> [NB, R, Kp / run]
        runs = vectors.view(self._run_dtype).reshape(blocks, -1, self.rows)
        rows = np.ascontiguousarray(runs.transpose(0, 2, 1)).view(np.uint8)
        return rows.reshape(blocks * self.rows, units * UNIT_K)

"""The layouts ``W{bits}r16k8m`` and ``..p``: in the order of the fragments of a GPU's ``mma``.

A *step* is 16 rows x 32 k, operand A of ``mma.m16n8k32`` (PTX ISA, "Matrix Fragments"). Lane
``4 r + q`` of a warp has four words of it: bytes b of word ``2 p + h`` are row ``r + 8 h``, column
``8 q + 4 p + b`` of the step. (A fragment's columns may stand in any order that those of x stand in
too; this one gives a lane 8 consecutive k.)

Bits are split into fields of 8, 4, 2 and 1 as in `apq_tvm.codegen.layouts.interleaved`. A load of
a field of w bits is 16 bytes a lane: bits ``w t ..`` of every byte are step t of ``8 / w``. A
*unit* is as many steps as make whole loads of every field; its loads follow each other, field by
field.

In planes (``p``) every field has one bit. Then a load is 16 rows x 256 k of one plane, operand A of
``mma.m16n8k256`` of bits as it lies: bit ``8 b + t`` of a lane's word ``2 p + h`` is row
``r + 8 h``, column ``32 t + 8 q + 4 p + b``. The five levels of ``W2*`` are three planes of a code;
a block of them has 48 rows, thirds of 16, whose codes share seven planes
(`apq_tvm.codegen.layouts.quinary`): ``W2Br48k8p``.

Scales are float16 [8, J, 2] of each third: of rows r and r + 8 of J groups side by side, J = 4 at
most, which one lane needs together. A *chunk* is whole units, whole groups and 128 columns at
least.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts import quinary
from apq_tvm.codegen.layouts.grouped import GroupedRows
from apq_tvm.codegen.layouts.interleaved import Field, split_fields
from apq_tvm.codegen.layouts.layout import Details, Shapes
from apq_tvm.errors import PackError
from apq_tvm.formats.balance import LEVELS, TRIPLE, TRIPLE_BITS
from apq_tvm.types import Array, QuantizedTensor, Scheme

STEP_K, LANES, WORDS = 32, 32, 4
"""Columns of a step; lanes of a warp; words that a lane has of a step, and of a load."""

LEAST_CHUNK, MOST_TOGETHER = 128, 4
"""Columns of a chunk at least; groups whose scales are read at once at most."""


@dataclass(frozen=True)
class FragmentLayout(GroupedRows):
    """How one quantized matrix [N, K] lies in memory.

    Parameters
    ----------
    bits : int
        1..8.
    group_size : int
        Codes along K that share a scale, a multiple of 32; -1 for a whole row.
    zero_points : bool
        True if there is an array ``zeros``.
    planes : bool
    levels : int
        Of a code: 5 for ``W2*``; 0 for all that `bits` can say.

    Raises
    ------
    PackError
        If a parameter is out of range.
    """

    bits: int
    group_size: int = -1
    zero_points: bool = False
    planes: bool = False
    levels: int = 0

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"W([1-8]r16|2Br48)k8([mp])\Z")

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise PackError(f"layout bits={self.bits}: 1..8 are possible")
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % STEP_K):
            raise PackError(
                f"layout group_size={self.group_size}: a multiple of {STEP_K} or -1 is possible"
            )

    @classmethod
    def of(cls, scheme: Scheme, planes: bool) -> Self | None:
        """The layout of a scheme, of five levels always in planes; None if of another family."""
        if scheme.family == "int":
            return cls(scheme.bits, scheme.group_size, scheme.zero_points, planes)
        if scheme.family == "balance":
            return cls((LEVELS - 1).bit_length(), scheme.group_size, False, True, LEVELS)
        return None

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Groups and zero points come from the scheme."""
        return None if scheme is None else cls.of(scheme, match[2] == "p")

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """None: the kernels that read it say so."""
        return None

    @property
    def name(self) -> str:
        """E.g. ``W4r16k8m``."""
        return f"{self.weights}r{self.rows}k8{'p' if self.planes else 'm'}"

    @property
    def thirds(self) -> int:
        """Times 16 rows of a block, whose codes are stored together."""
        return TRIPLE if self.levels else 1

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 * self.thirds

    @property
    def weights(self) -> str:
        """The codes in names: ``W4``; ``W2B`` for five levels."""
        return "W2B" if self.levels else f"W{self.bits}"

    @property
    def centre(self) -> int:
        """The code that means 0 where there are no zero points; signs have none."""
        return self.levels // 2 if self.levels else 1 << (self.bits - 1)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Bit fields of a code, low-order bits first."""
        return _planes(self.bits) if self.planes else split_fields(self.bits)

    @property
    def stored(self) -> tuple[Field, ...]:
        """Bit fields in storage order: those of a code, or of what codes are packed to."""
        return _planes(TRIPLE_BITS) if self.levels else self.fields

    @property
    def signs(self) -> bool:
        """True if codes are 0 for -1 and 1 for 1."""
        return self.bits == 1 and not self.zero_points

    @property
    def unit_steps(self) -> int:
        """Steps of a unit: as many as the narrowest field has in a load."""
        return max(f.per_byte for f in self.fields)

    @property
    def unit_k(self) -> int:
        """Columns of a unit."""
        return STEP_K * self.unit_steps

    def loads(self, of: Field) -> int:
        """Loads of a field in a unit."""
        return self.unit_steps // of.per_byte

    def first_load(self, of: Field) -> int:
        """The first load of a field in a unit."""
        return sum(self.loads(f) for f in self.stored if f.shift < of.shift)

    @property
    def unit_loads(self) -> int:
        """Loads of a unit."""
        return sum(map(self.loads, self.stored))

    @property
    def chunk_k(self) -> int:
        """Columns of a chunk: of units, groups and 128 the largest, which the others divide."""
        return max(self.unit_k, self.group_size, LEAST_CHUNK)

    @property
    def together(self) -> int:
        """Groups whose scales lie side by side."""
        if self.group_size == -1:
            return 1
        return min(self.chunk_k // self.group_size, MOST_TOGETHER)

    def padded_k(self, k: int) -> int:
        """K rounded up to whole chunks."""
        return -(-k // self.chunk_k) * self.chunk_k

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks, groups = self.row_blocks(n), self.padded_groups(k)
        units = self.padded_k(k) // self.unit_k
        shapes: Shapes = {
            "codes": ((blocks, units, self.unit_loads, LANES, WORDS), "uint32"),
            "scales": (
                (blocks, groups // self.together, self.rows // 2, self.together, 2),
                "float16",
            ),
        }
        if self.zero_points:
            shapes["zeros"] = (shapes["scales"][0], "uint8")
        return shapes

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked.

        Codes past K are their group's zero point: those of asymmetric activations are not 0 there.
        """
        n, k = tensor.codes.shape
        pad = 0 if self.zero_points else self.centre
        codes = np.full((self.row_blocks(n) * self.rows, self.padded_k(k)), pad, np.uint8)
        codes[:n, :k] = tensor.codes
        if tensor.zeros is not None:
            end = None if self.group_size == -1 else self.groups(k) * self.group_size
            codes[:n, k:end] = tensor.zeros[:, -1:]
        arrays: dict[str, Array] = {
            "codes": self._pack_codes(codes),
            "scales": self._paired(tensor.scales, n, k),
        }
        if tensor.zeros is not None:
            arrays["zeros"] = self._paired(tensor.zeros, n, k)
        return arrays

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme | None
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are; of int8 activations by default."""
        codes = np.ascontiguousarray(self._unpack_codes(arrays["codes"])[:n, :k])
        scales = self._apart(arrays["scales"], n, k)
        zeros = self._apart(arrays["zeros"], n, k) if self.zero_points else None
        if scheme is None:
            scheme = Scheme(self.bits, self.zero_points, group_size=self.group_size)
        return QuantizedTensor(codes, scales, zeros, scheme)

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * 16 + lane``, column `k`."""
        from apq_tvm.tensorize.exprs import i32

        unit, step, column = k // self.unit_k, k % self.unit_k // STEP_K, k % STEP_K
        third, row = lane // 16, lane % 16
        owner = row % 8 * 4 + column // 8
        word = column % 8 // 4 * 2 + row // 8
        parts: list[Any] = []
        for f in self.stored:
            load = self.first_load(f) + step // f.per_byte
            packed = arrays["codes"][block, unit, load, owner, word]
            place = column % 4 * 8 + step % f.per_byte * f.width
            parts.append((packed >> place.astype("uint32")).astype("int32") & i32(f.mask))
        if self.levels:
            code = quinary.digit(parts, third)
        else:
            code = i32(0)
            for f, part in zip(self.stored, parts, strict=True):
                code = code + part * i32(1 << f.shift)
        group = 0 if self.group_size == -1 else k // self.group_size
        place = self.scale_place(block, group, third * 8 + row % 8, row // 8)
        scale = arrays["scales"][place].astype("float32")
        return self.centred(code, self.zero(arrays, place)).astype("float32") * scale

    def scale_place(self, block: Any, group: Any, row: Any, high: Any) -> tuple[Any, ...]:
        """Index of the scale of row ``row % 8 + 8 high`` of third ``row / 8`` of a block."""
        return block, group // self.together, row, group % self.together, high

    def zero(self, arrays: Mapping[str, Any], place: tuple[Any, ...]) -> Any:
        """TensorIR int32 zero point, by the place of its scale; 1 where codes are signs."""
        from apq_tvm.tensorize.exprs import i32

        if self.zero_points:
            return arrays["zeros"][place].astype("int32")
        return i32(self.centre)

    def centred(self, code: Any, zero: Any) -> Any:
        """A code, or a sum of them, less its zero point; signs are twice the code less 1."""
        return code + code - zero if self.signs else code - zero

    def _paired(self, values: Array, n: int, k: int) -> Array:
        """[N, G] -> [NB, Gp / J, 8 thirds, J, 2]."""
        rows = self.interleave(values, n, k)
        split = rows.reshape(rows.shape[0], -1, self.together, self.thirds, 2, 8)
        by_row = split.transpose(0, 1, 3, 5, 2, 4)
        return np.ascontiguousarray(by_row).reshape(*by_row.shape[:2], -1, self.together, 2)

    def _apart(self, values: Array, n: int, k: int) -> Array:
        """Inverse of `_paired`."""
        split = values.reshape(*values.shape[:2], self.thirds, 8, self.together, 2)
        rows = split.transpose(0, 1, 4, 2, 5, 3).reshape(values.shape[0], -1, self.rows)
        return self.deinterleave(rows, n, k)

    def _pack_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """[NB * rows, Kp] -> [NB, U, loads, 32, 4]."""
        blocks = codes.shape[0] // self.rows
        if self.levels:
            thirds = codes.reshape(blocks, TRIPLE, 16, -1)
            codes = quinary.packed(*(thirds[:, i] for i in range(TRIPLE)))
        # [NB, h, r, U, step, q, p, b] -> [NB, U, step, r, q, p, h, b]
        split = codes.reshape(blocks, 2, 8, -1, self.unit_steps, 4, 2, 4)
        words = split.transpose(0, 3, 4, 2, 5, 6, 1, 7)
        parts = []
        for f in self.stored:
            # [NB, U, loads, t, r, q, p, h, b]: step t goes to bits w*t of every byte
            steps = words.reshape(blocks, -1, self.loads(f), f.per_byte, *words.shape[3:])
            part = np.zeros_like(steps[:, :, :, 0])
            for t in range(f.per_byte):
                part |= ((steps[:, :, :, t] >> f.shift) & f.mask) << (f.width * t)
            # [NB, U, loads, 32, 4] words of 4 bytes
            part = part.reshape(*part.shape[:3], LANES, WORDS * 4)
            parts.append(np.ascontiguousarray(part).view(np.uint32))
        return np.ascontiguousarray(np.concatenate(parts, axis=2))

    def _unpack_codes(self, packed: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Inverse of `_pack_codes`."""
        blocks, units = packed.shape[:2]
        words = np.zeros((blocks, units, self.unit_steps, 8, 4, 2, 2, 4), np.uint8)
        for f in self.stored:
            first = self.first_load(f)
            part = np.ascontiguousarray(packed[:, :, first : first + self.loads(f)]).view(np.uint8)
            part = part.reshape(blocks, units, self.loads(f), *words.shape[3:])
            for t in range(f.per_byte):
                words[:, :, t :: f.per_byte] |= ((part >> (f.width * t)) & f.mask) << f.shift
        # [NB, U, step, r, q, p, h, b] -> [NB, h, r, U, step, q, p, b]
        split = np.ascontiguousarray(words.transpose(0, 6, 3, 1, 2, 4, 5, 7))
        if not self.levels:
            return split.reshape(blocks * 16, -1)
        thirds = quinary.unpacked(split.reshape(blocks, 16, -1))
        return np.stack(thirds, axis=1).reshape(blocks * self.rows, -1)


def _planes(bits: int) -> tuple[Field, ...]:
    return tuple(Field(1, shift) for shift in range(bits))

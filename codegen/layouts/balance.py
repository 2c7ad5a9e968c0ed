"""The layout ``W2Br{R}k4`` of ``W2*`` weights: three rows in 7 bits, R rows interleaved.

A *unit* is R = 3L rows x 32 k. Its *code vectors* c0..c7 have 4L bytes each: byte ``4r + i`` of
vector j holds rows r, L + r and 2L + r at k = 4j + i, as ``v[r] + 5 v[L + r] + 25 v[2L + r]`` (at
most 124: 7 bits). Once taken apart, each third is a vector in the operand order of maddubs + madd,
vpdpbusd and sdot, as in `apq_tvm.codegen.layouts.interleaved`, and one broadcast of activations
serves all three.

Seven vectors are stored, 28L bytes a unit: vectors 0..6 are the low 7 bits of every byte, and the
top bit of vector j's byte is bit j of the same byte of vector 7. So a weight takes exactly 7/3
bits, whatever the length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.grouped import GroupedRows
from apq_tvm.codegen.layouts.layout import Details, Shapes
from apq_tvm.errors import PackError
from apq_tvm.formats.balance import CENTRE, GROUPS, LEVELS, TRIPLE, TRIPLE_BITS
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.types import Array, QuantizedTensor, Scheme

_LANES = (4, 8, 16)


@dataclass(frozen=True)
class BalanceLayout(GroupedRows):
    """How one ``W2*`` matrix [N, K] lies in memory.

    Parameters
    ----------
    lanes : int
        L, a third of the rows of a block: 4, 8 or 16.
    group_size : int
        Weights along K that share a scale; -1 for a whole row.

    Raises
    ------
    PackError
        If a parameter is out of range.
    """

    lanes: int
    group_size: int = -1

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"W2Br(\d+)k4\Z")

    def __post_init__(self) -> None:
        if self.lanes not in _LANES:
            raise PackError(f"layout {self.name}: 12, 24 or 48 rows are possible")
        if self.group_size not in GROUPS:
            raise PackError(f"layout {self.name} group_size={self.group_size}: one of {GROUPS}")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Groups come from the scheme."""
        if scheme is None or scheme.family != "balance":
            return None
        return cls(int(match[1]) // TRIPLE, scheme.group_size)

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, vector_bytes: int) -> Self | None:
        """The layout for a device with such vectors; None for other schemes."""
        if scheme is None or scheme.family != "balance":
            return None
        return cls(max(4, min(16, vector_bytes // 4)), scheme.group_size)

    @property
    def name(self) -> str:
        """``W2Br{R}k4``."""
        return f"W2Br{self.rows}k4"

    @property
    def rows(self) -> int:
        """R = 3L, rows of one block."""
        return TRIPLE * self.lanes

    @property
    def vector_bytes(self) -> int:
        """Bytes of one code vector, 4L."""
        return 4 * self.lanes

    @property
    def zero_points(self) -> bool:
        """False: code 2 is 0 in every group."""
        return False

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of R rows x 32 k."""
        return TRIPLE_BITS * self.vector_bytes

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks = self.row_blocks(n)
        return {
            "codes": ((blocks, self.padded_k(k) // UNIT_K, self.unit_bytes), "uint8"),
            "scales": ((blocks, self.padded_groups(k), self.rows), "float16"),
        }

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        blocks, units = self.row_blocks(n), self.padded_k(k) // UNIT_K
        codes = np.full((blocks * self.rows, units * UNIT_K), CENTRE, np.uint8)
        codes[:n, :k] = tensor.codes
        return {"codes": self._pack_codes(codes), "scales": self.interleave(tensor.scales, n, k)}

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        codes = self._unpack_codes(arrays["codes"])[:n, :k]
        scales = self.deinterleave(arrays["scales"], n, k)
        return QuantizedTensor(np.ascontiguousarray(codes), scales, None, scheme)

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        from tvm import tirx

        from apq_tvm.tensorize.meaning.balance import digit

        unit, group = k // UNIT_K, 0 if self.group_size == -1 else k // self.group_size
        code = self.code(arrays["codes"], block, unit, k % UNIT_K // 4, lane % self.lanes, k % 4)
        value = digit(code, lane // self.lanes) - tirx.const(CENTRE, "int32")
        scale = arrays["scales"][block, group, lane].astype("float32")
        return value.astype("float32") * scale

    def code(self, codes: Any, block: Any, unit: Any, vector: Any, lane: Any, i: Any) -> Any:
        """TensorIR int32 expression of one 7-bit code: byte ``4 * lane + i`` of a code vector."""
        from apq_tvm.tensorize.meaning.balance import triple

        return triple(
            lambda byte: codes[block, unit, byte], self.vector_bytes, vector, lane * 4 + i
        )

    def _pack_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB * R, Kp] -> [NB, Kp / 32, 28L]."""
        lanes, v = self.lanes, self.vector_bytes
        blocks, units = codes.shape[0] // self.rows, codes.shape[1] // UNIT_K
        # [NB, third, L, units, vector, i]
        parts = codes.reshape(blocks, TRIPLE, lanes, units, 8, 4)
        triples = parts[:, 0] + LEVELS * parts[:, 1] + LEVELS * LEVELS * parts[:, 2]
        # [NB, L, units, vector, i] -> [NB, units, vector, 4L]
        triples = np.ascontiguousarray(triples.transpose(0, 2, 3, 1, 4)).reshape(
            blocks, units, 8, v
        )
        out = triples[:, :, :TRIPLE_BITS].copy()
        for j in range(TRIPLE_BITS):
            out[:, :, j] |= (triples[:, :, 7] >> j & 1) << 7
        return out.reshape(blocks, units, self.unit_bytes)

    def _unpack_codes(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB, Kp / 32, 28L] -> [NB * R, Kp]."""
        blocks, units, _ = packed.shape
        stored = packed.reshape(blocks, units, TRIPLE_BITS, self.vector_bytes)
        triples = np.empty((blocks, units, 8, self.vector_bytes), np.uint8)
        triples[:, :, :TRIPLE_BITS] = stored & 0x7F
        triples[:, :, 7] = sum((stored[:, :, j] >> 7) << j for j in range(TRIPLE_BITS))
        if int(triples.max()) >= LEVELS**TRIPLE:
            raise PackError(f"{self.name}: code {int(triples.max())} exceeds {LEVELS**TRIPLE - 1}")
        thirds = [triples // LEVELS**part % LEVELS for part in range(TRIPLE)]
        # [third, NB, units, vector, L, i] -> [NB, third, L, units, vector, i]
        codes = np.stack(thirds).reshape(TRIPLE, blocks, units, 8, self.lanes, 4)
        return codes.transpose(1, 0, 4, 2, 3, 5).reshape(blocks * self.rows, units * UNIT_K)

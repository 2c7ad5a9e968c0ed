"""The layouts of binary codes, ``bcq{q}r{R}`` and ``bcq{q}b16``.

Four k of one row and plane are one 4-bit key.

The key of a *quad* (k = 4j .. 4j+3) has the bit of k = 4j + t at its bit t; it picks one of the 16
signed sums of the quad's activations. A *unit* is R rows x 32 k, eight quads: 4R bytes per plane.

R = 8 and 16, for lookups whose tables lie side by side (``vpermb``, ``vpermps``): the unit holds
plane after plane; byte ``4r + j`` of a plane is row r, quad j in the low and quad 4 + j in the high
nibble. So each 32-bit lane is one row.

R = 32, for lookups with one table per 128-bit lane (``vpshufb``): four chunks of 8 k, each with
plane after plane of 32 bytes; the low nibbles are the chunk's first quad, the high ones its second;
byte ``2t`` is row t and byte ``2t + 1`` row 16 + t.

``b16``, for lookups of 16 bytes (``tbl``): the same with R = 16, where byte t is row t.

``scales`` float16 [NB, Kp / gw, q + 1, R] has the alpha of every plane, lowest first, and then z.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from apq_tvm.codegen.layouts.grouped import GroupedRows
from apq_tvm.codegen.layouts.layout import NARROW, Details, Shapes
from apq_tvm.errors import PackError
from apq_tvm.formats import bcq
from apq_tvm.tensorize.meaning.binary_codes import BYTE_ROWS, LutUnit
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.types import Array, QuantizedTensor, Scheme

ROWS = (8, 16, BYTE_ROWS)
"""Rows a unit may interleave."""


@dataclass(frozen=True)
class BcqLayout(GroupedRows):
    """How one binary-coded matrix [N, K] lies in memory.

    Parameters
    ----------
    bits : int
        q, planes, 1..8.
    rows : int
        R, one of `ROWS`.
    group_size : int
        Weights along K that share scales; -1 for a whole row.
    narrow : bool
        Whether each of 16 rows is a byte.

    Raises
    ------
    PackError
        If a parameter is out of range.
    """

    bits: int
    rows: int
    group_size: int = -1
    narrow: bool = False

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"bcq([1-8])(r8|r16|r32|b16)\Z")

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.rows not in ROWS:
            raise PackError(f"layout {self.name}: 1..8 planes and rows of {ROWS} are possible")
        if self.narrow and self.rows != 16:
            raise PackError(f"layout {self.name}: bytes of 16 rows are possible")
        if self.group_size not in (-1, *bcq.GROUPS):
            raise PackError(f"layout {self.name}: groups of {self.group_size} do not exist")

    @classmethod
    def named(cls, match: re.Match[str], scheme: Scheme | None, details: Details) -> Self | None:
        """Groups come from the scheme."""
        if scheme is None or scheme.family != "bcq":
            return None
        return cls(scheme.bits, int(match[2][1:]), scheme.group_size, match[2][0] == "b")

    @classmethod
    def choose(cls, scheme: Scheme | None, details: Details, lanes: int) -> Self | None:
        """What the table kernels of such vectors read; None for other families."""
        if scheme is None or scheme.family != "bcq":
            return None
        bytewise = lanes == 8 and scheme.integer_acts
        narrow = lanes == NARROW and scheme.integer_acts
        rows = BYTE_ROWS if bytewise else 16 if lanes >= 16 or narrow else 8
        return cls(scheme.bits, rows, scheme.group_size, narrow)

    @property
    def name(self) -> str:
        """``bcq{q}r{R}`` or ``bcq{q}b16``."""
        return f"bcq{self.bits}{'b' if self.narrow else 'r'}{self.rows}"

    @property
    def unit(self) -> LutUnit:
        """One unit as intrinsics describe it."""
        return LutUnit(self.bits, self.rows, self.narrow)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of R rows x 32 k."""
        return self.unit.nbytes

    def shapes(self, n: int, k: int) -> Shapes:
        """Shape and dtype of every packed array of an [n, k] matrix, in kernel argument order."""
        blocks, units = self.row_blocks(n), self.padded_k(k) // UNIT_K
        return {
            "codes": ((blocks, units, self.unit_bytes), "uint8"),
            "scales": ((blocks, self.padded_groups(k), self.bits + 1, self.rows), "float16"),
        }

    def arrays(self, tensor: QuantizedTensor) -> dict[str, Array]:
        """The packed arrays of a tensor that was checked."""
        n, k = tensor.codes.shape
        codes = np.zeros((self.row_blocks(n) * self.rows, self.padded_k(k)), np.uint8)
        codes[:n, :k] = tensor.codes
        scales = np.concatenate((tensor.scales, tensor.tables[bcq.OFFSETS][..., None]), axis=-1)
        return {"codes": self._pack_codes(codes), "scales": self.interleave(scales, n, k)}

    def tensor(
        self, arrays: Mapping[str, Array], n: int, k: int, scheme: Scheme
    ) -> QuantizedTensor:
        """The tensor whose packed arrays, checked, these are."""
        codes = self._unpack_codes(arrays["codes"])[:n, :k]
        scales = self.deinterleave(arrays["scales"], n, k)
        return QuantizedTensor(
            np.ascontiguousarray(codes),
            np.ascontiguousarray(scales[..., :-1]),
            None,
            scheme,
            {bcq.OFFSETS: np.ascontiguousarray(scales[..., -1])},
        )

    def weight(
        self, arrays: Mapping[str, Any], block: Any, lane: Any, k: Any, bits: int = 0
    ) -> Any:
        """TensorIR float32 expression of the weight of row ``block * R + lane``, column `k`."""
        from tvm import tirx

        codes, scales = arrays["codes"], arrays["scales"]
        group = 0 if self.group_size == -1 else k // self.group_size
        total = scales[block, group, self.bits, lane].astype("float32")
        quad = k % UNIT_K // 4
        for plane in range(self.bits):
            key = self.unit.key(lambda at: codes[block, k // UNIT_K, at], plane, lane, quad)
            bit = tirx.shift_right(key, (k % 4).astype("int32"))
            sign = tirx.bitwise_and(bit, tirx.const(1, "int32")).astype("float32")
            one, two = tirx.const(1.0, "float32"), tirx.const(2.0, "float32")
            scale = scales[block, group, plane, lane].astype("float32")
            total = total + (sign * two - one) * scale
        return total

    def _pack_codes(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB * R, Kp] -> [NB, Kp / 32, 4 * R * q]."""
        rows, kp = codes.shape
        blocks, units = rows // self.rows, kp // UNIT_K
        out = np.empty((blocks, units, self.unit_bytes), np.uint8)
        by_plane = self._planes(out)
        for plane in range(self.bits):
            bits = codes >> plane & 1
            keys = np.packbits(bits.reshape(rows, -1, 4), axis=-1, bitorder="little")[..., 0]
            by_plane[plane][...] = self._interleave(keys.reshape(blocks, self.rows, units, 8))
        return out

    def _unpack_codes(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[NB, Kp / 32, 4 * R * q] -> [NB * R, Kp]."""
        blocks, units, _ = packed.shape
        codes = np.zeros((blocks * self.rows, units * UNIT_K), np.uint8)
        for plane, part in enumerate(self._planes(packed)):
            keys = self._deinterleave(part).reshape(blocks * self.rows, -1, 1)
            bits = np.unpackbits(keys, axis=-1, bitorder="little", count=4)
            codes |= bits.reshape(codes.shape) << plane
        return codes

    def _planes(self, packed: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Views of every plane: [NB, units, R, 4] or, for bytes, [NB, units, 4, 16, R / 16]."""
        blocks, units, _ = packed.shape
        if self.unit.bytewise:
            chunks = packed.reshape(blocks, units, 4, self.bits, 16, -1)
            return [chunks[:, :, :, plane] for plane in range(self.bits)]
        planes = packed.reshape(blocks, units, self.bits, self.rows, 4)
        return [planes[:, :, plane] for plane in range(self.bits)]

    def _interleave(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Keys [NB, R, units, 8] -> bytes of one plane as `_planes` views them."""
        if self.unit.bytewise:
            blocks, _, units, _ = keys.shape
            # [NB, R / 16, 16, units, 4, 2] -> [2, NB, units, 4, 16, R / 16]
            halves = keys.reshape(blocks, -1, 16, units, 4, 2).transpose(5, 0, 3, 4, 2, 1)
        else:
            halves = np.stack((keys[..., :4], keys[..., 4:])).transpose(0, 1, 3, 2, 4)
        return np.asarray(halves[0] | halves[1] << 4)

    def _deinterleave(self, part: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Inverse of `_interleave`."""
        halves = np.stack((part & 15, part >> 4))
        if self.unit.bytewise:
            blocks, units = part.shape[:2]
            keys = halves.transpose(1, 5, 4, 2, 3, 0)  # [NB, R / 16, 16, units, 4, 2]
            return np.ascontiguousarray(keys.reshape(blocks, self.rows, units, 8))
        keys = np.concatenate((halves[0], halves[1]), axis=-1)  # [NB, units, R, 8]
        return np.ascontiguousarray(keys.transpose(0, 2, 1, 3))

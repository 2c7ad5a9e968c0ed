"""One unit of binary codes, R rows x 32 k x q planes, and what looking it up means.

`apq_tvm.codegen.layouts.bcq` draws the bytes. A key is the four bits of one row, plane and *quad*
of k; it picks one of 16 sums that were tabulated for the quad's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Expr = Any  # tvm is untyped
Buffer = Any

UNIT_K = 32
"""k of one unit."""

QUADS = 8
"""Keys of one row and plane of a unit."""

ENTRIES = 16
"""Sums in the table of one quad: ±x0 ±x1 ±x2 ±x3."""

BYTE_ROWS = 32
"""Rows of the units in which every 16-bit lane belongs to two rows."""


@dataclass(frozen=True)
class LutUnit:
    """Shape of a unit.

    Parameters
    ----------
    bits : int
        q, planes.
    rows : int
        R, rows interleaved: 8 and 16 (32-bit lanes, or bytes if `narrow`), 32 (bytes).
    narrow : bool
        Whether each of 16 rows is a byte.
    """

    bits: int
    rows: int
    narrow: bool = False

    @property
    def paired(self) -> bool:
        """Whether two rows, t and 16 + t, share a 16-bit lane."""
        return self.rows == BYTE_ROWS

    @property
    def bytewise(self) -> bool:
        """Whether every byte belongs to a row of its own."""
        return self.paired or self.narrow

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane."""
        return 4 * self.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the unit."""
        return self.plane_bytes * self.bits

    def key(self, load: Callable[[Any], Any], plane: Any, lane: Any, quad: Any) -> Any:
        """int32 expression of a key; above its four bits is whatever stands there.

        Parameters
        ----------
        load : callable
            Byte of the unit by its index, a uint8 expression.
        plane, lane, quad : PrimExpr
            0..q-1, 0..R-1, 0..7.
        """
        from tvm import tirx

        if self.bytewise:
            byte = lane % 16 * 2 + lane // 16 if self.paired else lane
            at = (quad // 2 * self.bits + plane) * self.rows + byte
            high = quad % 2
        else:
            at = plane * self.plane_bytes + lane * 4 + quad % 4
            high = quad // 4
        return tirx.shift_right(load(at).astype("int32"), (high * 4).astype("int32"))


def signs(entry: Any, position: int) -> Any:
    """Condition: is activation `position` (0..3) of a quad added, not subtracted, in `entry`?

    `entry` is an int32 expression.
    """
    from tvm import tirx

    bit = tirx.shift_right(entry, tirx.const(position, "int32"))
    return tirx.bitwise_and(bit, tirx.const(1, "int32")) != tirx.const(0, "int32")

"""One unit of binary codes, R rows x 32 k x q planes, and what looking it up means.

`apq_tvm.codegen.layouts.bcq` draws the bytes. A key is the four bits of one row, plane and *quad*
of k; it picks one of 16 sums that were tabulated for the quad's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import Expr, i32, i64
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand

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


@dataclass(frozen=True)
class LutDot:
    """Shape of the lookups of one unit, ``acc[i, p, r] += Σ_quad table[i, quad, key(p, r, quad)]``.

    Over the eight quads of a unit, for rows i of x, planes p and rows r of the weights; row and
    plane axes are left out where there is one. A unit of 32 rows has two uint16 sums per pair of
    rows t and 16 + t, modulo 2^16::

        acc[i, p, 0, t] += table[key(t)] + 256 table[key(16 + t)]
        acc[i, p, 1, t] += table[key(16 + t)]

    which is what adding a vector of bytes as 16-bit lanes, and its high bytes once more, gives. A
    unit of 16 rows in bytes has one uint16 sum per row.

    Parameters
    ----------
    unit : LutUnit
    m : int
        Rows of x.
    table_dtype : str
        ``uint8`` or ``float32``.
    """

    unit: LutUnit
    m: int
    table_dtype: str

    @property
    def acc_dtype(self) -> str:
        """Of the sums."""
        if self.table_dtype == "float32":
            return "float32"
        return "uint16" if self.unit.bytewise else "int32"

    @property
    def acc_shape(self) -> tuple[int, ...]:
        """Shape of the sums."""
        lead = (
            *((self.m,) if self.m > 1 else ()),
            *((self.unit.bits,) if self.unit.bits > 1 else ()),
        )
        return (*lead, *((2, 16) if self.unit.paired else (self.unit.rows,)))

    def split(self, axes: list[Expr]) -> tuple[Expr | None, Expr, list[Expr]]:
        """(row of x or None, plane, the rest) of an index into the sums."""
        axes = list(axes)
        row = axes.pop(0) if self.m > 1 else None
        plane = axes.pop(0) if self.unit.bits > 1 else i64(0)
        return row, plane, axes

    def term(self, axes: Sequence[Expr], codes: Load, table: Load) -> Expr:
        """One term of the sums; a lookup as a sum over all 16 entries, of which one counts.

        (With a key from memory for an index it could not be tensorized.) `axes` are those of the
        sums, quad and entry; before these, in paired units, which of the two rows.
        """
        from tvm import tirx

        count = len(self.acc_shape)
        row, plane, rest = self.split(list(axes[:count]))
        *side, quad, entry = axes[count:]
        lane = side[0] * i64(16) + rest[1] if side else rest[0]
        key = tirx.bitwise_and(self.unit.key(codes, plane, lane, quad), i32(15))
        value = table(row, quad * i64(ENTRIES) + entry).astype(self.acc_dtype)
        zero = tirx.const(0, self.acc_dtype)
        if side:
            second, half = side[0] == i64(1), rest[0] == i64(1)
            one, high = tirx.const(1, self.acc_dtype), tirx.const(256, self.acc_dtype)
            factor = tirx.Select(second, tirx.Select(half, one, high), tirx.Select(half, zero, one))
            value = value * factor
        return tirx.Select(key == entry.astype("int32"), value, zero)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Extents of the reduction axes of `term`."""
        return (*((2,) if self.unit.paired else ()), QUADS, ENTRIES)


def lut_meaning(dot: LutDot) -> Meaning:
    """Operands codes uint8 [bytes], table [m, 128] (or [128]) and the sums."""
    unit, rows = dot.unit, (dot.m,) if dot.m > 1 else ()
    operands = (
        Operand("codes", (unit.nbytes,), "uint8", min(64, unit.plane_bytes)),
        Operand("table", (*rows, QUADS * ENTRIES), dot.table_dtype, 4, strided=dot.m > 1),
        Operand("acc", dot.acc_shape, dot.acc_dtype, 4),
    )
    return Meaning("lookup", operands, dot.acc_shape, dot.reduced, dot.term)


def signs(entry: Any, position: int) -> Any:
    """Condition: is activation `position` (0..3) of a quad added, not subtracted, in `entry`?

    `entry` is an int32 expression.
    """
    from tvm import tirx

    bit = tirx.shift_right(entry, tirx.const(position, "int32"))
    return tirx.bitwise_and(bit, tirx.const(1, "int32")) != tirx.const(0, "int32")

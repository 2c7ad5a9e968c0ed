"""Micro-kernels and panels of GEMMs whose decoded codes are centred int8: their plain loops.

A *tile* is rows of activations times vectors of 4 int32 sums. Sums lie in one of two orders:

- *lanes*: a vector is one row of x times 4 rows of W, as sdot by lane gives it::

      C[m, c, r] += sum over q, i of A[q, m, i] * B[q, c, r, i]

- *pairs*: a vector is 2 rows of x times 2 rows of W, ``r = 2 * (row of x) + (row of W)``, as smmla
  gives it from operands of 2 rows x 8 k::

      C[p, c, r] += sum over e, i of A[p, e, r // 2, i] * B[e, c, r % 2, i]

The panel B is decoded by ``B = code - zero`` (W1 without zero points: ``2 * code - 1``); codes of 8
bits lose 128 instead of their zero point, which would not fit. Scales are in the order of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apq_tvm.tensorize.exprs import Expr
from apq_tvm.tensorize.meaning.scaffold import Load, Meaning, Operand


@dataclass(frozen=True)
class CentredTile:
    """Shape of one micro-kernel call.

    Parameters
    ----------
    m : int
        Rows of activations: 4 in the order of lanes, even for pairs.
    columns : int
        Vectors along the rows of W: of 4 rows, 2 for pairs.
    k : int
        Products summed by one call: a multiple of 4, of 8 for pairs.
    pairs : bool
        Order of the sums.
    """

    m: int
    columns: int
    k: int
    pairs: bool

    def __str__(self) -> str:
        return f"{self.m}x{(2 if self.pairs else 4) * self.columns}x{self.k}"

    @property
    def sums(self) -> tuple[int, int, int]:
        """Shape of C."""
        return (self.m // 2 if self.pairs else self.m), self.columns, 4

    @property
    def activations(self) -> tuple[int, ...]:
        """Shape of A."""
        return (self.m // 2, self.k // 8, 2, 8) if self.pairs else (self.k // 4, self.m, 4)

    @property
    def panel(self) -> tuple[int, ...]:
        """Shape of B."""
        if self.pairs:
            return self.k // 8, self.columns, 2, 8
        return self.k // 4, self.columns, 4, 4


def largest_byte(bits: int, zero_points: bool) -> int:
    """Largest magnitude in a panel of `bits`-bit codes."""
    if bits == 8 or bits == 1:
        return 128 if bits == 8 else 1
    return (1 << bits) - 1 if zero_points else 1 << (bits - 1)


def products(tile: CentredTile) -> Meaning:
    """A micro-kernel ``(a int8, b int8, c int32)``."""
    width = 8 if tile.pairs else 4

    def term(axes: Sequence[Expr], a: Load, w: Load) -> Expr:
        m, j, r, k, i = axes
        if tile.pairs:
            x, code = a(m, k, r // 2, i), w(k, j, r % 2, i)
        else:
            x, code = a(k, m, i), w(k, j, r, i)
        return x.astype("int32") * code.astype("int32")

    operands = (
        Operand("a", tile.activations, "int8", 4, strided=tile.pairs, compact=3),
        Operand("b", tile.panel, "int8", 16, strided=True, compact=3),
        Operand("c", tile.sums, "int32", 16),
    )
    return Meaning("dot", operands, tile.sums, (tile.k // width, width), term, index="int32")


def spreading(source: str) -> Meaning:
    """``S[c, r] = V[2c + r % 2]``: factors of 4 rows of W as the sums of pairs want them.

    V is `source` [4], S float32 [2, 4], int32 for uint8.
    """
    made = "int32" if source == "uint8" else "float32"

    def term(axes: Sequence[Expr], values: Load) -> Expr:
        c, r = axes
        return values(c * 2 + r % 2).astype(made)

    operands = (Operand("v", (4,), source, 4), Operand("s", (2, 4), made, 16))
    return Meaning("spread", operands, (2, 4), (), term, adds=False, index="int32")


def rows_of_sums() -> Meaning:
    """``Y[m, r] = S[r // 2, 2m + r % 2]``: two vectors of sums in pairs as 2 rows of 4, float32."""

    def term(axes: Sequence[Expr], sums: Load) -> Expr:
        m, r = axes
        return sums(r // 2, m * 2 + r % 2)

    operands = (Operand("s", (2, 4), "float32", 16), Operand("y", (2, 4), "float32", 16, True))
    return Meaning("rows", operands, (2, 4), (), term, adds=False, index="int32")

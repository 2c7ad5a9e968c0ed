"""The meaning of micro-kernels: a tile of rows x vectors of columns, summed over one step of k.

::

    C[m, j, r] += sum over k, i of A[m, 4k + i] * B[j, k, r, i]        (integers)
    C[m, j, r] += sum over k of A[m, k] * B[j, k, r]                   (floats)

j counts vectors of R columns. Of codes in two planes of nibbles, B has an axis of planes before r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class Tile:
    """Shape of one micro-kernel call.

    Parameters
    ----------
    m : int
        Rows of activations.
    vectors : int
        Vectors of columns.
    lanes : int
        R, columns in a vector: 8 for 256-bit, 16 for 512-bit registers.
    k : int
        Products summed by one call; a multiple of 4 for integers.
    """

    m: int
    vectors: int
    lanes: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.vectors * self.lanes}x{self.k}"

    @property
    def sums(self) -> tuple[int, int, int]:
        """Shape of C."""
        return self.m, self.vectors, self.lanes

    def axes(self, integers: bool) -> tuple[str, tuple[int, ...]]:
        """Kinds and extents of the loops: m, j, r, then k and for integers i."""
        along = (self.k // 4, 4) if integers else (self.k,)
        return "SSS" + "R" * len(along), (*self.sums, *along)


def add_product(c: Buffer, at: tuple[Expr, ...], a: Expr, w: Expr) -> None:
    """Store ``c += a * w`` of floats."""
    _add(c, at, a * w, a, w)


def add_code(
    c: Buffer, at: tuple[Expr, ...], a: Expr, w: Callable[..., Expr], halves: bool
) -> None:
    """Store ``c += a * code``.

    Parameters
    ----------
    c, at
        The sum and its index.
    a : PrimExpr
        int8.
    w : callable
        The code's element of B, by its plane if there are two.
    halves : bool
        Whether codes are two planes of nibbles, low then high.
    """
    from tvm import tirx

    if halves:
        code = w(0).astype("int32") + w(1).astype("int32") * tirx.const(16, "int32")
    else:
        code = w().astype("int32")
    _add(c, at, a.astype("int32") * code, a, w(slice(0, 2)) if halves else w())


def _add(c: Buffer, at: tuple[Expr, ...], term: Expr, *reads: Any) -> None:
    from tvm.tirx.script.builder import ir as b

    b.reads(c[at], *reads)
    b.writes(c[at])
    b.buffer_store(c, c[at] + term, list(at))


def dequantize(
    out: Buffer, at: tuple[Expr, ...], code: Expr, zero: Expr, scale: Expr
) -> None:
    """Store ``out = (code - zero) * scale``, float32 of uint8."""
    from tvm.tirx.script.builder import ir as b

    b.reads(code, zero, scale)
    b.writes(out[at])
    b.buffer_store(out, (code.astype("float32") - zero) * scale, list(at))

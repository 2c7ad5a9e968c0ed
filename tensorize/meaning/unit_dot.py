"""The meaning of every dot product of one unit of packed codes with activations.

``acc[p, i, r] += Σ_k term(code[r, k], x[i, k])`` over the k of group p, for rows i of x and rows r
of the weights. The group axis is left out where a unit is one group, the row axis where there is
one row: a tensorized block has no axes of extent 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.interleaved import UNIT_K, Unit, centred_code, decode

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class UnitDot:
    """One dot product of a unit.

    Parameters
    ----------
    unit : Unit
    m : int
        Rows of x.
    x_dtype : {"int8", "float32"}
        With int8 the sums are int32 and of codes, with float32 of what codes stand for.
    offset : int
        Taken off the codes; of int8 alone.
    zeros : bool
        True if there is an operand of zero points, uint8 [R] or [2, R]; of float32 alone.
    """

    unit: Unit
    m: int
    x_dtype: str
    offset: int = 0
    zeros: bool = False

    @property
    def acc_dtype(self) -> str:
        """Type of the sums."""
        return "int32" if self.x_dtype == "int8" else "float32"

    @property
    def spatial(self) -> tuple[int, ...]:
        """Shape of the sums."""
        groups = (self.unit.groups,) if self.unit.groups > 1 else ()
        return (*groups, *((self.m,) if self.m > 1 else ()), self.unit.rows)

    @property
    def reduced(self) -> tuple[int, int]:
        """Extents of the loops over k: vectors of a group, four k of a vector."""
        return self.unit.vectors, 4

    def __str__(self) -> str:
        unit, short = self.unit, {"int8": "s8", "float32": "f32", "int32": "s32"}
        code = f"{'s' if self.offset else 'u'}{unit.bits}{'z' if self.zeros else ''}"
        name = f"{self.m}x{unit.rows}x{UNIT_K}_{short[self.x_dtype]}{code}{short[self.acc_dtype]}"
        return name + ("_t" if unit.whole else "") + ("_g16" if unit.groups == 2 else "")

    def store(
        self,
        acc: Buffer,
        target: Sequence[Expr],
        within: Sequence[Expr],
        byte: Callable[[Expr], Expr],
        x: Callable[[Expr, Expr], Expr],
        zero: Expr | None,
    ) -> None:
        """Store one term.

        Parameters
        ----------
        acc, target
            Where the sum is; the last axes of the target are `spatial`.
        within : sequence of PrimExpr
            Along `reduced`.
        byte : callable
            Of the unit, by its index.
        x : callable
            Activation of the row, by its four of k and its place in that.
        zero : PrimExpr or None
            The zero point, where there is one.
        """
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        j, c = within
        if self.unit.groups > 1:
            j = target[-len(self.spatial)] * i64(self.unit.vectors) + j
        code = decode(self.unit, byte, j, target[-1] * i64(4) + c)
        value = x(j, c)
        if self.x_dtype == "float32":
            term = centred_code(self.unit, code, zero) * value
        else:
            centred = code - tirx.const(self.offset, "int32") if self.offset else code
            term = centred * value.astype("int32")
        b.buffer_store(acc, acc[tuple(target)] + term, list(target))

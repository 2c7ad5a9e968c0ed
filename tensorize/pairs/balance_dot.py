"""What an instruction set adds to the product of one unit of ``W2*`` codes: instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apq_tvm.tensorize.exprs import i64, prefetch
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, balance_dot
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import pair
from apq_tvm.tensorize.registry import register

Expr = Any  # tvm is untyped
Buffer = Any


@dataclass(frozen=True)
class BalanceBuffers:
    """Operands of `balance_dot` for `m` rows of x and vectors of `lanes`."""

    lanes: int
    m: int
    codes: Buffer
    x: Buffer
    acc: Buffer

    def load_x(self, row: int, k: int, count: int) -> Expr:
        """int8 [count] of one row of x."""
        return self.x.vload([*self._lead(row), i64(k)], f"int8x{count}")

    def sums_at(self, row: int, part: int) -> list[Expr]:
        """Index of all lanes of one digit's sums."""
        from tvm import tirx

        return [*self._lead(row), i64(part), tirx.Ramp(i64(0), i64(1), self.lanes)]

    def add(self, row: int, part: int, term: Expr) -> None:
        """Add to all lanes of one digit's sums."""
        from tvm.tirx.script.builder import ir as b

        index = self.sums_at(row, part)
        b.buffer_store(self.acc, self.acc[tuple(index)] + term, index)

    def _lead(self, row: int) -> list[Expr]:
        return [i64(row)] if self.m > 1 else []


def balance_intrinsic(
    name: str, lanes: int, m: int, ahead: int, implement: Callable[[BalanceBuffers], None]
) -> str:
    """Register (once) and name `balance_dot` of one unit.

    Parameters
    ----------
    name : str
        Of the instruction.
    lanes : int
    m : int
        Rows of x; codes are taken apart once for all of them.
    ahead : int
        Bytes ahead of the unit to prefetch, 0 for none.
    implement : callable
        Emits the instructions.
    """
    full = f"apq_{name}_{m}x{PARTS * lanes}x{UNIT_K}_s8t5s32" + (f"_pf{ahead}" if ahead else "")

    def emit(codes: Buffer, x: Buffer, acc: Buffer) -> None:
        prefetch(codes, STORED * 4 * lanes, ahead)
        implement(BalanceBuffers(lanes, m, codes, x, acc))

    return register(full, lambda: pair(balance_dot(lanes, m), emit))

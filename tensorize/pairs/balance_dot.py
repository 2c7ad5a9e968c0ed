"""What an instruction set adds to the product of one unit of ``W2*`` codes: instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apq_tvm.tensorize.exprs import Expr, i64, prefetch
from apq_tvm.tensorize.meaning.balance import PARTS, STORED, balance_dot
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import Bound, Rows, pair
from apq_tvm.tensorize.registry import register


class BalanceBuffers(Bound):
    """Operands of `balance_dot`."""

    def digit_at(self, row: int, part: int) -> list[Expr]:
        """Index of all lanes of one digit's sums."""
        from tvm import tirx

        return self.at(row, part, tirx.Ramp(i64(0), i64(1), self.dot.lanes))

    def add(self, row: int, part: int, term: Expr) -> None:
        """Add to all lanes of one digit's sums."""
        from tvm.tirx.script.builder import ir as b

        index = self.digit_at(row, part)
        b.buffer_store(self.acc, self.acc[tuple(index)] + term, index)


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
    meaning = balance_dot(lanes, m)
    full = f"apq_{name}_{m}x{PARTS * lanes}x{UNIT_K}_s8t5s32" + (f"_pf{ahead}" if ahead else "")

    def emit(*buffers: Any) -> None:
        o = BalanceBuffers(Rows(m, lanes), meaning, buffers)
        prefetch(o.codes, STORED * 4 * lanes, ahead)
        implement(o)

    return register(full, lambda: pair(meaning, emit))

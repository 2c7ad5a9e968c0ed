"""Dynamic quantization of activations to words of four int8, operand B of ``mma.m16n8k32``."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.gpu.quantize import Four, GroupQuantizer
from apq_tvm.ops.gpu.rows import RowFactors, pair_of
from apq_tvm.ops.gpu.team import Team, local
from apq_tvm.tensorize.exprs import Expr, i32, i64


class WordQuantizer(GroupQuantizer):
    """Writes what `apq_tvm.ops.gpu.rows` says of one group of a row.

    Parameters
    ----------
    factors : RowFactors
    bits : int
        2..8.
    call : callable
        Device functions of teams.
    """

    factors: RowFactors

    def keep(self, array: Any, row: Expr, group: Expr, value: Expr) -> None:
        """Rows lie in pairs; the last row's number also where the row after it would have its
        own."""
        pair, odd, factors = pair_of(row), row % 2, self.factors

        def store(odd: Expr) -> None:
            if array is self.xs:
                b.buffer_store(array, value, factors.scale_place(*pair, group, odd))
                return
            for first in range(0, int(array.shape[-1]), 2):  # for both rows of weights
                place = factors.start_place(*pair, group, odd + i64(first))
                b.buffer_store(array, value, place)

        store(odd)
        with b.If(tirx.all(odd == 0, row + 1 == self.m)), b.Then():
            store(i64(1))

    def codes(
        self, team: Team, row: Expr, group: Expr, part: Expr, factors: Any, four: Four, inside: Expr
    ) -> None:
        """Codes of columns that share a sum, a word each turn of a thread; and their sum."""
        words = self.sum_width // 4
        first = group * i64(self.width // 4) + (part * words).astype("int64")
        mine = local(1, "int32")
        b.buffer_store(mine, i32(0), [0])
        with team.share(words) as word:
            packed: Any = None
            for byte, x in enumerate(four((first + word.astype("int64")) * i64(4))):
                code = self.code(x, factors)
                b.buffer_store(mine, mine[0] + code, [0])
                bits = (code & i32(255)) << i32(8 * byte)
                packed = bits if packed is None else packed | bits
            place = self.factors.word(first + word.astype("int64"))
            with b.If(inside), b.Then():
                b.buffer_store(self.xq, packed, [row, place])
        total = team.find("sum", mine[0])
        number = group * i64(self.width // self.sum_width) + part.astype("int64")
        with b.If(tirx.all(team.lane == 0, inside)), b.Then():
            self.keep(self.start, row, number, self.factors.start(total, number))

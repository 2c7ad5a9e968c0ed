"""Dynamic quantization of activations for kernels whose sums are spread over columns.

Codes and scales are those of `apq_tvm.ops.activations.quantize`. A lane of such a sum adds `QUAD`
columns, so that every `QUAD` columns get their scale: a vector of them is one load, whatever the
group. Where an instruction wants weights unsigned, their offset times the sum of activations comes
off the result: that sum is one number per row, whose groups are scaled already.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import Quantize, checked_widths
from apq_tvm.ops.blocks import argument, put
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc
from apq_tvm.tensorize.meaning.planes import QUAD


def quantize_spread(k: int, group: int, lanes: int, row_block: int, bits: int) -> PrimFunc:
    """Quantize rows of float32 activations, with scales per group of them.

    Parameters
    ----------
    k, lanes, row_block, bits : int
        As `apq_tvm.ops.activations.quantize.quantize_activations`.
    group : int
        Columns that share a scale.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, Kp], xs f32 [M, Kp / 4], xsum f32 [M, 1])``, M dynamic, Kp a
        multiple of the group and of 32.

    Raises
    ------
    NotApplicable
        There are no such bits.
    """
    padded, width, sum_width = checked_widths(k, group, group, bits)
    return _Spread(k, padded, width, sum_width, min(lanes, group), row_block, bits).build()


class _Spread(Quantize):
    name = "quantize_spread"

    def declare_factors(self, name: str, m: Expr, groups: int, dtype: str) -> Buffer:
        return argument(name, (m, self.padded // QUAD if name == "xs" else 1), "float32")

    def _row(self, row: Expr) -> None:
        with b.sblock("no_sum"):
            put(self.xsum, [row, 0], tirx.const(0.0, "float32"))
        super()._row(row)

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        count = self.width // QUAD
        if target.same_as(self.xs):
            with b.vectorized(0, count) as lane:
                b.buffer_store(target, value, [row, group * count + lane])
            return
        meant = value.astype("float32") * self.xs[row, group * count]
        b.buffer_store(target, target[row, 0] + meant, [row, 0])

    def kept(self, target: Buffer, row: Expr, group: Expr) -> Any:
        if target.same_as(self.xsum):
            return target[row, 0]
        count = self.width // QUAD
        return target[row, group * count : (group + 1) * count]

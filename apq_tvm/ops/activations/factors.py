"""Dynamic quantization of activations with the factors that kernels on records multiply by.

Codes, scales and sums are those of `apq_tvm.ops.activations.quantize`. `factors` float32 [M, G, 2]
has per group its scale times a power of two, and its scale times the sum of its codes: a kernel
loads each of them into all lanes at once, where products would first have to be copied there.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import Quantize, checked_widths
from apq_tvm.ops.blocks import argument
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc


def quantize_factors(k: int, group: int, powers: tuple[float, ...], row_block: int) -> PrimFunc:
    """Quantize rows of float32 activations to int8.

    Parameters
    ----------
    k : int
        Columns of x.
    group : int
        Columns that share a scale and a sum.
    powers : tuple of float
        What scales are multiplied by in `factors`: those of consecutive groups, again and again.
    row_block : int
        Rows in one parallel task.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, Kp], xs f32 [M, G], xsum i32 [M, G], factors f32 [M, G, 2])``.
    """
    padded, width, sum_width = checked_widths(k, group, group, 8)
    return _QuantizeFactors(powers, k, padded, width, sum_width, row_block).build()


class _QuantizeFactors(Quantize):
    def __init__(
        self,
        powers: tuple[float, ...],
        k: int,
        padded: int,
        width: int,
        sum_width: int,
        row_block: int,
    ) -> None:
        super().__init__(k, padded, width, sum_width, min(32, sum_width), row_block, 8)
        self.powers = powers

    def declare_more(self, m: Expr) -> None:
        self.factors = argument("factors", (m, self.padded // self.width, 2), "float32")

    def codes(
        self, row: Expr, sum_group: Expr, first: Expr, x: Any, inverse: Buffer, suffix: str
    ) -> None:
        super().codes(row, sum_group, first, x, inverse, suffix)
        with b.sblock(f"factor{suffix}"):
            scale, total = self.xs[row, sum_group], self.xsum[row, sum_group]
            b.reads(scale, total)
            b.writes(self.factors[row, sum_group, 0:2])
            power: Expr = tirx.const(self.powers[0], "float32")
            for i, value in enumerate(self.powers[1:], 1):
                mine = sum_group % len(self.powers) == i
                power = tirx.Select(mine, tirx.const(value, "float32"), power)
            b.buffer_store(self.factors, scale * power, [row, sum_group, 0])
            b.buffer_store(self.factors, scale * total.astype("float32"), [row, sum_group, 1])

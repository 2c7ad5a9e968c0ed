"""Dynamic quantization of activations with what lookup kernels on Arm add, as unscheduled TensorIR.

Codes, scales and sums are those of `apq_tvm.ops.activations.bundles`. `extra` float32 [M, G, 8] has
per group four times the start of its sums (`apq_tvm.tensorize.exprs.MAGIC`) and four times
the group's scale times a factor, or times the sum of its codes: loads are cheaper than copies.
Where the factor is to be `MAGIC`'s float, scales keep 22 bits, so that the product is exact.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.bundles import Bundles
from apq_tvm.ops.activations.quantize import shortened
from apq_tvm.ops.blocks import argument, put
from apq_tvm.tensorize.exprs import MAGIC, Expr, PrimFunc
from apq_tvm.tensorize.meaning.rounding import CODES
from apq_tvm.tensorize.meaning.spans.lookup import EXTRA

NAME = "quantize_extra"
"""Attribute ``apq.op``."""


def quantize_extra(
    k: int,
    padded: int,
    group: int,
    acts: float,
    factor: float | None,
    row_block: int,
    short: bool = False,
) -> PrimFunc:
    """Quantize rows of float32 activations to int8.

    Parameters
    ----------
    k, padded : int
        Columns of x, and of the codes.
    group : int
        Columns that share a scale and a sum; divides `padded`.
    acts, factor : float
        What scales are multiplied by, and what besides in `extra`; there None for the sum of codes.
    row_block : int
        Rows in one parallel task.
    short : bool
        Whether scales keep 22 bits.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [M, padded], xs f32 [M, G], xsum i32 [M, G], extra f32 [M, G, 8])``,
        M dynamic; besides the blocks of `apq_tvm.ops.activations.bundles` there is ``spread``.
    """
    func = _Extra(k, padded, group, acts, factor, row_block, short).build()
    return func.with_attr("apq.bits", 8)


class _Extra(Bundles):
    name = NAME

    def __init__(
        self,
        k: int,
        padded: int,
        group: int,
        acts: float,
        factor: float | None,
        row_block: int,
        short: bool,
    ) -> None:
        super().__init__(k, padded, group, group, CODES, row_block, 8)
        self.acts, self.factor, self.short = acts, factor, short

    def declare_more(self, m: Expr) -> None:
        self.extra = argument("extra", (m, self.padded // self.width, EXTRA), "float32")

    def _row(self, row: Expr) -> None:
        super()._row(row)
        extents = self.padded // self.width, EXTRA // 2
        if self.acts != 1 or self.short:
            with b.serial(0, extents[0]) as g0, b.sblock("scale_acts"):
                g = b.axis.spatial(extents[0], g0)
                b.reads()
                b.writes(self.xs[row, g])
                scale = shortened(self.xs[row, g]) if self.short else self.xs[row, g]
                scaled = scale * tirx.const(self.acts, "float32")
                b.buffer_store(self.xs, scaled, [row, g])
        for half in range(2):
            with b.grid(*extents) as loops, b.sblock(f"spread{half}"):
                g, i = b.axis.remap("SS", loops)
                if self.factor is None:
                    factor = self.xsum[row, g].astype("float32")
                else:
                    factor = tirx.const(self.factor, "float32")
                scaled = self.xs[row, g] * factor
                value = scaled if half else tirx.const(MAGIC, "float32")
                put(self.extra, [row, g, half * 4 + i], value)

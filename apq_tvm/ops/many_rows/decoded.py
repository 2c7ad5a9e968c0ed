"""Large-M linear layers with weights in any layout: a panel is decoded to float32 once.

What a weight is, the layout's own TensorIR expression says (`WeightLayout.weight`), so this works
for every format. Activations stay float32, as in `apq_tvm.ops.linear.decode`.
"""

from __future__ import annotations

from typing import Any

from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import WeightLayout
from apq_tvm.errors import NotApplicable
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.float import float_dots
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask, argument
from apq_tvm.tensorize.exprs import i64

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


class _DecodedGemm(GemmTask):
    """A block of the layout may be several vectors of `lanes` rows high."""

    def __init__(
        self, spec: LinearSpec, layout: WeightLayout, blocking: GemmBlocking, lanes: int, bits: int
    ) -> None:
        super().__init__(spec, blocking, lanes, spec.k)
        self.layout, self.bits = layout, bits
        self.parts = layout.rows // lanes

    def declare(self) -> None:
        spec = self.spec
        self.x = argument("x", (self.m, spec.k), "float32", 4)
        self.weights = {
            name: argument(name, shape, dtype, 64)
            for name, (shape, dtype) in self.layout.shapes(spec.n, spec.k).items()
        }

    def scratch(self) -> None:
        bl, lanes = self.blocking, self.lanes
        self.decoded = b.sblock_alloc_buffer((bl.vectors, bl.k_block, lanes), "float32", align=64)

    def fill(self, kb: Expr) -> None:
        bl = self.blocking
        mine = self.count(bl.k_block, self.spec.k, kb)
        with self.stage("weights", bl.vectors, mine, self.lanes) as (j, k, r):
            vector = self.row_block(j)
            block, lane = vector // i64(self.parts), vector % i64(self.parts) * i64(self.lanes) + r
            value = self.layout.weight(
                self.weights, block, lane, kb * i64(bl.k_block) + k, self.bits
            )
            b.reads()
            b.writes(self.decoded[j, k, r])
            b.buffer_store(self.decoded, value, [j, k, r])

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        float_dots(self, kb, sums, self.x, lambda j, k, r: self.decoded[j, k, r])


def decoded_gemm(
    spec: LinearSpec, layout: WeightLayout, blocking: GemmBlocking, lanes: int, bits: int = 0
) -> PrimFunc:
    """Linear layer with float32 activations and any weights.

    Parameters
    ----------
    spec : LinearSpec
    layout : WeightLayout
        Its rows must be a multiple of `lanes`.
    blocking : GemmBlocking
    lanes : int
        Of the float vectors.
    bits : int
        Width, where the scheme leaves a choice; 0 for the widest.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], *packed arrays, [bias], [residual], y)``, M >= m_tile.

    Raises
    ------
    NotApplicable
        The layout's rows are no multiple of `lanes`.
    """
    if layout.rows % lanes:
        raise NotApplicable(f"layout {layout.name} has blocks of {layout.rows} rows, not {lanes}")
    return _DecodedGemm(spec, layout, blocking, lanes, bits).build()

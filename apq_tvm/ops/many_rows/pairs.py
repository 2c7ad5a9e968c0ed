"""Large-M layers of 8-bit codes of which no two neighbours exceed 152 together: u8 x times s8 w.

An instruction that adds two products in 16 bits is exact for them
(`apq_tvm.formats.integer.PAIR_SUM`). Codes become signed in the panel; activations are unsigned,
and what they are too large by is in the centres of their rows.
"""

from __future__ import annotations

from tvm import tirx

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import IntegerGemm
from apq_tvm.ops.many_rows.task import GemmBlocking, arguments
from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.scaffold import Meaning
from apq_tvm.tensorize.meaning.tile import Tile, signed_products


class PairGemm(IntegerGemm):
    """Of whole rows, whose activations have zero points: ``(xq, xs, *packed arrays, ...)``."""

    code_dtype = "int8"

    def __init__(self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking) -> None:
        super().__init__(spec, layout, blocking)
        assert self.whole and spec.asymmetric and layout.bits == 8 and not layout.zero_points

    def declare(self) -> None:
        spec = self.spec
        self.xq = argument("xq", (self.m, self.k), "int8", 4)
        self.xs = argument("xs", (self.m, 1 + spec.centres), "float32", 4)
        self.weights = arguments(self.layout.shapes(spec.n, spec.k))

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        middle = tirx.const(128, "uint8")
        self.decode_codes(
            kb, j, u, lambda code: tirx.reinterpret("int8", tirx.bitwise_xor(code, middle))
        )

    def products(self, tile: Tile) -> Meaning:
        return signed_products(tile)

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        scale = self.of_group("scales", j, i64(0), r).astype("float32")
        return value.astype("float32") * (scale * self.xs[self.row + m, i64(0)])

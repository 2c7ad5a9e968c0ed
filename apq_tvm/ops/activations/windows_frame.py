"""What the two ways to quantize the windows of an image have in common: the signature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import Quantize
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.ops.images.windows import Gather, Geometry
from apq_tvm.tensorize.exprs import Expr, PrimFunc


class QuantizeWindows(Quantize, ABC):
    """`write` makes the loops, out of `gather` and the buffers ``x, xq, xs, xsum``."""

    def of(self, shape: Sequence[Dim], geometry: Geometry, channels: tuple[int, int]) -> PrimFunc:
        """The PrimFunc for one kind of windows."""
        m = tirx.Var("m", "int64")
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name(self.name)
            b.func_attr({"apq.op": self.name, "op_pattern": 8, "tirx.noalias": True})
            self.x = argument("x", Symbols().shape(shape), "float32")
            self.xq = self.declare_codes(m)
            self.xs = self.declare_scales(m)
            self.declare_sums(m)
            self.gather = Gather(self.x, geometry, *channels)
            self.write(m)
        return builder.get()

    @abstractmethod
    def write(self, m: Expr) -> None:
        """The loops over `m` rows."""

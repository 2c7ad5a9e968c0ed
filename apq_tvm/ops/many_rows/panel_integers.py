"""Uniform integers as panels of a GEMM: their values of groups lie in the weights as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.panels import PanelFormat, PanelGemm
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask
from apq_tvm.tensorize.exprs import Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.centred import largest_byte
from apq_tvm.tensorize.meaning.decoded_formats import uniform_unit
from apq_tvm.tensorize.meaning.interleaved import HALF, UNIT_K
from apq_tvm.tensorize.meaning.scaffold import View

Arrays = Any


class IntegerPanel(PanelFormat):
    """Codes less their zero points, of which those of 8 bits are not in the panel.

    Blocks of the layout have 4 rows, or 8 in runs of 8 k.
    """

    def __init__(self, layout: InterleavedLayout, k: int) -> None:
        self.half = layout.rows == 8
        self.wide_zeros = layout.zero_points and layout.bits == 8
        largest = 255 if self.wide_zeros else largest_byte(layout.bits, layout.zero_points)
        weights = CentredGroups(layout.padded_k(k), layout.group_width(k), largest)
        self.unit = layout.half_unit if self.half else layout.unit
        self.zeros = layout.zero_points and not self.wide_zeros
        super().__init__(layout, weights, uniform_unit(self.unit, self.zeros))

    @property
    def spread(self) -> Mapping[str, str]:
        return {"scales": "float16", **({"zeros": "uint8"} if self.wide_zeros else {})}

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        codes = View(arrays["codes"], (block, u, part * i64(HALF) if self.half else 0))
        if not self.zeros:
            return [codes]
        groups, width = self.unit.groups, max(1, self.weights.group // UNIT_K)
        group = u * groups if groups > 1 else u // width
        return codes, self.of_rows(arrays, "zeros", block, part, group)

    def of_rows(self, arrays: Arrays, name: str, block: Expr, part: Expr, group: Expr) -> View:
        """Values of 4 rows of a group."""
        return View(arrays[name], (block, group, part * i64(4) if self.half else 0))

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        raise NotImplementedError("the GEMM takes scales as they lie: `of_rows`")

    def gemm(self, spec: LinearSpec, blocking: GemmBlocking, tuning: CentredTuning) -> PrimFunc:
        return _IntegerGemm(spec, self, blocking, tuning).build()


class _IntegerGemm(PanelGemm):
    """Past the last row block of W a panel repeats it."""

    row_block, stored = GemmTask.row_block, GemmTask.stored

    def place(self, j: Expr) -> tuple[Expr, Expr]:
        block = self.row_block(j)
        return (block // i64(2), block % i64(2)) if self.format.half else (block, tirx.const(0))

    format: IntegerPanel

    def four(self, name: str, j: Expr, group: Expr) -> View:
        return self.format.of_rows(self.weights, name, *self.place(j), group)

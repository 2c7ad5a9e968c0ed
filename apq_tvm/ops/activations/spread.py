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


def quantize_spread(
    k: int, group: int, lanes: int, row_block: int, bits: int, turned: int = 0
) -> PrimFunc:
    """Quantize rows of float32 activations, with scales per group of them.

    Parameters
    ----------
    k, lanes, row_block, bits : int
        As `apq_tvm.ops.activations.quantize.quantize_activations`.
    group : int
        Columns that share a scale.
    turned : int
        Lanes of a register, where whole spans of so many groups are stored in another order: quad j
        of group l at quad ``j * turned + l`` of the span, and scales likewise. 0 keeps that of K.

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
    sizes = k, padded, width, sum_width, min(lanes, group), row_block, bits
    if not turned:
        return _Spread(*sizes).build()
    spread = _Turned(*sizes)
    spread.turned = turned
    return spread.build()


class _Spread(Quantize):
    name = "quantize_spread"

    def declare_factors(self, name: str, m: Expr, groups: int, dtype: str) -> Buffer:
        return argument(name, (m, self.padded // QUAD if name == "xs" else 1), "float32")

    def _row(self, row: Expr) -> None:
        with b.sblock("no_sum"):
            put(self.xsum, [row, 0], tirx.const(0.0, "float32"))
        super()._row(row)

    def place(self, group: Expr, quad: Expr) -> Expr:
        """Where a quad of a group is, in quads."""
        return group * (self.width // QUAD) + quad

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        if target.same_as(self.xs):
            with b.vectorized(0, self.width // QUAD) as lane:
                b.buffer_store(target, value, [row, self.place(group, lane)])
            return
        meant = value.astype("float32") * self.xs[row, self.place(group, 0)]
        b.buffer_store(target, target[row, 0] + meant, [row, 0])

    def kept(self, target: Buffer, row: Expr, group: Expr) -> Any:
        if target.same_as(self.xsum):
            return target[row, 0]
        count = self.width // QUAD
        return target[row, group * count : (group + 1) * count]


class _Turned(_Spread):
    """In the order that `planes_gemm_strided` reads (`apq_tvm.ops.few_rows.anyprec`)."""

    name = "quantize_turned"
    turned: int

    def place(self, group: Expr, quad: Expr) -> Expr:
        quads, spans = self.width // QUAD, self.k // (self.turned * self.width)
        span, lane = group // self.turned, group % self.turned
        there = (span * quads + quad) * self.turned + lane
        return tirx.if_then_else(span < spans, there, super().place(group, quad))

    def store_codes(self, row: Expr, chunk: Expr, codes: Buffer, suffix: str) -> None:
        chunks = self.width // self.lanes
        group, first = chunk // chunks, chunk % chunks * (self.lanes // QUAD)
        with b.grid(self.lanes // QUAD, QUAD) as (q0, e0), b.sblock(f"store{suffix}"):
            q, e = b.axis.remap("SS", [q0, e0])
            code = codes[q * QUAD + e]
            at = self.place(group, first + q) * QUAD + e
            put(self.xq, [row, at], code.astype("int8"), code)

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        if not target.same_as(self.xs):
            super().keep(target, row, group, value)
            return
        with b.serial(0, self.width // QUAD) as quad:  # places are apart
            b.buffer_store(target, value, [row, self.place(group, quad)])

    def kept(self, target: Buffer, row: Expr, group: Expr) -> Any:
        return target[row, 0 : int(target.shape[1])]

"""Dynamic quantization of activations straight to planes of bits, as unscheduled TensorIR.

Scales, codes and sums are those of `apq_tvm.ops.activations.quantize`; instead of int8 the codes
are stored as planes [M, p, Kp/32]: ABQ-LLM's BitPacking, [M, K, p] -> [p, M, K], fused with the
quantization (AAAI 2025, section 3.4), with M first so that a row of x keeps its planes together.
Bit ``8c + v`` of a plane's 32-bit word u is the bit of column 32u + 4v + c, the order in which
`apq_tvm.codegen.layouts.interleaved` keeps the bits of weights. Codes of 2 bits and more are two's
complement; a sign is 1 for +1.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K
from apq_tvm.ops.activations.quantize import Quantize, checked_widths
from apq_tvm.ops.blocks import argument, put
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc
from apq_tvm.tensorize.meaning.bitserial import pack_planes
from apq_tvm.tensorize.meaning.scaffold import View, product


def quantize_planes(
    k: int, act_group: int, weight_group: int, row_block: int, bits: int
) -> PrimFunc:
    """Quantize rows of float32 activations to planes.

    Parameters
    ----------
    k, act_group, weight_group, row_block, bits : int
        As `apq_tvm.ops.activations.quantize.quantize_activations`; groups of 32 or more.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], planes i32 [M, p, Kp/32], xs f32 [M, Ga], xsum i32 [M, Gw])``, M dynamic;
        for p = 2 ``minus i32 [M, Gw]`` follows, the codes of -1 that a sum is made of.

    Raises
    ------
    NotApplicable
        The groups do not divide each other.
    """
    padded, width, sum_width = checked_widths(k, act_group, weight_group, bits)
    return _Planes(k, padded, width, sum_width, UNIT_K, row_block, bits).build()


class _Planes(Quantize):
    name = "quantize_planes"

    def declare_codes(self, m: Expr) -> Buffer:
        return argument("planes", (m, self.bits, self.padded // UNIT_K), "int32")

    def declare_more(self, m: Expr) -> None:
        if self.bits == 2:
            self.minus = argument("minus", (m, self.padded // self.sum_width), "int32")

    def codes(
        self, row: Expr, sum_group: Expr, first: Expr, x: Any, inverse: Buffer, suffix: str
    ) -> None:
        super().codes(row, sum_group, first, x, inverse, suffix)
        if self.bits != 2:
            return
        words = self.sum_width // UNIT_K
        with b.serial(0, words) as w0, b.sblock(f"minus{suffix}"):
            w = b.axis.reduce(words, w0)
            word = self.xq[row, 1, sum_group * words + w]
            b.reads(word)
            b.writes(self.minus[row, sum_group])
            with b.init():
                b.buffer_store(self.minus, tirx.const(0, "int32"), [row, sum_group])
            total = self.minus[row, sum_group] + tirx.popcount(word)
            b.buffer_store(self.minus, total, [row, sum_group])

    def store_codes(self, row: Expr, chunk: Expr, codes: Buffer, suffix: str) -> None:
        """Pack 32 codes: ``planes[row, t, chunk]``."""
        value = codes
        if self.bits == 1:  # -1 and 0 (past K) become 0
            value = b.sblock_alloc_buffer((UNIT_K,), "int32", align=64)
            with b.serial(0, UNIT_K) as e0, b.sblock(f"sign{suffix}"):
                e = b.axis.spatial(UNIT_K, e0)
                one = tirx.const(1, "int32")
                put(value, [e], tirx.shift_right(codes[e] + one, one), codes[e])
        views = [View(value, (0,)), View(self.xq, (row, 0, chunk))]
        product(pack_planes(self.bits), f"pack{suffix}", lambda: views, init=True)

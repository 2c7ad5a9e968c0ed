"""Dynamic quantization of activations for smmla: rows in pairs, 8 columns at a time.

Scales, codes and sums are those of `apq_tvm.ops.quantize_activations`. They are stored as the
operands of `apq_tvm.tensorize.centred`'s pairs: 16 bytes are 2 rows x 8 columns, and a scale or sum
stands in the two lanes of a vector that its row has. The last pair's second row is zero where M is
odd.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.gemm_task import i64
from apq_tvm.ops.quantize_activations import Quantize, argument, checked_widths

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


def quantize_pairs(
    k: int, act_group: int, weight_group: int, lanes: int, row_block: int, bits: int
) -> PrimFunc:
    """Quantize rows of float32 activations to pairs of rows.

    Parameters
    ----------
    k, act_group, weight_group, lanes, row_block, bits : int
        As `apq_tvm.ops.quantize_activations.quantize_activations`.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [P, Kp/8, 2, 8], xs f32 [P, Ga, 4], xsum i32 [P, Gw, 4])``, M
        dynamic, P = ceil(M / 2).

    Raises
    ------
    NotApplicable
        The groups do not divide each other.
    """
    padded, width, sum_width = checked_widths(k, act_group, weight_group, bits)
    return _Pairs(k, padded, width, sum_width, min(lanes, sum_width), row_block, bits).build()


class _Pairs(Quantize):
    name = "quantize_pairs"

    def declare_codes(self, m: Expr) -> Buffer:
        return argument("xq", (_pairs(m), self.padded // 8, 2, 8), "int8")

    def declare_factors(self, name: str, m: Expr, groups: int, dtype: str) -> Buffer:
        return argument(name, (_pairs(m), groups, 4), dtype)

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        first = row % i64(2) * i64(2)
        for lane in range(2):
            b.buffer_store(target, value, [row // i64(2), group, first + i64(lane)])

    def kept(self, target: Buffer, row: Expr, group: Expr) -> Any:
        return target[row // i64(2), group, 0:4]

    def store_codes(self, row: Expr, chunk: Expr, codes: Buffer, suffix: str) -> None:
        parts = self.lanes // 8
        with b.grid(parts, 8) as loops, b.sblock(f"store{suffix}"):
            part, e = b.axis.remap("SS", loops)
            at = [row // i64(2), chunk * parts + part, row % i64(2), e]
            b.reads(codes[part * 8 + e])
            b.writes(self.xq[tuple(at)])
            b.buffer_store(self.xq, codes[part * 8 + e].astype("int8"), at)

    def pad_rows(self, m: Expr, end: Expr) -> None:
        """The second row of the last pair."""
        odd = tirx.And(end == m, m % i64(2) == i64(1))
        last = m // i64(2)
        with b.If(odd), b.Then():
            with b.grid(self.padded // 8, 8) as loops, b.sblock("no_codes"):
                k, e = b.axis.remap("SS", loops)
                b.reads()
                b.writes(self.xq[last, k, 1, e])
                b.buffer_store(self.xq, tirx.const(0, "int8"), [last, k, i64(1), e])
            for name, target in (("scales", self.xs), ("sums", self.xsum)):
                with b.grid(target.shape[1], 2) as loops, b.sblock(f"no_{name}"):
                    g, lane = b.axis.remap("SS", loops)
                    b.reads()
                    b.writes(target[last, g, lane + i64(2)])
                    zero = tirx.const(0, target.dtype)
                    b.buffer_store(target, zero, [last, g, lane + i64(2)])


def _pairs(m: Expr) -> Expr:
    return (m + i64(1)) // i64(2)

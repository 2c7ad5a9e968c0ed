"""Large-M linear layers with int8 activations: packed codes are decoded to bytes once a panel."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from apq_tvm.codegen.layouts import InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.bytes import ByteGemm
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.tensorize.exprs import i64

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


class IntegerGemm(ByteGemm):
    """Uniform codes."""

    def __init__(
        self, spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking, halves: bool
    ) -> None:
        k = spec.k
        super().__init__(
            spec, layout, blocking, layout.rows, layout.group_width(k), layout.padded_groups(k)
        )
        self.halves = halves
        # +-1 codes: 2 * code - 1, so that the offset is an integer.
        self.doubled = layout.bits == 1 and not layout.zero_points

    def scratch(self) -> None:
        super().scratch()
        if self.layout.zero_points and not self.whole:
            self.zeros = self.per_group("int32")

    def decode_unit(self, kb: Expr, j: Expr, u: Expr) -> None:
        if self.halves:
            low, four = tirx.const(15, "uint8"), tirx.const(4, "uint8")
            self.decode_codes(kb, j, u, lambda code: tirx.bitwise_and(code, low), 0)
            self.decode_codes(kb, j, u, lambda code: tirx.shift_right(code, four), 1)
        elif self.doubled:
            self.decode_codes(kb, j, u, lambda code: code + code)
        else:
            self.decode_codes(kb, j, u)

    def fill_groups(self, mine: Any, first: Expr) -> None:
        super().fill_groups(mine, first)
        if self.layout.zero_points:
            self.fill_group("zeros", self.zeros, mine, first)

    def offset(self, j: Expr, group: Expr, r: Expr) -> Expr:
        if self.layout.zero_points:
            return self.zeros[j, group, r]
        return tirx.const(1 if self.doubled else 1 << (self.layout.bits - 1), "int32")

    def whole_offset(self, j: Expr, r: Expr) -> Expr:
        if self.layout.zero_points:
            return self.of_group("zeros", j, i64(0), r).astype("int32")
        return super().whole_offset(j, r)


def integer_gemm(
    spec: LinearSpec, layout: InterleavedLayout, blocking: GemmBlocking, halves: bool = False
) -> PrimFunc:
    """Linear layer with int8 activations, as `apq_tvm.ops.linear.interleaved.packed_linear`.

    Parameters
    ----------
    spec : LinearSpec
        With 8-bit activations.
    layout : InterleavedLayout
    blocking : GemmBlocking
    halves : bool
        True to decode codes into two planes of nibbles (`apq_tvm.tensorize.x86.gemm.splits_codes`).

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [zeros], [bias],
        [residual], y)``, M >= m_tile.
    """
    return IntegerGemm(spec, layout, blocking, halves).build()

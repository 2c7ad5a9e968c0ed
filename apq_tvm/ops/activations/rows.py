"""Dynamic quantization of activations for GEMMs on Arm: rows interleaved as vectors want them.

Scales, codes and sums are those of `apq_tvm.ops.activations.quantize`. They are stored as the
operands of `apq_tvm.tensorize.meaning.centred`: 16 bytes are 2 rows x 8 columns for smmla, 4 rows x
4 columns for sdot by lane, and a scale or sum stands in the lanes of a vector that its row has.
Rows past M are zeros.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import Quantize, checked_widths, copy_row
from apq_tvm.ops.blocks import argument, put
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64


def quantize_rows(
    k: int,
    act_group: int,
    weight_group: int,
    lanes: int,
    row_block: int,
    bits: int,
    together: int,
    meant: bool = False,
    copy: bool = False,
    asymmetric: bool = False,
) -> PrimFunc:
    """Quantize rows of float32 activations and interleave them.

    Parameters
    ----------
    k, act_group, weight_group, lanes, row_block, bits : int
        As `apq_tvm.ops.activations.quantize.quantize_activations`.
    together : int
        R, rows in a vector: 2 or 4.
    meant : bool
        Whether sums are float32: of what codes mean, where they have their own scales.
    copy : bool
        Whether x itself is wanted beside.
    asymmetric : bool

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], xq i8 [B, Kp R / 16, R, 16 / R], xs f32 [B, Ga or 2, 4], xsum [B, Gw, 4],
        [xf f32 [M, K]])``, M dynamic, B = ceil(M / R), xsum int32 or float32.

    Raises
    ------
    NotApplicable
        The groups do not divide each other.
    """
    padded, width, sum_width = checked_widths(k, act_group, weight_group, bits)
    shape = (k, padded, width, sum_width, min(lanes, sum_width), row_block, bits)
    return _Rows(*shape, asymmetric, together=together, meant=meant, copy=copy).build()


class _Rows(Quantize):
    name = "quantize_rows"

    def __init__(self, *shape: Any, together: int, meant: bool, copy: bool) -> None:
        super().__init__(*shape)
        self.together, self.run = i64(together), 16 // together
        self.copies, self.meant, self.copy = 4 // together, meant, copy

    def _blocks(self, m: Expr) -> Expr:
        return (m + (self.together - i64(1))) // self.together

    def declare_codes(self, m: Expr) -> Buffer:
        shape = (self._blocks(m), self.padded // self.run, int(self.together), self.run)
        return argument("xq", shape, "int8")

    def declare_factors(self, name: str, m: Expr, groups: int, dtype: str) -> Buffer:
        dtype = "float32" if self.meant else dtype
        return argument(name, (self._blocks(m), groups, 4), dtype)

    def declare_more(self, m: Expr) -> None:
        if self.copy:
            self.xf = argument("xf", (m, self.k), "float32")

    def _row(self, row: Expr) -> None:
        super()._row(row)
        if self.copy:
            copy_row(self.x, self.xf, row, self.k)

    def keep(self, target: Buffer, row: Expr, group: Expr, value: Expr) -> None:
        first = row % self.together * i64(self.copies)
        if self.meant and target.same_as(self.xsum):
            value = value.astype("float32")
            if self.width == self.sum_width:
                value = value * self.xs[row // self.together, group, first]
        for lane in range(self.copies):
            b.buffer_store(target, value, [row // self.together, group, first + i64(lane)])

    def kept(self, target: Buffer, row: Expr, group: Any) -> Any:
        return target[row // self.together, group, 0:4]

    def store_codes(self, row: Expr, chunk: Expr, codes: Buffer, suffix: str) -> None:
        parts, run = self.lanes // self.run, self.run
        with b.grid(parts, run) as loops, b.sblock(f"store{suffix}"):
            part, e = b.axis.remap("SS", loops)
            at = [row // self.together, chunk * parts + part, row % self.together, e]
            put(self.xq, at, codes[part * run + e].astype("int8"), codes[part * run + e])

    def pad_rows(self, m: Expr, end: Expr) -> None:
        """Zeros for the rows of the last block that are past M."""
        last, there = m // self.together, m % self.together
        with b.If(tirx.And(end == m, there != i64(0))), b.Then():
            missing = b.bind(self.together - there)
            with b.grid(self.padded // self.run, missing, self.run) as loops, b.sblock("no_codes"):
                k, row, e = b.axis.remap("SSS", loops)
                at = [last, k, there + row, e]
                put(self.xq, at, tirx.const(0, "int8"))
            for name, target in (("scales", self.xs), ("sums", self.xsum)):
                lanes = missing * i64(self.copies)
                with b.grid(target.shape[1], lanes) as loops, b.sblock(f"no_{name}"):
                    g, lane = b.axis.remap("SS", loops)
                    at = [last, g, there * i64(self.copies) + lane]
                    put(target, at, tirx.const(0, target.dtype))

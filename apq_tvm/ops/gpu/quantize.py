"""Dynamic quantization of activations on a GPU: threads share a row's group.

Scales, codes and sums are those of `apq_tvm.ops.activations.quantize`, which says what they mean.
How they lie says `apq_tvm.ops.gpu.rows`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.activations.quantize import range_factors, scale_and_inverse
from apq_tvm.ops.blocks import argument, each
from apq_tvm.ops.gpu.rows import RowFactors
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i32, i64, magnitude_bits


class QuantizeWords:
    """Builds the PrimFunc.

    Parameters
    ----------
    factors : RowFactors
        How codes, scales and sums lie; `factors.width` columns share a scale.
    bits : int
        2..8.
    asymmetric : bool
        Of 8 bits and a scale per row: with a zero point.
    threads : int
        That share a group, a power of 2, 32 at most where a warp holds several groups.

    Raises
    ------
    NotApplicable
        Groups that do not divide each other, or are of no whole words.
    """

    def __init__(self, factors: RowFactors, bits: int, threads: int) -> None:
        self.factors, self.threads = factors, threads
        self.k, self.padded = factors.k, factors.padded
        self.width, self.sum_width = factors.width, factors.sum_width
        self.asymmetric = factors.centres > 0
        if self.padded % self.width or self.width % self.sum_width or self.sum_width % 4:
            raise NotApplicable(
                f"K={self.k}: groups of {self.width} and {self.sum_width} do not nest"
            )
        self.most = float((1 << (bits - 1)) - 1)

    def build(self) -> PrimFunc:
        """``(x f32 [M, K], xq i32 [M, Kp / 4], xs f32, start i32)``; block ``group`` over
        (row, group), in it steps whose loops ``lane`` and ``turn`` share a group."""
        m = self.m = tirx.Var("m", "int64")
        groups = self.padded // self.width
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("quantize_words")
            b.func_attr({"apq.op": "quantize_words", "op_pattern": 8, "tirx.noalias": True})
            self.x = argument("x", (m, self.k), "float32")
            self.xq = argument("xq", self.factors.words(m), "int32")
            self.xs = argument("xs", self.factors.scales(m), "float32")
            self.start = argument("start", self.factors.starts(m), "int32")
            with b.grid(m, i64(groups)) as (row, group), b.sblock("group"):
                self.row, self.group = b.axis.spatial(m, row), b.axis.spatial(i64(groups), group)
                b.reads(self.x[0:m, 0 : self.k])
                b.writes(self.xq[0:m, 0 : self.padded // 4])
                self._group()
        return builder.get()

    def _group(self) -> None:
        first = self.group * i64(self.width)
        if self.asymmetric:
            self.top = self._largest("top", lambda x: tirx.reinterpret("int32", x), first)
            self.low = self._largest("low", _negative_order, first)
        else:
            self.top = self._largest("top", magnitude_bits, first)
        self._store_scale()
        with each("part", self.width // self.sum_width) as part:
            self._codes(part)

    def _value(self, column: Expr) -> Expr:
        """x, and 0 past K."""
        if self.padded == self.k:
            return self.x[self.row, column]
        inside = column < i64(self.k)
        return tirx.if_then_else(inside, self.x[self.row, column], f32(0.0))

    def _largest(self, name: str, pattern: Any, first: Expr) -> Any:
        """int32 [1]: the largest pattern of a group."""
        found = b.sblock_alloc_buffer((1,), "int32", scope="local")
        turns = -(-self.width // self.threads)
        with b.grid(self.threads, turns) as (lane, turn), b.sblock(name):
            at = b.axis.reduce(self.width, turn * self.threads + lane)
            if self.width % self.threads:
                b.where(turn * self.threads + lane < self.width)
            b.reads(self.x[0 : self.x.shape[0], 0 : self.k])
            b.writes(found[0])
            with b.init():
                b.buffer_store(found, tirx.min_value("int32"), [0])
            value = pattern(self._value(first + at.astype("int64")))
            b.buffer_store(found, tirx.max(found[0], value), [0])
        return found

    def _factors(self) -> tuple[Expr, ...]:
        """Scale, its inverse and, of asymmetric rows, the middle."""
        if self.asymmetric:
            return range_factors(*(tirx.max(p[0], i32(0)) for p in (self.top, self.low)))
        return scale_and_inverse(tirx.reinterpret("float32", self.top[0]), self.most)

    def _store_scale(self) -> None:
        with b.serial(0, self.threads) as lane, b.sblock("scale"):
            lane_ = b.axis.spatial(self.threads, lane)
            b.reads(self.top[0])
            b.writes(self.xs[0 : self.xs.shape[0], 0 : self.xs.shape[1], 0])
            with b.If(lane_ == 0), b.Then():
                scale, *rest = self._factors()
                self._store_pair(self.xs, self.group, self.factors.divided(scale, self.group))
                if self.asymmetric:
                    self._store_pair(self.xs, i64(1), scale * rest[1])

    def _store_pair(self, array: Any, group: Expr, value: Expr) -> None:
        """A value of this row; the last row's also where the row after it would have its own."""
        pair, odd, copies = self.row // 2, self.row % 2, int(array.shape[-1]) // 2
        for copy in range(copies):
            b.buffer_store(array, value, [pair, group, odd + i64(2 * copy)])
        alone = tirx.all(odd == 0, self.row + 1 == self.m)
        with b.If(alone), b.Then():
            for copy in range(copies):
                b.buffer_store(array, value, [pair, group, i64(1 + 2 * copy)])

    def _codes(self, part: Expr) -> None:
        """Codes of columns that share a sum, a word each turn of a thread; and their sum."""
        words = self.sum_width // 4
        first = self.group * i64(self.width // 4) + (part * words).astype("int64")
        turns = -(-words // self.threads)
        total = b.sblock_alloc_buffer((1,), "int32", scope="local")
        mine = b.sblock_alloc_buffer((1,), "int32", scope="local")
        factors = b.sblock_alloc_buffer((2,), "float32", scope="local")
        with b.serial(0, self.threads) as lane, b.sblock("codes"):
            lane_ = b.axis.spatial(self.threads, lane)
            b.reads(self.top[0])
            b.writes(mine[0])
            most = f32(self.most)
            for place, factor in enumerate(self._factors()[1:]):
                b.buffer_store(factors, factor, [place])
            b.buffer_store(mine, i32(0), [0])
            with b.serial(0, turns) as turn:
                word = turn * self.threads + lane_
                with b.If(word < words), b.Then():
                    packed: Any = None
                    for byte in range(4):
                        at = (first + word.astype("int64")) * i64(4) + i64(byte)
                        value = self._value(at) * factors[0]
                        value = value - factors[1] if self.asymmetric else value
                        code = tirx.max(tirx.min(tirx.nearbyint(value), most), -most)
                        number = code.astype("int32")
                        b.buffer_store(mine, mine[0] + number, [0])
                        bits = (number & i32(255)) << i32(8 * byte)
                        packed = bits if packed is None else packed | bits
                    place = self.factors.word(first + word.astype("int64"))
                    b.buffer_store(self.xq, packed, [self.row, place])
        with b.serial(0, self.threads) as lane, b.sblock("total"):
            lane_ = b.axis.reduce(self.threads, lane)
            b.reads(mine[0])
            b.writes(total[0])
            with b.init():
                b.buffer_store(total, i32(0), [0])
            b.buffer_store(total, total[0] + mine[0], [0])
        with b.serial(0, self.threads) as lane, b.sblock("sum"):
            lane_ = b.axis.spatial(self.threads, lane)
            b.reads(total[0])
            b.writes(self.start[0 : self.start.shape[0], 0 : self.start.shape[1], 0])
            with b.If(lane_ == 0), b.Then():
                group = self.group * i64(self.width // self.sum_width) + part.astype("int64")
                first = self.factors.start(total[0], group)
                self._store_pair(self.start, group, first)


def _negative_order(x: Expr) -> Expr:
    """`apq_tvm.ops.activations.quantize.negative_order` without the lowest int32, which is no int32
    in C: ``-2147483648`` negates a long."""
    return tirx.bitwise_not(tirx.reinterpret("int32", x)) ^ i32(0x7FFFFFFF)

"""A normalization and the quantization of its result in one kernel: a block of threads a row."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.blocks import argument
from apq_tvm.ops.gpu.quantize import BLOCK, GroupQuantizer
from apq_tvm.ops.gpu.team import WARP, Team, local, meet, shared
from apq_tvm.ops.graph.layernorm import of_last_axis
from apq_tvm.tensorize.exprs import Expr, PrimFunc, f32, i64

LONGEST = 11 * 1024
"""Columns whose floats fit into a block's 48 KiB of shared memory beside what teams write there."""


def normalize_rows(layernorm: PrimFunc, quantizer: GroupQuantizer) -> PrimFunc:
    """Build ``(x f32 [M, K], scale [K], [bias [K]], y f32 [M, K], xq, xs, start)``, threads bound.

    Parameters
    ----------
    layernorm : PrimFunc
        Of `apq_tvm.ops.graph.layernorm`, which says what y is.
    quantizer : GroupQuantizer
        Of y.

    Raises
    ------
    NotApplicable
        More than the last axis is normalised, statistics are outputs, or rows are too long.
    """
    epsilon, centred, biased = of_last_axis(layernorm)
    factors = quantizer.factors
    if factors.padded > LONGEST:
        raise NotApplicable(f"rows of {factors.padded} columns do not fit into shared memory")
    # Not more threads than have four columns each.
    threads = next(t for t in (BLOCK, 128, 64, WARP) if 4 * t <= factors.k or t == WARP)
    return _Kernel(quantizer, threads, epsilon).build(rms=not centred, bias=biased)


class _Kernel:
    def __init__(self, quantizer: GroupQuantizer, threads: int, epsilon: float) -> None:
        self.quantizer, self.threads, self.epsilon = quantizer, threads, epsilon
        self.k = quantizer.factors.k

    def build(self, rms: bool, bias: bool) -> PrimFunc:
        m, k = tirx.Var("m", "int64"), self.k
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name("layernorm_quantize_words")
            b.func_attr({"apq.op": "layernorm_quantize_words", "op_pattern": 8})
            b.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            x = argument("x", (m, k), "float32")
            scale = argument("scale", (k,), "float32")
            shift = argument("bias", (k,), "float32") if bias else None
            y = argument("y", (m, k), "float32")
            self.quantizer.declare(m)
            with (
                b.thread_binding(0, m, "blockIdx.x") as row,
                b.thread_binding(0, self.threads, "threadIdx.x") as thread,
                b.sblock("row"),
            ):
                b.reads()
                b.writes()
                self.team = Team(self.threads, thread, self.quantizer.call)
                # Whole turns of all threads: TVM puts no barrier into a branch.
                self.columns = -(-self.quantizer.factors.padded // self.threads) * self.threads
                self.row = shared(self.columns, "float32")
                centred = self._centred(x, row, rms)
                inverse = self._inverse(centred)
                value = local(1, "float32")
                with self.team.share(self.columns) as at:
                    column = at.astype("int64")
                    b.buffer_store(value, centred(at) * inverse, [0])
                    with b.If(column < i64(k)):
                        with b.Then():
                            scaled = value[0] * scale[column]
                            scaled = scaled if shift is None else scaled + shift[column]
                            b.buffer_store(value, scaled, [0])
                            b.buffer_store(y, value[0], [row, column])
                        with b.Else():
                            b.buffer_store(value, f32(0.0), [0])
                    b.buffer_store(self.row, value[0], [at])
                meet()
                self.quantizer.write_row(thread, self.threads, row, self.row)
        return builder.get()

    def _centred(self, x: Any, row: Expr, rms: bool) -> Any:
        """x less its mean by column, some number past K."""

        def of_x(at: Expr) -> Expr:
            column = at.astype("int64")
            if self.columns == self.k:
                return x[row, column]
            return tirx.if_then_else(column < i64(self.k), x[row, column], f32(0.0))

        if rms:
            return of_x
        total = local(1, "float32")
        b.buffer_store(total, f32(0.0), [0])
        with self.team.share(self.columns) as at:
            b.buffer_store(total, total[0] + of_x(at), [0])
        mean = self.team.find("sum", total[0]) * f32(1 / self.k)
        return lambda at: of_x(at) - mean

    def _inverse(self, centred: Any) -> Expr:
        squares, inverse = local(1, "float32"), local(1, "float32")
        b.buffer_store(squares, f32(0.0), [0])
        with self.team.share(self.columns) as at:
            square = centred(at) * centred(at)
            if self.columns > self.k:
                square = tirx.Select(at < self.k, square, f32(0.0))
            b.buffer_store(squares, squares[0] + square, [0])
        variance = self.team.find("sum", squares[0]) * f32(1 / self.k)
        b.buffer_store(inverse, f32(1.0) / tirx.sqrt(variance + f32(self.epsilon)), [0])
        return inverse[0]

"""Tables of activation sums for layers of binary codes, as unscheduled TensorIR.

Every four activations of a row (a *quad*; columns past K are 0) give 16 sums ±x0 ±x1 ±x2 ±x3: entry
e adds x_t where bit t of e is 1 and subtracts it where it is 0 (LUT-GEMM, section 3.3, with μ = 4).

Integer tables hold ``128 + round(sum / scale)`` in uint8, with one scale per *span* of columns:
``scale = max over the span's quads of Σ|x_t| / 127``. Rounding moves an entry by at most half a
scale, so a sum over a span of w columns, times alpha of q planes, is off by at most

    w / 4 · scale / 2 · Σ_i |alpha_i|

besides float32 rounding. The mean error is far below: entries are rounded to both sides. A span
whose largest sum is below 2^-100 counts as zero. A NaN or an infinity among the activations makes
its span's scale NaN or infinite, and so every result that it enters.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import Load, each_part, scale_and_inverse
from apq_tvm.ops.blocks import argument, each, put, reduce_all
from apq_tvm.tensorize.exprs import MAGIC, Buffer, Expr, PrimFunc, f32, i32, i64, magnitude_bits
from apq_tvm.tensorize.meaning.binary_codes import ENTRIES, signs

LARGEST = 127
"""Largest magnitude in an integer table."""

MIDDLE = 128
"""What an integer table adds to every entry."""

SPANS = (256, 128, 64, 32)
"""Columns that share a scale where weights have one group per row: the widest that fits."""


def span_width(padded_k: int, group_size: int) -> int:
    """Columns that share one scale: a weight group, or part of a whole row."""
    if group_size != -1:
        return group_size
    return next(width for width in SPANS if padded_k % width == 0)


def lut_tables(k: int, padded_k: int, span: int, dtype: str) -> PrimFunc:
    """Tabulate rows of float32 activations.

    Parameters
    ----------
    k, padded_k : int
        Columns of x, and with zeros up to whole spans.
    span : int
        Columns that share a scale and a sum.
    dtype : {"uint8", "float32"}

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], tables [M, 4 Kp], [scales f32 [M, spans],] sums f32 [M, spans])``: sums are
        plain sums of x, which offsets multiply; scales are there for integer tables.
    """
    m = tirx.Var("m", "int64")
    spans = padded_k // span
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("lut_tables")
        b.func_attr({"apq.op": "lut_tables", "op_pattern": 8, "tirx.noalias": True})

        x = argument("x", (m, k), "float32")
        tables = argument("tables", (m, 4 * padded_k), dtype)
        scales = argument("scales", (m, spans), "float32") if dtype == "uint8" else None
        sums = argument("sums", (m, spans), "float32")
        with b.sblock("root"):
            b.reads()
            b.writes()
            with each("row", m) as row:

                def part(at: Expr, load: Load, suffix: str, row: Expr = row) -> None:
                    _Span(load, tables, scales, sums, suffix).emit(row, at, span)

                each_part(x, row, (k, padded_k, span), ("span", "span_tail"), part)
    return builder.get()


class _Span:
    """Emits the loops for one span of one row of x, whose activations `x` gives by column."""

    def __init__(
        self, x: Load, tables: Buffer, scales: Buffer | None, sums: Buffer, suffix: str
    ) -> None:
        self.x, self.tables, self.scales, self.sums = x, tables, scales, sums
        self.suffix = suffix

    def emit(self, row: Expr, span: Expr, width: int) -> None:
        """Scale, tables and sum of span number `span`."""
        quads = width // 4
        self._sum(row, span, quads)
        inverse = None
        if self.scales is not None:
            inverse = self._scale(self.scales, row, span, quads)
        with b.grid(i64(quads), i64(ENTRIES)) as (q0, e0), b.sblock(f"table{self.suffix}"):
            q, e = b.axis.remap("SS", [q0, e0])
            b.reads(*([] if inverse is None else [inverse[0]]))
            at = [row, span * i64(4 * width) + q * i64(ENTRIES) + e]
            b.writes(self.tables[tuple(at)])
            index = e.astype("int32")
            total = None
            for t in range(4):
                value, factor = self.x(q * i64(4) + i64(t)), f32(1.0)
                if inverse is not None:
                    factor = inverse[0]
                term = tirx.Select(signs(index, t), factor, -factor) * value
                total = term if total is None else total + term
            if inverse is not None:
                # Rounded to even; the low byte is the integer. Only that of a NaN can be out of
                # range.
                pattern = tirx.reinterpret("int32", total + f32(MAGIC))
                code = tirx.max(pattern.astype("int8"), tirx.const(-LARGEST, "int8"))
                middle = tirx.const(MIDDLE, "uint8")
                total = tirx.bitwise_xor(tirx.reinterpret("uint8", code), middle)
            b.buffer_store(self.tables, total, at)

    def _sum(self, row: Expr, span: Expr, quads: int) -> None:
        lanes = b.sblock_alloc_buffer((8,), "float32", align=64)
        with b.grid(i64(quads // 2), i64(8)) as (c0, l0), b.sblock(f"add{self.suffix}"):
            lane, c = b.axis.spatial(8, l0), b.axis.reduce(quads // 2, c0)
            b.reads(self.x(c * i64(8) + lane))
            b.writes(lanes[lane])
            with b.init():
                b.buffer_store(lanes, f32(0.0), [lane])
            b.buffer_store(lanes, lanes[lane] + self.x(c * i64(8) + lane), [lane])
        with b.sblock(f"sum{self.suffix}"):
            four = [lanes[i] + lanes[i + 4] for i in range(4)]
            put(self.sums, [row, span], (four[0] + four[1]) + (four[2] + four[3]), lanes[0:8])

    def _scale(self, scales: Buffer, row: Expr, span: Expr, quads: int) -> Buffer:
        """Store the span's scale; its inverse is in the buffer returned."""
        largest = b.sblock_alloc_buffer((8,), "int32", align=64)
        top = b.sblock_alloc_buffer((1,), "int32", align=64)
        inverse = b.sblock_alloc_buffer((1,), "float32", align=64)
        with b.grid(i64(quads // 8), i64(8)) as (c0, l0), b.sblock(f"largest{self.suffix}"):
            lane, c = b.axis.spatial(8, l0), b.axis.reduce(quads // 8, c0)
            first = c * i64(32) + lane * i64(4)
            b.reads()
            b.writes(largest[lane])
            with b.init():
                b.buffer_store(largest, i32(0), [lane])
            size = [
                tirx.reinterpret("float32", magnitude_bits(self.x(first + i64(t))))
                for t in range(4)
            ]
            pattern = tirx.reinterpret("int32", (size[0] + size[1]) + (size[2] + size[3]))
            b.buffer_store(largest, tirx.max(largest[lane], pattern), [lane])
        reduce_all(f"top{self.suffix}", "max", largest, top)
        with b.sblock(f"factors{self.suffix}"):
            b.reads(top[0])
            b.writes(inverse[0], scales[row, span])
            size = tirx.reinterpret("float32", top[0])
            scale, over = scale_and_inverse(size, float(LARGEST))
            b.buffer_store(scales, scale, [row, span])
            b.buffer_store(inverse, over, [0])
        return inverse

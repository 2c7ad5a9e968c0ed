"""Dynamic int8 quantization of activations for ``mixed24``: rounded, permuted and summed at once.

One scale per row, as in `apq_tvm.ops.activations.quantize`, whose rules for zeros, NaN and infinity
hold here too. Every group of 16 channels goes where the layout's ``permutation`` puts it, so that
the weights' word rows meet their activations in one stream; places without a group get zeros.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.mixed import MixedLayout
from apq_tvm.formats.mixed import GROUP, Sizes
from apq_tvm.ops.activations.quantize import copy_row, scale_and_inverse
from apq_tvm.ops.blocks import argument, each, put, reduce_all, row_tasks
from apq_tvm.tensorize.exprs import Buffer, Expr, f32, i32, i64, magnitude_bits


def mixed_activations(
    layout: MixedLayout, k: int, copy: bool, row_block: int = 1, bits: int = 8
) -> Any:
    """Quantize and permute rows of float32 activations.

    Parameters
    ----------
    layout : MixedLayout
    k : int
        Columns of x.
    copy : bool
        Whether x itself is wanted beside, for outliers.
    row_block : int
        Rows in one parallel task.
    bits : int
        2..8: codes lie in [-(2^(bits-1) - 1), 2^(bits-1) - 1].

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], permutation i32 [G], xq i8 [M, Kp], xs f32 [M, 1], minus i32 [M, P + 1],
        [xf f32 [M, K]])``, M dynamic, P = Kp / 16: ``minus[m, p]`` is -Σ xq of place p, and
        ``minus[m, P]`` that of all 4-bit groups. Loops are scheduled but for tasks and reductions
        ``top`` and ``total`` over 16 lanes.
    """
    m = tirx.Var("m", "int64")
    groups = Sizes.of(layout.scheme, 1, k).groups
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("mixed_activations")
        b.func_attr({"apq.op": "mixed_activations", "op_pattern": 8, "tirx.noalias": True})
        work = _Quantize(layout, k, groups, float((1 << (bits - 1)) - 1))
        work.x = argument("x", (m, k), "float32")
        work.permutation = argument("permutation", (groups,), "int32")
        work.xq = argument("xq", (m, layout.padded_k(k)), "int8")
        work.xs = argument("xs", (m, 1), "float32")
        work.minus = argument("minus", (m, layout.places(k) + 1), "int32")
        xf = argument("xf", (m, k), "float32") if copy else None
        with row_tasks(m, row_block) as (first, mine), each("row", mine) as row:
            work.emit(first + row, xf)
    return builder.get()


class _Quantize:
    x: Buffer
    permutation: Buffer
    xq: Buffer
    xs: Buffer
    minus: Buffer

    def __init__(self, layout: MixedLayout, k: int, groups: int, largest: float) -> None:
        self.layout, self.k, self.groups, self.largest = layout, k, groups, largest
        self.whole = k // GROUP

    def emit(self, row: Expr, xf: Buffer | None) -> None:
        """Everything of one row."""
        tail = b.sblock_alloc_buffer((GROUP,), "float32", align=64)
        inverse = b.sblock_alloc_buffer((1,), "float32", align=64)
        with b.serial(0, GROUP) as e, b.sblock("tail"):
            lane = b.axis.spatial(GROUP, e)
            at = i64(self.whole * GROUP) + lane
            zero = f32(0.0)
            value = tirx.if_then_else(at < i64(self.k), self.x[row, at], zero)
            put(tail, [lane], value)
        self._scale(row, tail, inverse)
        self._clear(row)
        if self.whole:
            with each("group", self.whole) as group:
                self._group(row, group, lambda e: self.x[row, group * GROUP + e], inverse, "")
        if self.whole < self.groups:
            with b.sblock("short"):
                b.reads()
                b.writes()
                self._group(row, i64(self.whole), lambda e: tail[e], inverse, "_tail")
        self._wide_sum(row)
        if xf is not None:
            copy_row(self.x, xf, row, self.k)

    def _scale(self, row: Expr, tail: Buffer, inverse: Buffer) -> None:
        """The row's scale and the largest code over its largest magnitude."""
        largest = b.sblock_alloc_buffer((GROUP,), "int32", align=64)
        top = b.sblock_alloc_buffer((1,), "int32", align=64)

        with b.vectorized(0, GROUP) as e, b.sblock("first"):
            lane = b.axis.spatial(GROUP, e)
            put(largest, [lane], magnitude_bits(tail[lane]), tail[lane])
        with each("largest_stage", self.whole) as group:
            with b.vectorized(0, GROUP) as e, b.sblock("largest"):
                lane = b.axis.spatial(GROUP, e)
                # `largest` is left out of the reads: TVM would not vectorize a running maximum.
                b.reads(self.x[row, group * GROUP + lane])
                b.writes(largest[lane])
                value = magnitude_bits(self.x[row, group * GROUP + lane])
                b.buffer_store(largest, tirx.max(largest[lane], value), [lane])
        reduce_all("top", "max", largest, top)
        with b.sblock("factors"):
            b.reads(top[0])
            b.writes(inverse[0], self.xs[row, 0])
            size = tirx.reinterpret("float32", top[0])
            scale, over = scale_and_inverse(size, self.largest)
            b.buffer_store(self.xs, scale, [row, 0])
            b.buffer_store(inverse, over, [0])

    def _clear(self, row: Expr) -> None:
        """Zeros in places without a group."""
        sizes, layout = Sizes.of(self.layout.scheme, 1, self.k), self.layout
        narrow = range(sizes.narrow, 3 * layout.triples(self.k))
        wide = range(sizes.wide, layout.wide_groups(self.k))
        empty = [layout.narrow_place(j) for j in narrow]
        empty += [layout.wide_place(j, self.k) for j in wide]
        for place in empty:
            with b.serial(0, GROUP) as e, b.sblock(f"clear{place}"):
                at = i64(place * GROUP) + b.axis.spatial(GROUP, e)
                put(self.xq, [row, at], tirx.const(0, "int8"))
            with b.sblock(f"no_sum{place}"):
                b.reads()
                b.writes(self.minus[row, place])
                b.buffer_store(self.minus, i32(0), [row, i64(place)])

    def _group(self, row: Expr, group: Expr, x: Any, inverse: Buffer, suffix: str) -> None:
        codes = b.sblock_alloc_buffer((GROUP,), "int32", align=64)
        total = b.sblock_alloc_buffer((1,), "int32", align=64)
        with b.vectorized(0, GROUP) as e, b.sblock(f"code{suffix}"):
            lane = b.axis.spatial(GROUP, e)
            most = f32(self.largest)
            value = tirx.nearbyint(x(lane) * inverse[0])
            value = tirx.max(tirx.min(value, most), f32(-self.largest))
            put(codes, [lane], value.astype("int32"), inverse[0])
        with b.sblock(f"place{suffix}"):
            b.reads()
            b.writes()
            place = b.bind(self.permutation[group].astype("int64"))
            with b.vectorized(0, GROUP) as e, b.sblock(f"store{suffix}"):
                lane = b.axis.spatial(GROUP, e)
                b.reads(codes[lane])
                b.writes()
                b.buffer_store(self.xq, codes[lane].astype("int8"), [row, place * GROUP + lane])
            reduce_all(f"total{suffix}", "add", codes, total)
            with b.sblock(f"sum{suffix}"):
                b.reads(total[0])
                b.writes()
                b.buffer_store(self.minus, -total[0], [row, place])

    def _wide_sum(self, row: Expr) -> None:
        """-Σ over all 4-bit groups."""
        layout, k = self.layout, self.k
        count, last = layout.wide_groups(k), layout.places(k)
        run = b.sblock_alloc_buffer((1,), "int32", align=64)
        with b.sblock("wide_clear"):
            put(run, [0], i32(0))
        with b.serial(0, count) as j, b.sblock("wide_add"):
            group = b.axis.spatial(count, j)
            put(run, [0], run[0] + self.minus[row, layout.wide_place(group, k)])
        with b.sblock("wide_sum"):
            b.reads(run[0])
            b.writes(self.minus[row, last])
            b.buffer_store(self.minus, run[0], [row, i64(last)])

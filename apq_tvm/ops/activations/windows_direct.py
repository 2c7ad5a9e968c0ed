"""Quantization of windows straight from the image: no row of floats in between.

Codes, scales and sums are those of `apq_tvm.ops.activations.windows`, where rows have one scale.
The largest magnitude of every pixel is found once, that of a window is the largest of its pixels',
and the channels of a pixel are whole vectors: what is left for each window is to scale, round and
store what lies inside the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import Quantize, scale_and_inverse
from apq_tvm.ops.blocks import argument, each, reduce_all, tasks
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.ops.graph.windows import Gather, Geometry
from apq_tvm.tensorize.exprs import (
    MAGIC,
    MAGIC_BITS,
    Buffer,
    Expr,
    PrimFunc,
    f32,
    i32,
    i64,
    magnitude_bits,
    whole,
)

LANES = (32, 16)
"""Channels in a vector, those first that are tried first."""

TOGETHER = 16384
"""float32 that a task reads: a few microseconds."""


def takes(shape: Sequence[Dim], geometry: Geometry, channels: int) -> bool:
    """Whether the channels of a pixel are whole vectors, and the sizes of an image are known.

    Windows of one tap read a pixel once or never: there is nothing to find beforehand.

    TVM's analysis of the region that is read of the pixels ends in a division by zero where a
    size is a variable.
    """
    known = all(isinstance(size, int) for size in shape[1:])
    return channels % LANES[-1] == 0 and geometry.taps > 1 and known


class DirectWindows(Quantize):
    """The loops: blocks ``pixels`` and ``pixel``, then ``task`` and ``row``."""

    name = "quantize_windows_direct"

    def of(self, shape: Sequence[Dim], geometry: Geometry, channels: tuple[int, int]) -> PrimFunc:
        """The PrimFunc for one kind of windows."""
        m = tirx.Var("m", "int64")
        self.geometry, (self.start, self.count) = geometry, channels
        self.lanes = next(n for n in LANES if self.count % n == 0)
        with IRBuilder() as builder, b.prim_func(s_tir=True):
            b.func_name(self.name)
            b.func_attr({"apq.op": self.name, "op_pattern": 8, "tirx.noalias": True})
            self.x = argument("x", Symbols().shape(shape), "float32")
            self.xq = self.declare_codes(m)
            self.xs = self.declare_factors("xs", m, 1, "float32")
            self.xsum = self.declare_factors("xsum", m, 1, "int32")
            self.gather = Gather(self.x, geometry, *channels)
            with b.sblock("root"):
                b.reads()
                b.writes()
                self._pixels()
                self._windows(m)
        return builder.get()

    def _pixels(self) -> None:
        """Find the largest magnitude of every pixel, as its bits."""
        self.pixels = b.sblock_alloc_buffer(self.x.shape[:-1], "int32", align=64)
        *rows, width = self.x.shape[:-1]
        with b.grid(*rows) as loops, b.sblock("pixels"):
            loops = [loops] if len(rows) == 1 else loops
            place = [b.axis.spatial(n, loop) for n, loop in zip(rows, loops, strict=True)]
            b.reads(whole(self.x))
            b.writes(whole(self.pixels))
            with each("pixel", width) as pixel:
                self._pixel([*place, pixel])

    def _pixel(self, place: Sequence[Expr]) -> None:
        largest = b.sblock_alloc_buffer((self.lanes,), "int32", align=64)
        top = b.sblock_alloc_buffer((1,), "int32", align=64)
        self._clear(largest)
        with b.serial(0, i64(self.count // self.lanes)) as c, self._vector() as e:
            bits = magnitude_bits(self._element(place, c, e))
            b.buffer_store(largest, tirx.max(largest[e], bits), [e])
        reduce_all("largest", "max", largest, top)
        b.buffer_store(self.pixels, top[0], list(place))

    def _windows(self, m: Expr) -> None:
        regions = [whole(self.x), whole(self.pixels)], [whole(self.xq)]
        with tasks(m, self.row_block, *regions) as (first, mine):
            with each("row", mine) as row:
                self._window(first + row)

    def _window(self, row: Expr) -> None:
        top = b.sblock_alloc_buffer((1,), "int32", align=64)
        sums = b.sblock_alloc_buffer((self.lanes,), "int32", align=64)
        total = b.sblock_alloc_buffer((1,), "int32", align=64)
        at = self.gather.at(row)
        b.buffer_store(top, i32(0), [0])

        def larger(tap: Expr, place: list[Expr], within: Expr) -> None:
            pixel = tirx.if_then_else(within, self.pixels[tuple(place)], i32(0))
            b.buffer_store(top, tirx.max(top[0], pixel), [0])

        self._taps(at, larger)
        scale, over = scale_and_inverse(tirx.reinterpret("float32", top[0]), self.most)
        b.buffer_store(self.xs, scale, [row, 0])
        inverse = b.bind(over)
        self._clear(sums)

        def quantized(tap: Expr, place: list[Expr], within: Expr) -> None:
            first = tap * i64(self.count)
            with b.If(within):
                with b.Then():
                    self._codes(row, first, place, inverse, sums)
                with b.Else():
                    self._zeros(row, first, self.count)

        self._taps(at, quantized)
        if self.padded > self.k:
            self._zeros(row, i64(self.k), self.padded - self.k)
        reduce_all("total", "add", sums, total)
        b.buffer_store(self.xsum, total[0], [row, 0])

    def _codes(
        self, row: Expr, first: Expr, place: Sequence[Expr], inverse: Expr, sums: Buffer
    ) -> None:
        """Codes of a pixel, from column `first` on."""
        with b.serial(0, i64(self.count // self.lanes)) as c, self._vector() as e:
            # By the unit of a large float, whose lowest byte is the code's.
            value = self._element(place, c, e) * inverse + f32(MAGIC)
            pattern = tirx.reinterpret("int32", value)
            column = first + c * i64(self.lanes) + e
            b.buffer_store(self.xq, pattern.astype("int8"), [row, column])
            b.buffer_store(sums, sums[e] + (pattern - i32(MAGIC_BITS)), [e])

    def _taps(self, at: Sequence[Expr], visit: Callable[[Expr, list[Expr], Expr], None]) -> None:
        """Loops over the taps of the window at a position: which, where, whether in the image."""
        image, *position = at
        g, sizes = self.geometry, self.gather.sizes
        starts = [
            b.bind(o * i64(g.strides[i]) - g.begin(i, sizes[i])) for i, o in enumerate(position)
        ]

        def axis(number: int, place: list[Expr], tap: Expr, within: Expr) -> None:
            if number == len(starts):
                visit(tap, place, within)
                return
            with b.serial(0, i64(g.kernel[number])) as t:
                where = b.bind(starts[number] + t * i64(g.dilations[number]))
                here = tirx.And(where >= i64(0), where < sizes[number])
                here = here if number == 0 else tirx.And(within, here)
                axis(number + 1, [*place, where], tap * i64(g.kernel[number]) + t, here)

        axis(0, [image], i64(0), tirx.const(True, "bool"))

    def _element(self, place: Sequence[Expr], chunk: Expr, lane: Expr) -> Expr:
        channel = chunk * i64(self.lanes) + lane + i64(self.start)
        return self.x[(*place, channel)]

    def _vector(self) -> Any:
        return b.vectorized(0, i64(self.lanes))

    def _clear(self, target: Buffer) -> None:
        with self._vector() as e:
            b.buffer_store(target, i32(0), [e])

    def _zeros(self, row: Expr, first: Expr, count: int) -> None:
        with b.serial(0, i64(count // LANES[-1])) as c, b.vectorized(0, i64(LANES[-1])) as e:
            column = first + c * i64(LANES[-1]) + e
            b.buffer_store(self.xq, tirx.const(0, "int8"), [row, column])

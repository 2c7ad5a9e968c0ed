"""Quantization of windows straight from the image: no row of floats in between.

Codes, scales and sums are those of `apq_tvm.ops.activations.windows`, where rows have one scale.
The largest magnitude of every pixel, or its largest and its least value, is found once, that of a
window is the largest of its pixels', and the channels of a pixel are whole vectors: what is left
for each window is to scale, round and store what lies inside the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import (
    negative_order,
    range_factors,
    scale_and_inverse,
)
from apq_tvm.ops.activations.windows_frame import QuantizeWindows
from apq_tvm.ops.blocks import each, reduce_all, tasks
from apq_tvm.ops.graph.shapes import Dim
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.tensorize.exprs import (
    MAGIC,
    MAGIC_BITS,
    Buffer,
    Expr,
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


class DirectWindows(QuantizeWindows):
    """The loops: blocks ``pixels`` and ``pixel``, then ``task`` and ``row``."""

    name = "quantize_windows_direct"

    def write(self, m: Expr) -> None:
        self.count = self.gather.count
        self.lanes = next(n for n in LANES if self.count % n == 0)
        with b.sblock("root"):
            b.reads()
            b.writes()
            self._pixels()
            self._windows(m)

    def _pixels(self) -> None:
        """Find the ends of every pixel's range, as bits: of `_ends`."""
        shape = (*self.x.shape[:-1], len(self._ends(f32(0))))
        self.pixels = b.sblock_alloc_buffer(shape, "int32", align=64)
        *rows, width = self.x.shape[:-1]
        with b.grid(*rows) as loops, b.sblock("pixels"):
            loops = [loops] if len(rows) == 1 else loops
            place = [b.axis.spatial(n, loop) for n, loop in zip(rows, loops, strict=True)]
            b.reads(whole(self.x))
            b.writes(whole(self.pixels))
            with each("pixel", width) as pixel:
                self._pixel([*place, pixel])

    def _ends(self, value: Expr) -> list[Expr]:
        """Patterns of a value whose largest, 0 at least, are the ends of a range."""
        if not self.asymmetric:
            return [magnitude_bits(value)]
        pattern = tirx.reinterpret("int32", value)
        return [pattern, negative_order(pattern)]

    def _pixel(self, place: Sequence[Expr]) -> None:
        names = ("largest", "lowest")[: int(self.pixels.shape[-1])]
        ends = [b.sblock_alloc_buffer((self.lanes,), "int32", align=64) for _ in names]
        one = [b.sblock_alloc_buffer((1,), "int32", align=64) for _ in names]
        for end in ends:
            self._clear(end)
        with b.serial(0, i64(self.count // self.lanes)) as c, self._vector() as e:
            patterns = self._ends(self._element(place, c, e))
            for end, pattern in zip(ends, patterns, strict=True):
                b.buffer_store(end, tirx.max(end[e], pattern), [e])
        for number, name in enumerate(names):
            reduce_all(name, "max", ends[number], one[number])
            b.buffer_store(self.pixels, one[number][0], [*place, i64(number)])

    def _windows(self, m: Expr) -> None:
        regions = [whole(self.x), whole(self.pixels)], [whole(self.xq)]
        with tasks(m, self.row_block, *regions) as (first, mine):
            with each("row", mine) as row:
                self._window(first + row)

    def _window(self, row: Expr) -> None:
        kinds = int(self.pixels.shape[-1])
        ends = b.sblock_alloc_buffer((kinds,), "int32", align=64)
        sums = b.sblock_alloc_buffer((self.lanes,), "int32", align=64)
        total = b.sblock_alloc_buffer((1,), "int32", align=64)
        at = self.gather.at(row)
        for kind in range(kinds):
            b.buffer_store(ends, i32(0), [kind])

        def larger(tap: Expr, place: list[Expr], within: Expr) -> None:
            for kind in range(kinds):
                pixel = tirx.if_then_else(within, self.pixels[(*place, i64(kind))], i32(0))
                b.buffer_store(ends, tirx.max(ends[kind], pixel), [kind])

        self._taps(at, larger)
        inverse, magic, blank = self._factors(row, ends)
        self._clear(sums)

        def quantized(tap: Expr, place: list[Expr], within: Expr) -> None:
            first = tap * i64(self.count)
            with b.If(within):
                with b.Then():
                    self._codes(row, first, place, (inverse, magic), sums)
                with b.Else():
                    self._zeros(row, first, self.count, blank)
                    if self.asymmetric:
                        with self._vector() as e:
                            zeros = blank * i32(self.count // self.lanes)
                            b.buffer_store(sums, sums[e] + zeros, [e])

        self._taps(at, quantized)
        if self.padded > self.k:
            self._zeros(row, i64(self.k), self.padded - self.k, blank)
        reduce_all("total", "add", sums, total)
        padding = blank * i32(self.padded - self.k)
        b.buffer_store(self.xsum, total[0] + padding, [row, 0])

    def _factors(self, row: Expr, ends: Buffer) -> tuple[Expr, Expr, Expr]:
        """Store the scale of a row, and its centre; 1 / scale, what rounds, and the code of 0."""
        if not self.asymmetric:
            scale, over = scale_and_inverse(tirx.reinterpret("float32", ends[0]), self.most)
            b.buffer_store(self.xs, scale, [row, 0])
            return b.bind(over), f32(MAGIC), i32(0)
        scale, over, middle = range_factors(ends[0], ends[1])
        centre = b.bind(middle)
        b.buffer_store(self.xs, scale, [row, 0])
        b.buffer_store(self.xs, scale * centre, [row, 1])
        return b.bind(over), b.bind(f32(MAGIC) - centre), b.bind(i32(0) - centre.astype("int32"))

    def _codes(
        self, row: Expr, first: Expr, place: Sequence[Expr], rounds: tuple[Expr, Expr], sums: Buffer
    ) -> None:
        """Codes of a pixel, from column `first` on."""
        inverse, magic = rounds
        with b.serial(0, i64(self.count // self.lanes)) as c, self._vector() as e:
            # By the unit of a large float, whose lowest byte is the code's.
            value = self._element(place, c, e) * inverse + magic
            pattern = tirx.reinterpret("int32", value)
            column = first + c * i64(self.lanes) + e
            b.buffer_store(self.xq, pattern.astype("int8"), [row, column])
            b.buffer_store(sums, sums[e] + (pattern - i32(MAGIC_BITS)), [e])

    def _taps(self, at: Sequence[Expr], visit: Callable[[Expr, list[Expr], Expr], None]) -> None:
        """Loops over the taps of the window at a position: which, where, whether in the image."""
        image, *position = at
        g, sizes = self.gather.geometry, self.gather.sizes
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
        channel = chunk * i64(self.lanes) + lane + i64(self.gather.first)
        return self.x[(*place, channel)]

    def _vector(self) -> Any:
        return b.vectorized(0, i64(self.lanes))

    def _clear(self, target: Buffer) -> None:
        with self._vector() as e:
            b.buffer_store(target, i32(0), [e])

    def _zeros(self, row: Expr, first: Expr, count: int, blank: Expr) -> None:
        with b.serial(0, i64(count // LANES[-1])) as c, b.vectorized(0, i64(LANES[-1])) as e:
            column = first + c * i64(LANES[-1]) + e
            b.buffer_store(self.xq, blank.astype("int8"), [row, column])

"""Quantization of windows whose channels are whole vectors: every pixel is rounded about once.

The windows of a *strip*, some rows of positions of one image, share a scale, and a centre: they
read nearly the same pixels, which one pass over the strip rounds into a scratch with the padding
around them. Where taps are several lines apart, so are a strip's rows: lines between are others'. A
window is then copied from it, a run of bytes for each row of taps. Outputs are as far from float's
as where each window has a scale (1 - cosine of YOLOv8n 1.2e-5 both, of ddddocr's detector 9.5e-5
and 9.4e-5, of ResNet-18 7.0e-5 and 7.6e-5), and rounding takes less than half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import gcd
from operator import mul
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.quantize import negative_order, scale_and_inverse
from apq_tvm.ops.activations.windows_frame import QuantizeWindows
from apq_tvm.ops.blocks import loops, reduce_all
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

BYTES = (64, 32, 16)
"""In a vector that is copied."""

SCRATCH = 1 << 15
"""Codes of a strip: they stay in the first cache."""


def strip_lanes(geometry: Geometry, channels: int) -> int:
    """Channels in a vector; 0 where those of a pixel are no whole vectors.

    Windows of one tap read a pixel once or never: each has a scale of its own.
    """
    if geometry.taps == 1:
        return 0
    return next((lanes for lanes in LANES if channels % lanes == 0), 0)


def among_lines(geometry: Geometry) -> tuple[int, Geometry]:
    """How many rows of positions apart those of a strip are, and their windows among its lines.

    A strip has the lines that its rows read, `dilations[0]` apart, and none between them.
    """
    stride, dilation = geometry.strides[0], geometry.dilations[0]
    common = gcd(stride, dilation)
    return dilation // common, replace(
        geometry,
        strides=(stride // common, *geometry.strides[1:]),
        dilations=(1, *geometry.dilations[1:]),
    )


def covered(geometry: Geometry, positions: Sequence[Expr]) -> list[Expr]:
    """Pixels along every axis that so many positions cover, padding among them."""
    return [
        (tirx.max(n, i64(1)) - 1) * i64(geometry.strides[i]) + i64(geometry.reach(i))
        for i, n in enumerate(positions)
    ]


def strip_rows(geometry: Geometry, out: Sequence[Expr], channels: int, most: int) -> Expr:
    """Rows of positions in a strip of `most` codes, of `out` positions along every axis."""
    line = reduce(mul, covered(geometry, out)[1:], i64(channels))
    lines = i64(most) // tirx.max(line, i64(1)) - i64(geometry.reach(0))
    rows = tirx.max(i64(1), lines // i64(geometry.strides[0]) + 1)
    return tirx.max(i64(1), tirx.min(out[0], rows))


def over(number: Expr, divisor: Expr) -> Expr:
    """Rounded up."""
    return (number + (divisor - 1)) // divisor


def named(value: Expr) -> Expr:
    """A number, or a name for what a run computes."""
    return value if isinstance(value, tirx.IntImm) else b.bind(value)


class StripWindows(QuantizeWindows):
    """The loops: block ``task`` of a strip."""

    name = "quantize_windows_strips"

    def write(self, m: Expr) -> None:
        g, sizes = self.gather.geometry, self.gather.sizes
        self.count = self.gather.count
        self.step, self.geometry = among_lines(g)
        with b.sblock("root"):
            b.reads()
            b.writes()
            self.out = [named(extent) for extent in self.gather.out]
            self.begins = [named(g.begin(i, size)) for i, size in enumerate(sizes)]
            starts, most = i64(1), self.out[0]  # where strips begin, and rows from there on
            if self.step > 1:
                starts = named(tirx.max(tirx.min(i64(self.step), self.out[0]), i64(1)))
                most = named(over(self.out[0], i64(self.step)))
            out = [most, *self.out[1:]]
            self.strip = named(strip_rows(self.geometry, out, self.count, self.most_codes()))
            self.lines, *self.across = map(named, covered(self.geometry, [self.strip, *out[1:]]))
            self.shape = self.extents()
            images, strips = self.x.shape[0], named(starts * over(most, self.strip))
            with b.grid(images, strips) as (image, strip), b.sblock("task"):
                n, s = b.axis.spatial(images, image), b.axis.spatial(strips, strip)
                b.reads(whole(self.x))
                b.writes(whole(self.xq))
                rows = self.strip * i64(self.step)
                self._strip(n, b.bind(s % starts + s // starts * rows))

    def _strip(self, image: Expr, first: Expr) -> None:
        g = self.geometry
        self.scratch()
        rows = b.bind(tirx.min(self.strip, over(self.out[0] - first, i64(self.step))))
        lines = b.bind((rows - 1) * i64(g.strides[0]) + i64(g.reach(0)))
        top = b.bind(first * i64(self.gather.geometry.strides[0]) - self.begins[0])
        scale, middle, rounds, blank = self._factors(self._seen(image, top, lines))
        self.round(image, top, lines, rounds, blank)
        self.windows(b.bind(image * self.out[0] + first), rows, (scale, middle), blank)

    def most_codes(self) -> int:
        """Codes of a strip, unless one row of windows has more."""
        return SCRATCH

    def extents(self) -> list[Expr]:
        """Of what holds a strip's codes."""
        return [self.lines, *self.across, i64(self.count)]

    def scratch(self) -> None:
        """Allocate what a strip needs."""
        self.pixels = b.sblock_alloc_buffer(self.shape, "int8", align=64)
        if self.summed:
            self.sums = b.sblock_alloc_buffer(self.shape[:-1], "int32", align=64)

    def _seen(self, image: Expr, top: Expr, lines: Expr) -> Buffer:
        """Patterns of the ends of a strip's range: of `_ends`."""
        names = ("largest", "lowest")[: 1 + self.asymmetric]
        ends = [b.sblock_alloc_buffer((self.lanes,), "int32", align=64) for _ in names]
        found = b.sblock_alloc_buffer((len(names),), "int32", align=64)
        for end in ends:
            self.clear(end)
        apart = i64(self.gather.geometry.dilations[0])
        low = b.bind(over(tirx.max(i64(0), i64(0) - top), apart))
        high = b.bind(tirx.min(lines, over(self.gather.sizes[0] - top, apart)))

        def widen(value: Expr, lane: Expr) -> None:
            for end, pattern in zip(ends, self._ends(value), strict=True):
                b.buffer_store(end, tirx.max(end[lane], pattern), [lane])

        with b.serial(0, tirx.max(high - low, i64(0))) as line:
            self.each_seen(image, top + low * apart + line * apart, widen)
        for number, name in enumerate(names):
            one = b.sblock_alloc_buffer((1,), "int32", align=64)
            reduce_all(name, "max", ends[number], one)
            b.buffer_store(found, one[0], [number])
        return found

    def each_seen(self, image: Expr, line: Expr, visit: Callable[[Expr, Expr], None]) -> None:
        """Visit every value of a line of an image, with the lane of the vector it is in."""
        with loops([*self.gather.sizes[1:], i64(self.count // self.lanes)]) as (*place, c):
            with self.vector() as e:
                visit(self._element([image, line, *place], c, e), e)

    def _ends(self, value: Expr) -> list[Expr]:
        """Patterns of a value whose largest, 0 at least, are the ends of a range."""
        if not self.asymmetric:
            return [magnitude_bits(value)]
        pattern = tirx.reinterpret("int32", value)
        return [pattern, negative_order(pattern)]

    def _factors(self, ends: Buffer) -> tuple[Expr, Expr, tuple[Expr, Expr], Expr]:
        """Scale, centre in scales; 1 / scale and what rounds; the code of 0."""
        if not self.asymmetric:
            scale, over = scale_and_inverse(tirx.reinterpret("float32", ends[0]), self.most)
            return b.bind(scale), f32(0), (b.bind(over), f32(MAGIC)), i32(0)
        scale, over, middle = self.range_factors(ends[0], ends[1])
        centre = b.bind(middle)
        rounds = b.bind(over), b.bind(f32(MAGIC) - centre)
        return b.bind(scale), centre, rounds, b.bind(i32(0) - centre.astype("int32"))

    def round(
        self, image: Expr, top: Expr, lines: Expr, rounds: tuple[Expr, Expr], blank: Expr
    ) -> None:
        """Fill the scratch: codes of the strip's pixels and their sums; those of 0 around them."""
        if self.summed:
            part = b.sblock_alloc_buffer((self.lanes,), "int32", align=64)
            total = b.sblock_alloc_buffer((1,), "int32", align=64)
        extents = [lines, *self.across]
        with loops(extents) as each, b.sblock("pixel"):
            at = [b.axis.spatial(n, loop) for n, loop in zip(extents, each, strict=True)]
            b.reads()
            b.writes()
            place = self.places(top, self.begins[1:], at)
            inside = tirx.const(True, "bool")
            for where, size in zip(place, self.gather.sizes, strict=True):
                inside = tirx.And(inside, tirx.And(where >= i64(0), where < size))
            with b.If(inside):
                with b.Then():
                    if self.summed:
                        self.clear(part)
                    with b.serial(0, i64(self.count // self.lanes)) as c, self.vector() as e:
                        # By the unit of a large float, whose lowest byte is the code's.
                        value = self._element([image, *place], c, e) * rounds[0] + rounds[1]
                        pattern = tirx.reinterpret("int32", value)
                        channel = c * i64(self.lanes) + e
                        b.buffer_store(self.pixels, pattern.astype("int8"), [*at, channel])
                        if self.summed:
                            b.buffer_store(part, part[e] + (pattern - i32(MAGIC_BITS)), [e])
                    if self.summed:
                        reduce_all("total", "add", part, total)
                        b.buffer_store(self.sums, total[0], at)
                with b.Else():
                    self._blank(self.pixels, at, i64(0), self.count, blank)
                    if self.summed:
                        b.buffer_store(self.sums, blank * i32(self.count), at)

    def places(self, top: Expr, begins: Sequence[Expr], at: Sequence[Expr]) -> list[Expr]:
        """Where in the image a place of the scratch is."""
        apart = i64(self.gather.geometry.dilations[0])
        starts = [top, *(i64(0) - begin for begin in begins)]
        steps = [at[0] * apart, *at[1:]]
        return [b.bind(start + step) for start, step in zip(starts, steps, strict=True)]

    def windows(self, first: Expr, rows: Expr, factors: Sequence[Expr], blank: Expr) -> None:
        """Write `rows` rows of windows; `first` numbers the first among those of all images."""
        with loops([rows, *self.out[1:]]) as position:
            row = first + position[0] * i64(self.step)
            for extent, at in zip(self.out[1:], position[1:], strict=True):
                row = row * extent + at
            row = b.bind(row)
            self.keep_factors(row, factors)
            self._window(row, position, blank)

    def keep_factors(self, row: Expr, factors: Sequence[Expr]) -> None:
        """Store a window's factors: its scale, and its centre in scales."""
        scale, middle = factors
        b.buffer_store(self.xs, scale, [row, 0])
        if self.asymmetric:
            b.buffer_store(self.xs, scale * middle, [row, 1])

    def _window(self, row: Expr, position: Sequence[Expr], blank: Expr) -> None:
        """Copy one window, and add up its pixels' sums."""
        g, padding = self.geometry, self.padded - self.k
        if self.summed:
            sum_of = b.sblock_alloc_buffer((1,), "int32", align=64)
            b.buffer_store(sum_of, blank * i32(padding), [0])
        starts = [at * i64(stride) for at, stride in zip(position, g.strides, strict=True)]
        run = g.kernel[-1] * self.count if g.dilations[-1] == 1 else self.count
        step = next(n for n in BYTES if run % n == 0)

        def copied(tap: Expr, at: list[Expr]) -> None:
            column = b.bind(tap * i64(self.count))
            with b.serial(0, i64(run // step)) as c, b.vectorized(0, i64(step)) as e:
                byte = c * i64(step) + e
                pixel, channel = byte // i64(self.count), byte % i64(self.count)
                source = [*at[:-1], at[-1] + pixel, channel]
                b.buffer_store(self.xq, self.pixels[tuple(source)], [row, column + byte])

        def added(tap: Expr, at: list[Expr]) -> None:
            b.buffer_store(sum_of, sum_of[0] + self.sums[tuple(at)], [0])

        self._taps(starts, copied, runs=g.dilations[-1] == 1)
        if self.summed:
            self._taps(starts, added)
        if padding:
            self._blank(self.xq, [row], i64(self.k), padding, blank)
        if self.summed:
            b.buffer_store(self.xsum, sum_of[0], [row, 0])

    def _taps(
        self,
        starts: Sequence[Expr],
        visit: Callable[[Expr, list[Expr]], None],
        runs: bool = False,
    ) -> None:
        """Loops over taps: which, and where in the scratch; over the first of each run."""
        g = self.geometry

        def axis(number: int, at: list[Expr], tap: Expr) -> None:
            if number == len(starts):
                visit(tap, at)
                return
            taps = 1 if runs and number == len(starts) - 1 else g.kernel[number]
            with b.serial(0, i64(taps)) as t:
                where = starts[number] + t * i64(g.dilations[number])
                axis(number + 1, [*at, where], tap * i64(g.kernel[number]) + t)

        axis(0, [], i64(0))

    def _element(self, place: Sequence[Expr], chunk: Expr, lane: Expr) -> Expr:
        channel = chunk * i64(self.lanes) + lane + i64(self.gather.first)
        return self.x[(*place, channel)]

    def vector(self) -> Any:
        """A loop over the lanes of a vector."""
        return b.vectorized(0, i64(self.lanes))

    def clear(self, target: Buffer) -> None:
        """Zero a vector."""
        with self.vector() as e:
            b.buffer_store(target, i32(0), [e])

    def _blank(
        self, target: Buffer, lead: Sequence[Expr], first: Expr, count: int, blank: Expr
    ) -> None:
        """Codes of 0, so many from `first` on."""
        lanes = LANES[-1]
        with b.serial(0, i64(count // lanes)) as c, b.vectorized(0, i64(lanes)) as e:
            column = first + c * i64(lanes) + e
            b.buffer_store(target, blank.astype("int8"), [*lead, column])

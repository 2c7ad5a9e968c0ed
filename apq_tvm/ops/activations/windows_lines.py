"""Quantization of windows of images of few channels: every line of the image is rounded once.

As `apq_tvm.ops.activations.windows_strips`, but vectors lie along a line of pixels, whose channels
need not fill any: the three colours that a net sees first. Taps of a row of a window are one run of
bytes, which is copied by one vector where the next run, or the last one's own bytes, hide what came
along. Sums are of the bytes that were copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from operator import mul

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.activations.windows_strips import StripWindows, named
from apq_tvm.ops.blocks import each, loops, reduce_all, reduce_rows
from apq_tvm.ops.images.windows import Geometry
from apq_tvm.tensorize.exprs import Expr, i64

LANES = 16
"""Values in a vector."""

SCRATCH = 1 << 13
"""Codes of a strip. What a net sees first is an image as it is, dark here and bright there: 1 -
cosine of ResNet-18 is 2.9e-4 for noise and 9.7e-5 for images; with four times as many 3.1e-4 and
10.0e-5, where each window has a scale 2.5e-4 and 8.9e-5."""

LONGEST = 32
"""Bytes in a vector that is copied."""

MOST_RUNS = 32
"""Runs of a window that are written out."""


MOST_WORDS = 2 * LANES * 256
"""Codes of a window whose sum is made in words: 256 of 127 in each."""


def takes_lines(geometry: Geometry, all_channels: bool) -> bool:
    """Whether windows are runs of a line, and lines are no whole image."""
    runs = reduce(mul, geometry.kernel[:-1], 1)
    several = len(geometry.kernel) > 1 and geometry.taps > 1
    return several and all_channels and geometry.dilations[-1] == 1 and runs <= MOST_RUNS


def _floor_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)


class LineWindows(StripWindows):
    """The loops: block ``task`` of a strip."""

    name = "quantize_windows_lines"

    def most_codes(self) -> int:
        return SCRATCH

    def extents(self) -> list[Expr]:
        begin, size = self.begins[-1], self.gather.sizes[-1]
        pixels = tirx.max(self.across[-1], begin + size)
        # Whole vectors are read where a run begins, and blank ones are written.
        width = (pixels * i64(self.count) + (2 * LONGEST - 1)) // LONGEST * LONGEST
        return [self.lines, *self.across[:-1], named(width)]

    def scratch(self) -> None:
        self.pixels = b.sblock_alloc_buffer(self.shape, "int8", align=64)

    def each_seen(self, image: Expr, line: Expr, visit: Callable[[Expr, Expr], None]) -> None:
        with loops(self.gather.sizes[1:-1]) as place:
            self._vectors(lambda at, lane: visit(self._value([image, line, *place], at), lane))

    def round(
        self, image: Expr, top: Expr, lines: Expr, rounds: tuple[Expr, Expr], blank: Expr
    ) -> None:
        margin = self.begins[-1] * i64(self.count)
        with loops([lines, *self.across[:-1]]) as at:
            with b.serial(0, self.shape[-1] // LONGEST) as c, b.vectorized(0, i64(LONGEST)) as e:
                b.buffer_store(self.pixels, blank.astype("int8"), [*at, c * i64(LONGEST) + e])
            place = self.places(top, self.begins[1:-1], at)
            inside = tirx.const(True, "bool")
            for where, size in zip(place, self.gather.sizes, strict=False):
                inside = tirx.And(inside, tirx.And(where >= i64(0), where < size))

            def rounded(e: Expr, lane: Expr) -> None:
                # By the unit of a large float, whose lowest byte is the code's.
                value = self._value([image, *place], e) * rounds[0] + rounds[1]
                code = tirx.reinterpret("int32", value).astype("int8")
                b.buffer_store(self.pixels, code, [*at, margin + e])

            with b.If(inside), b.Then():
                self._vectors(rounded)

    def windows(self, first: Expr, rows: Expr, factors: Sequence[Expr], blank: Expr) -> None:
        g, last = self.geometry, self.out[-1]
        with loops([rows, *self.out[1:-1]]) as position:
            line = position[0] * i64(self.step) + first
            for extent, at in zip(self.out[1:-1], position[1:], strict=True):
                line = line * extent + at
            line = b.bind(line * last)
            starts = [b.bind(at * i64(s)) for at, s in zip(position, g.strides, strict=False)]
            with b.serial(0, last) as o:
                row = b.bind(line + o)
                self.keep_factors(row, factors)
                self._copy(row, starts, b.bind(o * i64(g.strides[-1] * self.count)), blank)
            if self.summed:
                self._sums_of(line, last)

    def _sums_of(self, line: Expr, last: Expr) -> None:
        """Of `last` windows from `line` on."""
        bundles = b.bind(last // i64(LANES) if self.padded <= MOST_WORDS else i64(0))
        with each("bundle", bundles) as o:
            self._sums(b.bind(line + o * i64(LANES)))
        done = b.bind(bundles * i64(LANES))
        with each("row", last - done) as o:
            self._sum(b.bind(line + done + o))

    def _copy(self, row: Expr, starts: Sequence[Expr], column: Expr, blank: Expr) -> None:
        g = self.geometry
        if self.padded > self.k:
            with b.vectorized(0, i64(LONGEST)) as e:
                at = [row, i64(self.padded - LONGEST) + e]
                b.buffer_store(self.xq, blank.astype("int8"), at)
        run = g.kernel[-1] * self.count
        power = _floor_power(run)
        exact = min(power, LONGEST)
        for number, taps in enumerate(product(*map(range, g.kernel[:-1]))):
            lead = [s + i64(t * d) for s, t, d in zip(starts, taps, g.dilations, strict=False)]
            # One vector reaches into the next run, which is written later.
            alone = 2 * power if power < run < LONGEST and (number + 1) * run < self.k else exact
            for first in range(0, run, alone):
                start = min(first, max(run - alone, 0))
                with b.vectorized(0, i64(alone)) as e:
                    code = self.pixels[(*lead, column + i64(start) + e)]
                    b.buffer_store(self.xq, code, [row, i64(number * run + start) + e])

    def _sums(self, first: Expr) -> None:
        """Of a vector of windows: bytes are added as words, whose halves are one vector."""
        sums = b.sblock_alloc_buffer((LANES, LANES), "int32", align=64)
        words = b.sblock_alloc_buffer((2 * LANES,), "int16", align=64)
        with b.serial(0, i64(LANES)) as r:
            row = b.bind(first + r)
            with b.vectorized(0, i64(2 * LANES)) as e:
                b.buffer_store(words, tirx.const(0, "int16"), [e])
            vectors = self.padded // (2 * LANES)
            with b.serial(0, i64(vectors)) as c, b.vectorized(0, i64(2 * LANES)) as e:
                code = self.xq[row, c * i64(2 * LANES) + e].astype("int16")
                b.buffer_store(words, words[e] + code, [e])
            with self.vector() as e:
                low, high = (words[e + i64(at)].astype("int32") for at in (0, LANES))
                b.buffer_store(sums, low + high, [r, e])
        total = reduce_rows("total_tree", "add", sums)
        with self.vector() as e:
            b.buffer_store(self.xsum, total[e], [first + e, 0])

    def _sum(self, row: Expr) -> None:
        part = b.sblock_alloc_buffer((self.lanes,), "int32", align=64)
        total = b.sblock_alloc_buffer((1,), "int32", align=64)
        self.clear(part)
        with b.serial(0, i64(self.padded // self.lanes)) as c, self.vector() as e:
            code = self.xq[row, c * i64(self.lanes) + e].astype("int32")
            b.buffer_store(part, part[e] + code, [e])
        reduce_all("total", "add", part, total)
        b.buffer_store(self.xsum, total[0], [row, 0])

    def _value(self, place: Sequence[Expr], at: Expr) -> Expr:
        """Of a line of the image."""
        return self.x[(*place, at // i64(self.count), at % i64(self.count))]

    def _vectors(self, visit: Callable[[Expr, Expr], None]) -> None:
        """Visit all values of a line, and their lanes: the last vector ends with the line."""
        lanes, length = i64(self.lanes), self.gather.sizes[-1] * i64(self.count)

        def whole() -> None:
            with b.serial(0, (length + (self.lanes - 1)) // lanes) as c:
                start = b.bind(tirx.min(c * lanes, length - lanes))
                with self.vector() as e:
                    visit(start + e, e)

        def single() -> None:
            with b.serial(0, length) as at:
                visit(at, i64(0))

        if isinstance(length, tirx.IntImm):
            (whole if int(length) >= self.lanes else single)()
            return
        with b.If(length >= lanes):
            with b.Then():
                whole()
            with b.Else():
                single()

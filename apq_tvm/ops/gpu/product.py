"""``y = act(x Wᵀ + b) + residual`` by a GPU's ``mma`` of int8: weights are operand A, rows of x B.

Up to 8 rows of x cost the same. Codes are unsigned; zero points are taken off by sums of x, with
which the sums begin (`apq_tvm.ops.gpu.rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.gpu.rows import PAIRS, RowFactors, pair_of
from apq_tvm.ops.gpu.steps import Step
from apq_tvm.ops.gpu.stream import Plan, Stream, address, fill, local
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import MAGIC_BITS, Expr, f32, i32, i64

TILE = 8
"""Rows of x of an ``mma``."""


class Product(Stream):
    """Integers of groups of 32 and more.

    Parameters
    ----------
    spec, plan, call
        As `Stream`'s.
    factors : RowFactors
        How x lies; `factors.steps.tiles` tiles of 8 rows share what was read of the weights.
    """

    def __init__(
        self,
        spec: LinearSpec,
        factors: RowFactors,
        plan: Plan,
        call: Callable[..., Any],
    ) -> None:
        self.factors, self.steps, self.tiles = factors, factors.steps, factors.steps.tiles
        tall, results = TILE * self.tiles, 4 * self.tiles
        super().__init__(spec, self.steps.layout, tall, results, plan, call)
        assert plan.stacked == 1 or not self.zeros_at_once

    @property
    def zeros_at_once(self) -> bool:
        """True if zero points are read with the scales: a byte for each group touches two sectors
        where scales of four lie together. Several tiles are short of instructions, and bytes want
        fewer."""
        return self.layout.zero_points and self.layout.together > 2 and self.tiles == 1

    def declare(self, operands: Operands) -> None:
        """``xq, xs, start`` of `RowFactors`."""
        m, factors = operands.m, self.factors
        self.xq = operands.declare("xq", factors.words(m), "int32")
        self.xs = operands.declare("xs", factors.scales(m), "float32")
        self.start = operands.declare("start", factors.starts(m), "int32")

    def begin(self) -> None:
        """Sums of groups in ``dots``, by part, chain and tile."""
        self.places = [sorted({step.place for step in group}) for group in self.steps.groups]
        self.chains = max(map(len, self.places))
        count = 4 * self.tiles * self.chains * self.parts
        self.dots = local(count, "int32")
        self.x = local(2 * self.factors.steps_at_once * self.tiles)
        self.zeros = local(2)
        self.row_scales = local(2 * self.factors.paired * self.tiles, "float32")
        if self.whole_rows:
            fill(self.dots, i32(0), 0, count)

    def chunk(self, chunk: Expr, number: int) -> None:
        """Group by group, step by step."""
        self.unpack(number)
        for group, steps in enumerate(self.steps.groups):
            if self.groups:
                self._begin(group, chunk)
            for step in steps:
                self._multiply(chunk, number, group, step)
            if self.groups:
                self._end(group, (chunk * self.groups + group).astype("int64"))

    def end(self) -> None:
        """A whole row's products, times the scale of the weights."""
        if self.whole_rows:
            self._end(0, i64(0))

    def place(self, at: Expr) -> tuple[Expr, Expr, Expr | None]:
        """Sums of a tile: two rows of weights by two of x."""
        tile, high, odd = at // 4, at // 2 % 2, at % 2
        return tile * TILE + self.lane % 4 * 2 + odd, self.lane // 4 + high * 8, None

    def factor(self, row: Expr, column: int) -> Expr:
        """Rows lie in pairs."""
        return self.xs[self.factors.scale_place(*pair_of(row), i64(column), row % 2)]

    def _begin(self, group: int, chunk: Expr) -> None:
        """Sums of the largest products begin with the zero point's part, others with 0."""
        places = self.places[group]
        for part, (chain, lies) in product(range(self.parts), enumerate(places)):
            for tile in range(self.tiles):
                at, same = self._dot(part, chain, tile), self._dot(0, chain, tile)
                if lies != places[-1]:
                    fill(self.dots, i32(0), at, 4)
                elif self.factors.ready and part:
                    for i in range(4):
                        b.buffer_store(self.dots, self.dots[same + i], [at + i])
                elif self.factors.ready:
                    number = (chunk * self.groups + group).astype("int64")
                    place = self.factors.start_place(*self._pair(tile), number, i64(0))
                    self.read("apq_read4", self.dots[at], self.start[place])
                else:
                    fill(self.dots, self._magic(group), at, 4)

    def _multiply(self, chunk: Expr, number: int, group: int, step: Step) -> None:
        """One step of all tiles; what it decodes is decoded once."""
        for part in range(self.parts):
            fragment = [self._fragment(number, step, word, part) for word in range(4)]
            chain = self.places[group].index(step.place)
            for tile in range(self.tiles):
                if part == 0:
                    self._read_x(chunk, step, tile)
                at_once = self.factors.steps_at_once
                first = 2 * at_once * tile + step.number % at_once * 2
                pair = [self.x[first + i] for i in range(2)]
                dots = address(self.dots[self._dot(part, chain, tile)])
                self.do("apq_mma_u8s8", dots, *fragment, *pair)

    def _read_x(self, chunk: Expr, step: Step, tile: int) -> None:
        """Words of x of a step; what is read for the next step too is kept."""
        layout, at_once = self.layout, self.factors.steps_at_once
        if step.number % at_once == 0:
            number_of_steps = (chunk * self.units + step.unit) * layout.unit_steps + step.number
            column = number_of_steps * 8 + self.lane % 4 * (2 * at_once)
            source = self.xq[self._row(tile), column]
            self.read(f"apq_read{2 * at_once}", self.x[2 * at_once * tile], source)

    def _fragment(self, number: int, step: Step, word: int, part: int) -> Expr:
        """uint32: four codes of a lane, a byte each, times 2^place."""
        out, unit = None, number * self.units + step.unit
        for field in self.layout.fields:
            load = self.layout.first_load(field) + step.number // field.per_byte
            bits = self.word(unit, load, word, part)
            lies, wanted = step.number % field.per_byte * field.width, step.place + field.shift
            if lies > wanted:
                bits = bits >> _u32(lies - wanted)
            elif lies < wanted:
                bits = bits << _u32(wanted - lies)
            if field.width < 8:
                bits = bits & _u32(0x01010101 * (field.mask << wanted))
            out = bits if out is None else out | bits
        assert out is not None
        return out

    def _dot(self, part: int, chain: int, tile: int) -> int:
        return 4 * ((part * self.chains + chain) * self.tiles + tile)

    def _row(self, tile: int) -> Expr:
        """Row of x, the last one where there is none: what comes of it is not stored."""
        return self.row_within(TILE * tile + self.lane // 4)

    def _pair(self, tile: int) -> tuple[Expr, Expr]:
        """The tile and the pair in it that a lane has sums of, the last ones where there are none;
        all lanes of a warp are in one tile."""
        number = self.first // i64(TILE) + i64(tile)
        number = tirx.min(number, tirx.floordiv(self.m - i64(1), i64(TILE)))
        last = tirx.floordiv(self.m - i64(1), i64(2)) - number * i64(PAIRS)
        return number, tirx.min((self.lane % 4).astype("int64"), last)

    def _end(self, group: int, number: Expr) -> None:
        """Add a group's products to the sums, times both scales; `number` is the group's."""
        for part in range(self.parts):
            self._add(group, number, part)

    def _add(self, group: int, number: Expr, part: int) -> None:
        layout, places = self.layout, self.places[group]
        if self.zeros_at_once and group % layout.together == 0:
            first = self.scale_place(part, number, 0)
            self.read("apq_read2", self.zeros[0], self.weights["zeros"][first])
        self.take_scales(group, number, part)
        if not self.factors.folded and self.steps.exponent(group):
            for high in range(2):
                scale = self.pair[high] * f32(0.5 ** self.steps.exponent(group))
                b.buffer_store(self.pair, scale, [high])
        kind = "exact" if self.steps.exact(group) else "large"
        for tile in range(self.tiles):
            last = self._dot(part, len(places) - 1, tile)
            for at in range(4):
                total: Any = self.dots[last + at]
                for chain, place in enumerate(places[:-1]):
                    other = self.dots[self._dot(part, chain, tile) + at]
                    total = total + (other << i32(places[-1] - place))
                if not self.factors.ready:
                    total = total - self._taken(group, part, tile, number, *divmod(at, 2))
                b.buffer_store(self.dots, total, [last + at])
            given = [self.sums[part * self.results + 4 * tile], self.dots[last], self.pair[0]]
            by_group = self._row_scales(tile, group, number, part == 0)
            if by_group is not None:
                given.append(self.row_scales[by_group])
            function = f"apq_add_{kind}" + ("" if by_group is None else "_scaled")
            self.do(function, *map(address, given))

    def _row_scales(self, tile: int, group: int, number: Expr, read: bool) -> int | None:
        """Where the scales of x for a group lie; read with the first of their groups."""
        factors = self.factors
        if factors.act_group == -1:
            return None
        first, column = 2 * factors.paired * tile, group * self.layout.group_size
        if read and column % (factors.paired * factors.act_group) == 0:
            of_x = number // i64(factors.act_group // self.layout.group_size)
            place = factors.scale_place(*self._pair(tile), of_x, i64(0))
            self.read(f"apq_read{2 * factors.paired}", self.row_scales[first], self.xs[place])
        return first + column // factors.act_group % factors.paired * 2

    def _magic(self, group: int) -> Expr:
        return i32(MAGIC_BITS if self.steps.exact(group) else 0)

    def _taken(self, group: int, part: int, tile: int, number: Expr, high: int, odd: int) -> Expr:
        """The zero point's part of a sum that began without it."""
        zero: Any = i32(self.steps.zero(group))
        if self.zeros_at_once:
            word, byte = divmod(group % self.layout.together * 2 + high, 4)
            zero = (self.zeros[word] >> _u32(8 * byte) & _u32(255)).astype("int32")
        elif self.layout.zero_points:
            place = self.scale_place(part, number, high)
            zero = self.layout.zero(self.weights, place)
        if self.layout.zero_points:
            zero = zero << i32(self.steps.exponent(group))
        taken = zero * self.start[self.factors.start_place(*self._pair(tile), number, i64(odd))]
        if self.whole_rows:  # the warps' sums are parts of one group
            taken = tirx.Select(self.warp == 0, taken, i32(0))
        return taken


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")

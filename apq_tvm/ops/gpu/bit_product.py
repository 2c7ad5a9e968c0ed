"""``y = act(x Wᵀ + b) + residual`` by a GPU's ``mma`` of bits: planes of weights by planes of x.

ABQ-LLM (AAAI 2025), section 3.4: Y = Σ_s Σ_t 2^(s+t) popcount(W_s & X_t), where the top plane of x
counts for -2^t. A load of 16 bytes is 16 rows x 256 columns of a plane of weights, and operand A as
it lies (`apq_tvm.codegen.layouts.fragments`); the planes of a row of x, or of several rows of few
bits, are the columns of operand B (`apq_tvm.ops.gpu.planes`). A lane has sums of two planes of one
row of x, which meet with those of its neighbours at the very end. Zero points are taken off by sums
of x.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.gpu.planes import WORDS, PlaneFactors
from apq_tvm.ops.gpu.stream import Plan, Stream, address, fill, local
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import Expr, i32, i64

COLUMNS = 8
"""Columns of operand B: planes of x, of one row or several."""


class BitProduct(Stream):
    """Integers of whole rows, or of groups of 128 and more.

    Parameters
    ----------
    spec, plan, call
        As `Stream`'s.
    factors : PlaneFactors
        How x lies.
    tiles : int
        Of ``8 / planes`` rows of x, which share what was read of the weights.
    """

    def __init__(
        self,
        spec: LinearSpec,
        factors: PlaneFactors,
        tiles: int,
        plan: Plan,
        call: Callable[..., Any],
    ) -> None:
        self.factors, self.tiles, self.planes = factors, tiles, factors.planes
        self.tile = COLUMNS // self.planes
        tall = self.tile * tiles
        super().__init__(spec, factors.layout, tall, 2 * tiles, plan, call)
        assert self.units == 1 and self.groups in (0, factors.parts)

    def declare(self, operands: Operands) -> None:
        """``planes, xs, sums`` of `PlaneFactors`."""
        m, factors = operands.m, self.factors
        self.of_x = operands.declare("planes", factors.words(m), "int32")
        self.xs = operands.declare("xs", factors.scales(m), "float32")
        self.sums_of_x = operands.declare("sums", factors.starts(m), "int32")

    def begin(self) -> None:
        """Sums of a group by part, tile and plane of weights; what a lane's two planes of x count
        for."""
        self.count = 4 * self.layout.bits * self.tiles * self.parts
        self.dots = local(self.count, "int32")
        self.x = local(2)
        self.counts, self.first_lane = local(2, "int32"), local(1, "int32")
        plane = self.lane % 4 * 2 % self.planes
        one = i32(2 if self.layout.signs else 1)
        top = plane + 2 == self.planes
        b.buffer_store(self.counts, one << plane, [0])
        other = one << (plane + 1)
        b.buffer_store(self.counts, tirx.Select(top, i32(0) - other, other), [1])
        # Zero points are taken off once of a row.
        b.buffer_store(self.first_lane, tirx.Select(plane == 0, i32(1), i32(0)), [0])
        fill(self.dots, i32(0), 0, self.count)

    def chunk(self, chunk: Expr, number: int) -> None:
        """A unit: part of a whole row, one group, or several."""
        self.unpack(number)
        parts = self.factors.parts
        for part in range(parts):
            self._multiply((chunk * parts + part) * WORDS, number)
            if self.groups:
                self._end(part, (chunk * parts + part).astype("int64"))
                fill(self.dots, i32(0), 0, self.count)

    def _multiply(self, first: Expr, number: int) -> None:
        """All planes of the round's unit `number`, with words of x from `first` on."""
        column = self.lane // 4
        for tile in range(self.tiles):
            row = self._row(tile, column // self.planes)
            source = self.of_x[row, column % self.planes, first + self.lane % 4 * 2]
            self.read("apq_read2", self.x[0], source)
            for part, plane in product(range(self.parts), range(self.layout.bits)):
                words = [self.word(number, plane, word, part) for word in range(4)]
                dots = address(self.dots[self._dot(part, tile, plane)])
                self.do("apq_mma_b1", dots, *words, self.x[0], self.x[1])

    def _dot(self, part: int, tile: int, plane: int) -> int:
        return 4 * ((part * self.tiles + tile) * self.layout.bits + plane)

    def _row(self, tile: int, within: Expr) -> Expr:
        return self.row_within(self.tile * tile + within)

    def end(self) -> None:
        """A whole row's products, times the scale of the weights; then those of a row's lanes."""
        if self.whole_rows:
            self._end(0, i64(0))
        for at in range(self.parts * self.results):
            lanes = i32(self.planes // 2)
            total = self.call("apq_sum_lanes", self.sums[at], lanes, dtype="float32")
            b.buffer_store(self.sums, total, [at])

    def _end(self, group: int, number: Expr) -> None:
        """Add a group's products to the sums, times both scales; `number` is the group's."""
        bases = [self._base(tile, number) for tile in range(self.tiles)]
        for part in range(self.parts):
            self._add(group, number, part, bases)

    def _base(self, tile: int, number: Expr) -> tuple[Expr, Expr | None]:
        """Of a lane's row of x: the sum that zero points multiply, and the group's scale."""
        row = self._row(tile, self.lane % 4 * 2 // self.planes)
        base = local(1, "int32")
        b.buffer_store(base, self._first_warp(self.sums_of_x[row, number]), [0])
        return base[0], self._row_scale(row, number)

    def _add(
        self, group: int, number: Expr, part: int, bases: list[tuple[Expr, Expr | None]]
    ) -> None:
        layout = self.layout
        self.take_scales(group, number, part)
        for tile, (base, scale) in enumerate(bases):
            for high in range(2):
                first = address(self.dots[self._dot(part, tile, 0) + 2 * high])
                zero = layout.zero(self.weights, self.scale_place(part, number, high))
                counts = address(self.counts[0])
                given = (first, i32(4), i32(layout.bits), counts, i32(0) - base * zero)
                total = self.call("apq_weigh_planes", *given, dtype="int32")
                factor = self.pair[high] if scale is None else self.pair[high] * scale
                at = part * self.results + 2 * tile + high
                added = self.sums[at] + total.astype("float32") * factor
                b.buffer_store(self.sums, added, [at])

    def _first_warp(self, sum_of_x: Expr) -> Expr:
        """The sum for the one lane of a row that takes the zero point off; of whole rows, whose
        parts all warps have, for the first warp's."""
        mine = sum_of_x * self.first_lane[0]
        return tirx.Select(self.warp == 0, mine, i32(0)) if self.whole_rows else mine

    def _row_scale(self, row: Expr, number: Expr) -> Expr | None:
        """The scale of x for a group; None where it is that of the row."""
        factors = self.factors
        if factors.act_group == -1:
            return None
        scale, group = local(1, "float32"), number // i64(factors.act_group // factors.sum_width)
        b.buffer_store(scale, self.xs[row, group], [0])
        return scale[0]

    def place(self, at: Expr) -> tuple[Expr, Expr, Expr | None]:
        """Sums of a tile: of two rows of weights and one of x."""
        quarter, lanes = self.lane % 4, self.planes // 2
        mine = None if lanes == 1 else quarter % lanes == 0
        return at // 2 * self.tile + quarter // lanes, self.lane // 4 + at % 2 * 8, mine

    def factor(self, row: Expr, column: int) -> Expr:
        """Rows lie one by one."""
        return self.xs[row, column]

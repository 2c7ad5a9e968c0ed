"""Large-M linear layers with int8 activations and weights decoded to centred int8 once a panel.

`apq_tvm.tensorize.meaning.centred` draws the two orders of sums, *lanes* and *pairs*. What differs
from `apq_tvm.ops.many_rows.interleaved`, whose panels hold codes:

- Zero points are gone from the panel, so no sums of activations are needed (but for 8-bit codes
  with zero points, whose difference from their zero point is no int8).
- A group's sums start as the bits of `apq_tvm.tensorize.exprs.MAGIC`. There one unit of
  the integer is one unit of the float, so that a subtraction makes the float of a sum, exactly
  while it is below 2^22: for one instruction where conversion takes several on most Arm cores
  (scvtf has a quarter of the throughput of fsub on Neoverse V1 and V2, and of N1).
- The start may be *loaded*: vector pipes are what a GEMM is short of, and a copy of a register
  would take one for every accumulator. Each accumulator has a place of its own, which depends on
  the group, or LLVM would load it once for the whole K.
- Where x has one scale per token, sums run on over all groups of a K block. With A_g the sum up to
  group g, ``Σ s_g (A_g - A_(g-1)) = Σ (s_g - s_(g+1)) A_g``: the panel keeps differences of scales,
  and nothing starts anew. A_g are exact; rounding errors are at most `MOST_GROUPS` times those of
  the plain sum, and as large as those where scales differ by a third.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.blocks import argument, put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.task import GemmBlocking, GemmTask, arguments, around
from apq_tvm.tensorize.exprs import MAGIC, Buffer, Expr, i64
from apq_tvm.tensorize.meaning.centred import CentredTile, products, rows_of_sums
from apq_tvm.tensorize.meaning.scaffold import View, product

_VECTOR = "float32x4"

MOST_GROUPS = 32
"""Groups of a K block, at most, for sums to run on over it."""


class CentredGemm(GemmTask):
    """Sums stay int32 for whole-row scales, else become float32 after every group."""

    wide_zeros = False
    """Whether 8-bit codes have zero points, which are not in the panel."""

    minima = False
    """Whether groups have a float that is taken off their weights, which is not in the panel; sums
    of activations are float32 then."""

    def __init__(
        self,
        spec: LinearSpec,
        weights: CentredGroups,
        blocking: GemmBlocking,
        tuning: CentredTuning,
    ) -> None:
        super().__init__(spec, blocking, 4, weights.k)
        assert spec.scheme is not None
        pairs, parts = tuning.pairs, tuning.parts
        self.pairs, self.together = pairs, 2 if pairs else 4
        self.planes, self.group = weights.planes, weights.group
        self.groups = weights.groups * self.planes
        self.token_scale = spec.scheme.act_group == -1 or self.groups == 1
        self.magic = weights.starts_at_magic(self.group)
        # Several short groups are one iteration: fewer instructions for addresses.
        wanted = tuning.stretch // self.group
        divides = (self.groups, self.per_block)
        self.unrolled = max(
            u for u in (1, 2, 4) if u <= max(1, wanted) and not any(d % u for d in divides)
        )
        self.running = (
            self.token_scale
            and self.planes == 1
            and not self.wide_zeros
            and self.per_block <= MOST_GROUPS
            and weights.starts_at_magic(blocking.k_block)
        )
        # Sums that run on start once a tile: too seldom for a few loads to matter.
        rows = blocking.m_tile // (2 if pairs else 1)
        loaded = rows if tuning.loaded < 0 else tuning.loaded
        if self.running and loaded < rows:
            loaded = 0
        self.loaded = loaded
        self.columns = blocking.vectors * (2 if pairs else 1)
        self.parts = parts
        columns = self.columns // parts
        self.tile = CentredTile(blocking.m_tile, columns, blocking.k_step, pairs)
        self.tile_shape = (self.tile.sums[0], self.columns, 4)
        self.part: Any = 0
        if self.groups == 1:
            self.sum_dtype = "int32"

    def declare(self) -> None:
        scheme = self.spec.scheme
        assert scheme is not None
        groups = self.groups // self.planes
        act = 1 if scheme.act_group == -1 else groups
        added = 1 if scheme.group_size == -1 else groups
        blocks, together = tirx.Var("blocks", "int64"), self.together
        self.xq = argument(
            "xq", (blocks, self.k * together // 16, together, 16 // together), "int8", 16
        )
        self.xs = argument("xs", (blocks, act + self.spec.centres, 4), "float32", 16)
        sums = "float32" if self.minima else "int32"
        self.xsum = argument("xsum", (blocks, added, 4), sums, 16)
        self.blocks = blocks
        self.declare_more()
        self.weights = arguments(self.shapes())

    @abstractmethod
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every packed array, in the order of the calling convention."""

    def declare_more(self) -> None:
        """Declare what of x follows the sums."""

    def add_to_results(self, results: Buffer, place: Callable[[Any, Expr], list[Expr]]) -> None:
        """Add to elements of x Wᵀ; `place` is where a tile's row and column are in `results`."""

    @abstractmethod
    def unpack(self, kb: Expr) -> None:
        """Decode the panel's weights of a K block to `decoded`."""

    @abstractmethod
    def spread(self, name: str, target: Buffer, start: int, mine: Any, first: Expr) -> None:
        """Values of `mine` groups from `first` on, in the order of the sums.

        They are ``scales``, ``zeros`` or ``least``, and go to `target` from row `start` on.
        """

    @property
    def per_block(self) -> int:
        """Groups of a K block."""
        return max(1, self.blocking.k_block // self.group) * self.planes

    def scratch(self) -> None:
        bl = self.blocking
        columns = self.columns
        panel = CentredTile(bl.m_tile, columns, bl.k_block * self.planes, self.pairs).panel
        self.decoded = b.sblock_alloc_buffer(panel, "int8", align=64)
        started = self.groups > 1 and self.magic and self.loaded
        rows, tile_columns, _ = self.tile.sums
        # Few starts lie beside a group's factors, which takes no address of their own.
        few = started and self.loaded < rows
        self.beside = self.loaded * tile_columns if few else 0
        sets = 1 if self.running else 2 * self.unrolled
        self.origins = sets * rows * tile_columns if started and not few else 0
        self.stride = columns + self.beside
        if self.running and started:
            # A group's factors have the float beside them that is taken off. A power of two takes
            # one instruction less for addresses.
            self.stride = 1 << columns.bit_length()
        # One buffer: LLVM must not see that the start is always the same.
        shape = (self.origins + self.per_block * self.stride, 4)
        self.scales = b.sblock_alloc_buffer(shape, "float32", align=64)
        if self.wide_zeros:
            self.zeros = b.sblock_alloc_buffer((shape[0] - self.origins, 4), "int32", align=64)
        if self.minima:
            rows = self.per_block // self.planes * self.stride
            self.least = b.sblock_alloc_buffer((rows, 4), "float32", align=64)
        if started:
            extents = (self.per_block, self.beside, 4) if few else (shape[0], 1, 4)
            with self.stage("origin", *extents) as (i, j, r):
                row = i * self.stride + columns + j if few else i
                put(self.scales, (row, r), tirx.const(MAGIC, "float32"))

    def fill(self, kb: Expr) -> None:
        self.unpack(kb)
        first = kb * self.per_block if self.groups > 1 else i64(0)
        mine = self.count(self.per_block, self.groups, kb) if self.groups > 1 else 1
        self.spread("scales", self.scales, self.origins, mine, first)
        if self.minima:
            planes = self.planes
            self.spread("least", self.least, 0, mine // planes, first // planes)
        if self.running and self.groups > 1:
            with self.stage("differences", mine - 1, self.columns, 4) as (g, c, r):
                row = self.origins + g * self.stride + c
                value = self.scales[row, r] - self.scales[row + self.stride, r]
                put(self.scales, (row, r), value)
        if self.wide_zeros:
            self.spread("zeros", self.zeros, 0, mine, first)

    def _block_of_x(self, m: Expr) -> Expr:
        """Block of rows of x that the tile's row of vectors `m` belongs to."""
        block = self.row // i64(self.together)
        return block + m if self.pairs else block

    def _of_x(self, buffer: Buffer, m: Expr, group: Expr, r: Expr) -> Expr:
        """A scale or a sum of x."""
        return buffer[self._block_of_x(m), group, r if self.pairs else m]

    def centre(self, row: Expr) -> Expr:
        lane = row % i64(self.together) * i64(4 // self.together)
        return self.xs[row // i64(self.together), i64(1), lane]

    def _group_of_x(self, kb: Expr, group: Expr) -> Expr:
        """Which scale of x belongs to a group of the K block."""
        absolute = kb * self.per_block + group
        return absolute // self.planes if self.planes > 1 else absolute

    def _missing(self, zero: Expr, total: Expr) -> Expr:
        """What 8-bit codes less 128 lack of codes less their zero point."""
        return (tirx.const(128, "int32") - zero) * total

    def multiply(self, kb: Expr, sums: Buffer) -> None:
        bl = self.blocking
        if self.groups == 1:
            steps = self.count(bl.k_block // bl.k_step, self.k // bl.k_step, kb)
            self._dots(kb, 0, 0, steps, sums)
            return
        unrolled = self.unrolled
        iterations = self.count(self.per_block // unrolled, self.groups // unrolled, kb)
        if self.running:
            running = b.sblock_alloc_buffer(self.tile.sums, "int32", align=64)
            self._start(kb, tirx.const(0, "int32"), 0, running)
        with around("groups", (iterations, self.per_block // unrolled), opaque=True) as (i,):
            with b.unroll(unrolled) as h0, b.sblock("group"):
                h = b.axis.spatial(unrolled, h0)
                b.reads()
                b.writes()
                if self.running:
                    self._group(kb, i, h, running, sums)
                else:
                    dots = b.sblock_alloc_buffer(self.tile.sums, "int32", align=64)
                    self._start(kb, i, h, dots)
                    self._group(kb, i, h, dots, sums)
        if self.minima:
            self._take_minima(kb, sums)

    def _take_minima(self, kb: Expr, sums: Buffer) -> None:
        """Take off groups' minima times the sums of what their activations mean."""
        per_block = self.per_block // self.planes
        mine = self.count(per_block, self.groups // self.planes, kb)
        with around("minimum", (mine, per_block), opaque=True) as (g,):
            absolute = kb * per_block + g
            if self.pairs:
                with self.stage("sum_minima", *self.tile.sums) as (m, c, r):
                    x = self._of_x(self.xsum, m, absolute, r)
                    total = sums[m, c, r] - self.least[self._column(g, c), r] * x
                    put(sums, (m, c, r), total)
                return
            with self._by_lane("scale_minima") as (m, c, at):
                x = self._lane_of_x(self.xsum, m, absolute)
                least = self.least.vload([self._column(g, c), 0], _VECTOR)
                b.buffer_store(sums, sums.vload([m, c, 0], _VECTOR) - least * x, at)

    def _origin(self, iteration: Expr, part: Any) -> Expr:
        """First row of the starts of a group: they differ from iteration to iteration."""
        half = tirx.bitwise_and(iteration, tirx.const(1, "int32"))
        rows, columns, _ = self.tile.sums
        return (half * self.unrolled + part) * (rows * columns)

    def _column(self, group: Expr, c: Expr) -> Expr:
        """Row of a group's factors for the tile's column vector c."""
        return group * self.stride + self.part * self.tile.columns + c

    def _start(self, kb: Expr, iteration: Expr, part: Any, dots: Buffer) -> None:
        columns, group = self.tile.columns, iteration * self.unrolled + part
        first = group * self.stride + self.columns if self.beside else self._origin(iteration, part)
        with self.stage("start", *self.tile.sums) as (m, c, r):
            value: Expr = tirx.const(0, "int32")
            if self.magic:
                start = tirx.const(MAGIC, "float32")
                if self.loaded:
                    place = self.scales[first + m * columns + c, r]
                    start = tirx.Select(m < self.loaded, place, start)
                value = tirx.reinterpret("int32", start)
            if self.wide_zeros:
                total = self._of_x(self.xsum, m, kb * self.per_block + group, r)
                value = value + self._missing(self.zeros[self._column(group, c), r], total)
            put(dots, (m, c, r), value)

    def _group(self, kb: Expr, iteration: Expr, part: Expr, dots: Buffer, sums: Buffer) -> None:
        group = iteration * self.unrolled + part
        of_x = group // self.planes if self.planes > 1 else group
        steps = self.group // self.blocking.k_step
        self._dots(kb, group * self.group, of_x * self.group, steps, dots)
        if not self.pairs:
            self._scale_by_lane(kb, iteration, group, dots, sums)
            return
        with self.stage("sum", *self.tile.sums) as (m, c, r):
            factor = self.scales[self.origins + self._column(group, c), r]
            if not self.token_scale:
                factor = factor * self._of_x(self.xs, m, self._group_of_x(kb, group), r)
            if self.magic:
                origin = tirx.const(MAGIC, "float32")
                if self.loaded == self.tile.sums[0]:
                    origin = self.scales[self._magic_row(iteration, group), r]
                dot = tirx.reinterpret("float32", dots[m, c, r]) - origin
            else:
                dot = dots[m, c, r].astype("float32")
            # `sums` is left out of the reads: TVM would not vectorize a running sum.
            put(sums, (m, c, r), sums[m, c, r] + dot * factor, dots[m, c, r])

    def _magic_row(self, iteration: Expr, group: Expr) -> Expr:
        """Where `MAGIC` is taken from: LLVM would splat a constant anew for every group."""
        own = self.origins + group * self.stride + self.columns
        return own if self.running else self._origin(iteration, 0)

    def _scale_by_lane(
        self, kb: Expr, iteration: Expr, group: Expr, dots: Buffer, sums: Buffer
    ) -> None:
        """The scales of 4 rows of x are one vector, of which each row multiplies by its lane."""
        with self._by_lane("scale") as (m, c, at):
            factor = self.scales.vload([self.origins + self._column(group, c), 0], _VECTOR)
            if not self.token_scale:
                factor = factor * self._lane_of_x(self.xs, m, self._group_of_x(kb, group))
            dot = dots.vload([m, c, 0], "int32x4")
            if self.magic:
                origin = tirx.Broadcast(tirx.const(MAGIC, "float32"), 4)
                if self.loaded == self.tile.sums[0]:
                    origin = self.scales.vload([self._magic_row(iteration, group), 0], _VECTOR)
                dot = tirx.reinterpret(_VECTOR, dot) - origin
            else:
                dot = dot.astype(_VECTOR)
            b.buffer_store(sums, sums.vload([m, c, 0], _VECTOR) + dot * factor, at)

    @contextmanager
    def _by_lane(self, name: str) -> Iterator[tuple[Expr, Expr, list[Expr]]]:
        """A block around each vector of the tile: its row, its column, and where it is."""
        rows, columns, _ = self.tile.sums
        with around(name, (rows, rows), (columns, columns)) as (m, c):
            yield m, c, [m, c, tirx.Ramp(0, 1, 4)]

    def _lane_of_x(self, buffer: Buffer, m: Expr, group: Expr) -> Expr:
        """A scale or a sum of x, four times."""
        four = buffer.vload([self._block_of_x(m), group, 0], _VECTOR)
        return tirx.Shuffle([four], [m] * 4)

    def _dots(self, kb: Expr, first: Any, first_x: Any, steps: Any, dots: Buffer) -> None:
        """Products of columns of the panel from `first` on, with those of x from `first_x` on."""
        bl = self.blocking
        width = 8 if self.pairs else 4
        with around("step", (steps, bl.k_block // bl.k_step), opaque=True) as (s,):
            step = s * (bl.k_step // width)
            at, k0 = first // width + step, first_x // width + step + kb * (bl.k_block // width)
            x = View(self.xq, (self._block_of_x(0), k0, 0, 0))
            w = View(self.decoded, (at, self.part * self.tile.columns, 0, 0))
            product(products(self.tile), "dot", lambda: (x, w, View(dots, (0, 0, 0))))

    def result(self, m: Expr, j: Expr, r: Expr, value: Expr) -> Expr:
        if self.groups > 1:
            return value * self._of_x(self.xs, m, i64(0), r) if self.token_scale else value
        if self.wide_zeros:
            total = self._of_x(self.xsum, m, i64(0), r)
            value = value + self._missing(self.zeros[j, r], total)
        scale = self.scales[j, r] * self._of_x(self.xs, m, i64(0), r)
        return value.astype("float32") * scale

    def tile_row(self, row: Expr) -> Expr:
        return tirx.min(row, self.blocks * i64(self.together) - i64(self.blocking.m_tile))

    def sum_tile(self, kb: Expr, tile: Expr) -> None:
        """In parts, each of which fits the registers, where there are several."""
        if self.parts == 1:
            super().sum_tile(kb, tile)
            return
        assert self.waiting is not None
        shape, waiting = self.tile.sums, self.waiting
        with around("part", (self.parts, self.parts)) as (self.part,):
            first = self.part * shape[1]
            sums = b.sblock_alloc_buffer(shape, self.sum_dtype, align=64)
            with self.stage("load", *shape) as (m, c, r):
                there = waiting[tile, m, first + c, r]
                put(sums, (m, c, r), there, there)
            self.multiply(kb, sums)
            with self.stage("wait", *shape) as (m, c, r):
                put(waiting, (tile, m, first + c, r), sums[m, c, r], sums[m, c, r])
        with b.If(kb == self.k_blocks - 1), b.Then():
            self._store(lambda m, c, r: waiting[tile, m, c, r])

    def store(self, sums: Buffer) -> None:
        self._store(lambda m, c, r: sums[m, c, r])

    def _store(self, sums: Callable[[Expr, Expr, Expr], Expr]) -> None:
        bl, shape = self.blocking, self.tile_shape
        spilled = b.sblock_alloc_buffer(shape, "float32", align=64)
        with self.stage("spill", *shape) as (m, c, r):
            put(spilled, (m, c, r), self.result(m, c, r, sums(m, c, r)), sums(m, c, r))
        # The last block of x may have rows past M.
        rows = tirx.min(i64(bl.m_tile), self.m - self.row)
        if not self.pairs:
            self.add_to_results(spilled, lambda m, n: [m, n // 4, n % 4])
            self.store_rows(lambda m, j, r: spilled[m, j, r], rows)
            return
        results = b.sblock_alloc_buffer((bl.m_tile, 4 * bl.vectors), "float32", align=64)
        with around("rows_of", (shape[0], shape[0]), (bl.vectors, bl.vectors)) as (p, j):
            views = View(spilled, (p, j * 2, 0)), View(results, (p * 2, j * 4))
            product(rows_of_sums(), "rows", lambda: views)
        self.add_to_results(results, lambda m, n: [m, n])
        self.store_rows(lambda m, j, r: results[m, j * 4 + r], rows)

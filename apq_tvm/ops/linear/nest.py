"""The loop nests of linear layers whose packed weights are streamed through once.

Two decisions shape the loops from the start, because TensorIR cannot split a dynamic M or an
indivisible count of row blocks without predicates inside the dot product:

- M is covered by tiles of `m_tile` rows; the last one starts at ``M - m_tile`` and repeats rows
  that another tile has done (and writes the same values again, in the same task). M must be at
  least `m_tile`.
- Row blocks are read by `streams` at once, each of which runs through consecutive blocks; a stream
  that ends early reads the last block again and stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec, epilogue_of, store_inside
from apq_tvm.ops.linear.streams import Streams, first_row, tiles_of
from apq_tvm.tensorize.exprs import Buffer, Expr, i64
from apq_tvm.tensorize.meaning.scaffold import Meaning, View, product


@dataclass(frozen=True)
class Blocking:
    """Extents of the loops of a linear PrimFunc.

    Parameters
    ----------
    m_tile : int
        Rows of x per tile.
    streams : int
        Row blocks that are read at once.
    bundles : int
        Row blocks of one stream.
    per_unit : int
        Groups that share one unit: 2 for groups of 16, else 1.
    spans, units : int
        Stretches along K that have `per_unit` scales each, and units in one.
    """

    m_tile: int
    streams: int
    bundles: int
    per_unit: int
    spans: int
    units: int

    @classmethod
    def of(cls, layout: Any, n: int, k: int, m_tile: int, streams: int, width: int = 0) -> Blocking:
        """The blocking of an [n, k] matrix in `layout`, in spans of `width` or of a group."""
        width = width or layout.group_width(k)
        units = max(1, width // UNIT_K)
        bundles = Streams(layout.row_blocks(n), streams).bundles
        spans = layout.padded_k(k) // UNIT_K // units
        return cls(m_tile, streams, bundles, max(1, UNIT_K // width), spans, units)


class LinearNest:
    """Emits the loop nests of a linear PrimFunc.

    Buffers between the nests are indexed by loop variables alone, (tile, bundle, [span,] stream,
    [group of the unit,] [row of the tile,] vector of rows, lane), so that each nest can be computed
    inside the next. Axes of extent 1 are left out: tensorization would not see them.

    Parameters
    ----------
    spec : LinearSpec
    layout : WeightLayout
        In row blocks.
    blocking : Blocking
        Of its row blocks and K.
    m : PrimExpr
        Rows of x.
    lanes : tuple of int
        Vectors of a row block, if there are several, and their lanes; else those of the block.
    """

    def __init__(
        self,
        spec: LinearSpec,
        layout: Any,
        blocking: Blocking,
        m: Expr,
        lanes: tuple[int, ...] = (),
    ) -> None:
        self.spec, self.layout, self.blocking, self.m = spec, layout, blocking, m
        self.lanes = lanes or (layout.rows,)
        scheme = spec.scheme
        assert scheme is not None
        self.token_scale = scheme.integer_acts and scheme.act_group == -1
        self._pairs = [i64(blocking.per_unit)] if blocking.per_unit > 1 else []
        rows = [i64(blocking.m_tile)] if blocking.m_tile > 1 else []
        self._row_axes, self._streams = len(rows), i64(blocking.streams)
        self.streams = Streams(layout.row_blocks(spec.n), blocking.streams)
        self._outer = [tiles_of(m, blocking.m_tile), i64(blocking.bundles)]
        self.sums_shape = [*self._outer, self._streams, *rows, *map(i64, self.lanes)]

    def _first(self, tile: Expr) -> Expr:
        """First row of x of a tile."""
        mt = self.blocking.m_tile
        return first_row(self.m, mt, tile) if mt > 1 else tile

    def _row(self, tile: Expr, inner: Sequence[Expr]) -> Expr:
        """Row of x; `inner` starts with its number in the tile where tiles have several."""
        return self._first(tile) + inner[0] if self._row_axes else tile

    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block, past the end in the last bundle of ragged streams."""
        return self.streams.index(bundle, stream)

    def _block(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        return self.streams.within(self._block_index(bundle, stream))

    @property
    def ragged(self) -> bool:
        """Whether the last bundle has fewer row blocks than there are streams."""
        return self.streams.ragged

    def _lane(self, inner: Sequence[Expr]) -> Expr:
        """Row of the block, by the axes of the sums behind the stream."""
        vector, lane = inner[self._row_axes : -1], inner[-1]
        return vector[0] * i64(self.lanes[-1]) + lane if vector else lane

    def padded(self, x: Buffer) -> Buffer:
        """Copy of x f32 [M, K] with zeros up to whole units and groups."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        k = i64(self.spec.k)
        shape = [self.m, i64(self.layout.padded_k(self.spec.k))]
        copy = b.sblock_alloc_buffer(shape, "float32")
        with b.grid(*shape) as loops, b.sblock("pad"):
            i, j = b.axis.remap("SS", loops)
            zero = tirx.const(0.0, "float32")
            b.buffer_store(copy, tirx.if_then_else(j < k, x[i, j], zero), [i, j])
        return copy

    def multiply(
        self,
        meaning: Meaning,
        operands: Callable[[Expr, Expr, Expr, Expr], Sequence[View]],
        init: bool | Callable[[Sequence[Expr]], Expr] = True,
    ) -> Buffer:
        """What a meaning sums, per span.

        Parameters
        ----------
        meaning : Meaning
            Of a unit.
        operands : callable
            (row block, first row of x, span, unit of K) → views of all that is read.
        init : bool or callable
            As of `product`.
        """
        from tvm.tirx.script.builder import ir as b

        inner = meaning.operands[-1].shape
        outer = [*self._outer, i64(self.blocking.spans), self._streams]
        dots = b.sblock_alloc_buffer([*outer, *map(i64, inner)], meaning.operands[-1].dtype)

        def views(t: Expr, nb: Expr, g: Expr, s: Expr, u: Expr) -> list[View]:
            read = operands(self._block(nb, s), self._first(t), g, g * i64(self.blocking.units) + u)
            return [*read, View(dots, (t, nb, g, s, *[0] * len(inner)))]

        product(meaning, "dot", views, (), outer, [i64(self.blocking.units)], init)
        return dots

    def scale(
        self,
        dots: Buffer,
        weights: dict[str, Buffer],
        xs: Buffer | None = None,
        xsum: Buffer | None = None,
        offset: int = 0,
    ) -> Buffer:
        """Σ_g scale (dot - zero xsum), times xs where activations have a scale per group.

        Where groups have minima it is Σ_g (scale dot - minimum xsum).
        """
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl = self.blocking
        sums = b.sblock_alloc_buffer(self.sums_shape, "float32")
        reduced = [i64(bl.spans), *self._pairs]
        kinds = "S" * len(self.sums_shape) + "R" * len(reduced)
        with b.grid(*self.sums_shape, *reduced) as loops, b.sblock("scale"):
            axes = b.axis.remap(kinds, loops)
            target, (g, *pair) = list(axes[: -len(reduced)]), axes[-len(reduced) :]
            t, nb, s, *inner = target
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            block, row, lane = self._block(nb, s), self._row(t, inner), self._lane(inner)
            group = g * i64(bl.per_unit) + pair[0] if pair else g
            total = dots[(t, nb, g, s, *pair, *inner)]
            if xsum is not None:
                zero = weights["zeros"][block, group, lane] if "zeros" in weights else None
                total = self.centred(total, xsum[row, group], zero, offset, (row, group))
            total = total.astype("float32")
            factor = self.step(weights, block, group, lane)
            least = self.least(weights, block, group, lane)
            if least is not None:
                assert xs is not None and xsum is not None and not self.token_scale
                total = factor * total - least * xsum[row, group].astype("float32")
                factor = xs[row, group]
            elif xs is not None and not self.token_scale:
                factor = factor * xs[row, group]
            b.buffer_store(sums, sums[tuple(target)] + factor * total, target)
        return sums

    def step(self, weights: dict[str, Buffer], block: Expr, group: Expr, lane: Expr) -> Expr:
        """What a group's sum is multiplied by, float32."""
        if isinstance(self.layout, InterleavedLayout):
            return self.layout.step(weights, block, group, lane)
        return weights["scales"][block, group, lane].astype("float32")

    def least(self, weights: dict[str, Buffer], block: Expr, group: Expr, lane: Expr) -> Expr:
        """A group's minimum, float32; None where there are none."""
        if isinstance(self.layout, InterleavedLayout):
            return self.layout.least(weights, block, group, lane)
        return None

    def centred(
        self, dot: Expr, xsum: Expr, zero: Expr | None, offset: int, at: tuple[Expr, Expr]
    ) -> Expr:
        """Σ (code - zero) x from Σ (code - offset) x of ``(row, group)``; W1 without zeros is
        2 code - 1."""
        from tvm import tirx

        bits = self.layout.bits
        if zero is not None:
            wide = zero.astype("int32")
            return dot - (wide - tirx.const(offset, "int32") if offset else wide) * xsum
        if bits == 1:
            return dot * tirx.const(2, "int32") - xsum
        minima = isinstance(self.layout, InterleavedLayout) and self.layout.minima
        middle = (0 if minima else 1 << (bits - 1)) - offset
        return dot - tirx.const(middle, "int32") * xsum if middle else dot

    def store(
        self,
        y: Buffer,
        sums: Buffer,
        bias: Buffer | None,
        residual: Buffer | None,
        xs: Buffer | None = None,
        centre: tuple[Buffer, int, Buffer] | None = None,
    ) -> None:
        """Epilogue of every sum inside [M, N].

        `centre` says which column of which buffer has the centres of rows of x, and the row sums.
        """
        from tvm.tirx.script.builder import ir as b

        def output(target: list[Expr], total: Expr, r: Expr) -> tuple[Expr, list[Expr]]:
            row, col = self._row(target[0], target[3:]), self._column(target) + r
            if xs is not None and self.token_scale:
                total = total * xs[row, i64(0)]
            shift = None
            if centre is not None:
                centres, column, row_sums = centre
                shift = centres[row, i64(column)], row_sums
            return epilogue_of(self.spec, total, bias, residual, row, col, shift), [row, col]

        if not self.vectors:
            self._store_ragged(sums, y, output)
            return
        always = not self.ragged and self.spec.n % self.layout.rows == 0
        with b.grid(*self.sums_shape) as loops, b.sblock("store"):
            *target, r = b.axis.remap("S" * len(self.sums_shape), loops)
            value, (row, col) = output(target, sums[(*target, r)], r)
            store_inside(y, value, row, col, self._inside(target)[0], always)

    @property
    def vectors(self) -> bool:
        """Whether sums are stored by whole vectors."""
        return self.spec.n % self.lanes[-1] == 0

    def _vector(self, target: list[Expr]) -> Expr:
        """Number of a vector of rows; `target` is an index into the sums without the lane."""
        index, many = self._block_index(target[1], target[2]), self.lanes[:-1]
        return index * i64(many[0]) + target[-1] if many else index

    def _column(self, target: list[Expr]) -> Expr:
        """Column of y of a vector's first lane."""
        return self._vector(target) * i64(self.lanes[-1])

    def _inside(self, target: list[Expr]) -> tuple[Expr, Expr]:
        """Whether all of a vector is inside N, and, if it is not, whether some of it is."""
        index, full = self._vector(target), i64(self.spec.n // self.lanes[-1])
        return index < full, index == full

    def _store_ragged(self, sums: Buffer, y: Buffer, output: Any) -> None:
        """Whole vectors where they fit; lane by lane, from a copy, where N ends within one.

        The lanes are loops of the block itself: a schedule could not treat the two cases apart. The
        copy leaves the sums with constant indices, so that they stay in registers.
        """
        from tvm.tirx.script.builder import ir as b

        lanes = i64(self.lanes[-1])
        with b.grid(*self.sums_shape[:-1]) as loops, b.sblock("store"):
            target = list(b.axis.remap("S" * len(loops), loops))
            row, first = self._row(target[0], target[3:]), self._column(target)
            full, part = self._inside(target)
            b.reads(sums[(*target, slice(0, lanes))])
            b.writes(y[row, first : first + lanes])
            tail = b.sblock_alloc_buffer([lanes], "float32")
            with b.If(full):
                with b.Then(), b.vectorized(lanes) as r:
                    value, at = output(target, sums[(*target, r)], r)
                    b.buffer_store(y, value, at)
                with b.Else(), b.If(part), b.Then():
                    with b.vectorized(lanes) as r:
                        b.buffer_store(tail, sums[(*target, r)], [r])
                    with b.serial(i64(self.spec.n % self.lanes[-1])) as r:
                        value, at = output(target, tail[r], r)
                        b.buffer_store(y, value, at)

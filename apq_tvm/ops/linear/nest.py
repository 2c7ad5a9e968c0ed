"""The loop nests of linear layers on packed integer weights.

Two decisions shape the loops from the start, because TensorIR cannot split a dynamic M or an
indivisible count of row blocks without predicates inside the dot product:

- M is covered by tiles of `m_tile` rows; the last one starts at ``M - m_tile`` and repeats rows
  that another tile has done (and writes the same values again, in the same task). M must be at
  least `m_tile`.
- Row blocks are read by `streams` at once, each of which runs through consecutive blocks; a stream
  that ends early reads the last block again and stores nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec, epilogue_of, store_inside
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.unit_dot import UnitDot
from apq_tvm.types import Scheme

Expr = Any  # tvm is untyped
Buffer = Any


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
    def of(cls, layout: InterleavedLayout, n: int, k: int, m_tile: int, streams: int) -> Blocking:
        """The blocking of an [n, k] matrix in `layout`."""
        width = layout.group_width(k)
        units = max(1, width // UNIT_K)
        bundles = -(-layout.row_blocks(n) // streams)
        spans = layout.padded_k(k) // UNIT_K // units
        return cls(m_tile, streams, bundles, max(1, UNIT_K // width), spans, units)


def act_groups(layout: InterleavedLayout, scheme: Scheme, k: int) -> int:
    """Columns of ``xs``: scales of one row of activations."""
    return 1 if scheme.act_group == -1 else layout.padded_groups(k)


class LinearNest:
    """Emits the loop nests of a linear PrimFunc.

    Buffers between the nests are indexed by loop variables alone, (tile, bundle, [span,] stream,
    [group of the unit,] [row of the tile,] lane), so that each nest can be computed inside the
    next. Bracketed axes of extent 1 are left out: tensorization would not see them.
    """

    def __init__(
        self, spec: LinearSpec, layout: InterleavedLayout, blocking: Blocking, m: Expr
    ) -> None:
        self.spec, self.layout, self.blocking, self.m = spec, layout, blocking, m
        self.unit = layout.unit
        scheme = spec.scheme
        assert scheme is not None
        self.token_scale = scheme.integer_acts and scheme.act_group == -1
        tiles = (m + i64(blocking.m_tile - 1)) // i64(blocking.m_tile)
        outer = [tiles, i64(blocking.bundles)]
        self._pairs = [i64(blocking.per_unit)] if blocking.per_unit > 1 else []
        rows = [i64(blocking.m_tile)] if blocking.m_tile > 1 else []
        lanes = [*rows, i64(layout.rows)]
        streams = i64(blocking.streams)
        self.dots_shape = [*outer, i64(blocking.spans), streams, *self._pairs, *lanes]
        self.sums_shape = [*outer, streams, *lanes]

    def _row(self, tile: Expr, inner: list[Expr]) -> Expr:
        """Row of x; `inner` is empty where tiles have one row. The last tile ends at M."""
        from tvm import tirx

        mt = self.blocking.m_tile
        return tirx.min(tile * i64(mt), self.m - i64(mt)) + inner[0] if inner else tile

    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block, past the end in the last bundle of ragged streams."""
        return stream * i64(self.blocking.bundles) + bundle

    def _block(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        from tvm import tirx

        index, last = self._block_index(bundle, stream), self.layout.row_blocks(self.spec.n) - 1
        return tirx.min(index, i64(last)) if self._ragged else index

    @property
    def _ragged(self) -> bool:
        return self.layout.row_blocks(self.spec.n) % self.blocking.streams != 0

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

    def sum_units(
        self, dots: Buffer, meaning: UnitDot, x: Buffer, codes: Buffer, zeros: Buffer | None
    ) -> None:
        """What the meaning sums, per group."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, unit = self.blocking, self.unit
        reduced = [i64(e) for e in (bl.units, *meaning.reduced)]
        kinds = "S" * len(self.dots_shape) + "RRR"
        with b.grid(*self.dots_shape, *reduced) as loops, b.sblock("dot"):
            axes = b.axis.remap(kinds, loops)
            target, (u, *within) = list(axes[:-3]), axes[-3:]
            t, nb, g, s = target[:4]
            pair, inner = target[4 : 4 + len(self._pairs)], target[4 + len(self._pairs) : -1]
            row, block = self._row(t, inner), self._block(nb, s)
            index = g * i64(bl.units) + u
            first = index * i64(UNIT_K)
            # A whole unit of both operands: what an instruction reads.
            reads = [codes[block, index, 0 : unit.nbytes], x[row, first : first + i64(UNIT_K)]]
            group = g * i64(bl.per_unit) + pair[0] if pair else g
            zero = None if zeros is None else zeros[block, group, target[-1]]
            b.reads(*reads, *([] if zero is None else [zero]))
            b.writes(dots[tuple(target)])
            with b.init():
                b.buffer_store(dots, tirx.const(0, dots.dtype), target)
            meaning.store(
                dots,
                target,
                within,
                lambda byte: codes[block, index, byte],
                lambda four, k: x[row, first + four * i64(4) + k],
                zero,
            )

    def scale(
        self,
        sums: Buffer,
        dots: Buffer,
        weights: dict[str, Buffer],
        xs: Buffer | None = None,
        xsum: Buffer | None = None,
        offset: int = 0,
    ) -> None:
        """Σ_g scale (dot - zero xsum), times xs where activations have a scale per group."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl = self.blocking
        reduced = [i64(bl.spans), *self._pairs]
        kinds = "S" * len(self.sums_shape) + "R" * len(reduced)
        with b.grid(*self.sums_shape, *reduced) as loops, b.sblock("scale"):
            axes = b.axis.remap(kinds, loops)
            target, (g, *pair) = list(axes[: -len(reduced)]), axes[-len(reduced) :]
            t, nb, s, *inner, r = target
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            block, row = self._block(nb, s), self._row(t, inner)
            group = g * i64(bl.per_unit) + pair[0] if pair else g
            total = dots[tuple([t, nb, g, s, *pair, *inner, r])]
            if xsum is not None:
                zero = weights["zeros"][block, group, r] if "zeros" in weights else None
                total = self.centred(total, xsum[row, group], zero, offset, (row, group))
                total = total.astype("float32")
            factor = weights["scales"][block, group, r].astype("float32")
            if xs is not None and not self.token_scale:
                factor = factor * xs[row, group]
            b.buffer_store(sums, sums[tuple(target)] + factor * total, target)

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
        middle = (1 << (bits - 1)) - offset
        return dot - tirx.const(middle, "int32") * xsum if middle else dot

    def store(
        self,
        y: Buffer,
        sums: Buffer,
        xs: Buffer | None,
        bias: Buffer | None,
        residual: Buffer | None,
    ) -> None:
        """Epilogue of every sum inside [M, N]."""
        from tvm.tirx.script.builder import ir as b

        n, rows = self.spec.n, self.layout.rows

        def output(target: list[Expr], total: Expr, r: Expr) -> tuple[Expr, list[Expr]]:
            row = self._row(target[0], target[3:])
            col = self._block_index(target[1], target[2]) * i64(rows) + r
            if xs is not None and self.token_scale:
                total = total * xs[row, i64(0)]
            return epilogue_of(self.spec, total, bias, residual, row, col), [row, col]

        def full(target: list[Expr]) -> Expr:
            return self._block_index(target[1], target[2]) < i64(n // rows)

        if n % rows:
            self._store_ragged(sums, y, output, full)
            return
        with b.grid(*self.sums_shape) as loops, b.sblock("store"):
            *target, r = b.axis.remap("S" * len(self.sums_shape), loops)
            value, (row, col) = output(target, sums[(*target, r)], r)
            store_inside(y, value, row, col, full(target), not self._ragged)

    def _store_ragged(self, sums: Buffer, y: Buffer, output: Any, full: Any) -> None:
        """Whole vectors for full row blocks; lane by lane, from a copy, for the last one.

        The lanes are loops of the block itself: a schedule could not treat the two cases apart. The
        copy leaves the sums with constant indices, so that they stay in registers.
        """
        from tvm.tirx.script.builder import ir as b

        n, rows = self.spec.n, i64(self.layout.rows)
        with b.grid(*self.sums_shape[:-1]) as loops, b.sblock("store"):
            target = list(b.axis.remap("S" * len(loops), loops))
            row = self._row(target[0], target[3:])
            index = self._block_index(target[1], target[2])
            b.reads(sums[(*target, slice(0, rows))])
            b.writes(y[row, index * rows : index * rows + rows])
            tail = b.sblock_alloc_buffer([rows], "float32")
            with b.If(full(target)):
                with b.Then(), b.vectorized(rows) as r:
                    value, at = output(target, sums[(*target, r)], r)
                    b.buffer_store(y, value, at)
                with b.Else(), b.If(index == i64(n // self.layout.rows)), b.Then():
                    with b.vectorized(rows) as r:
                        b.buffer_store(tail, sums[(*target, r)], [r])
                    with b.serial(i64(n % self.layout.rows)) as r:
                        value, at = output(target, tail[r], r)
                        b.buffer_store(y, value, at)

"""``y = act(x Wᵀ + b) + residual`` on packed ``mixed24`` weights with int8 activations.

Written in the order it runs, since one loop over word rows feeds two kinds of sums, which reduction
blocks of TensorIR do not: per bundle of row blocks and tile of rows of x

- sums to zero;
- over *spans* of word rows: the second-order scales and zeros of the span become float32 and int32
  (``super``: they depend on nothing that is loaded for the products, so that their decoding runs
  while codes, which are prefetched, are still on the way), then the products ``narrow`` and
  ``wide`` of every word row and stream;
- ``sparse``: outliers times x itself, row by row of the CSR matrix;
- ``store``: scales of 4-bit groups, the activations' scale, the epilogue.

``narrow`` and ``wide`` are plain loops that schedules replace by instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from apq_tvm.codegen.layouts.mixed import MixedLayout
from apq_tvm.codegen.layouts.mixed_views import Place
from apq_tvm.formats.mixed import GROUP
from apq_tvm.ops.blocks import each, put
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of
from apq_tvm.tensorize.exprs import Buffer, Expr, i64, prefetch_line
from apq_tvm.tensorize.meaning.mixed import TRIPLE, narrow_dot, wide_dot
from apq_tvm.tensorize.meaning.scaffold import View, product

_LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class MixedBlocking:
    """Extents of the loops.

    Parameters
    ----------
    m_tile : int
        Rows of x per tile; the last tile starts at ``M - m_tile``.
    streams : int
        Row blocks read at once; each stream runs through consecutive blocks.
    span : int
        Word rows whose second-order scales are decoded together; divides their number.
    ahead : int
        Bytes to prefetch ahead where word rows do not, 0 for none.
    parallel : bool
        Whether bundles are shared among threads.
    """

    m_tile: int = 1
    streams: int = 1
    span: int = 1
    ahead: int = 0
    parallel: bool = False


def mixed_linear(spec: LinearSpec, layout: MixedLayout, blocking: MixedBlocking) -> Any:
    """Linear layer with ``mixed24`` weights.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, 1], minus i32 [M, P + 1], [xf f32 [M, K],] *packed arrays,
        [bias], [residual], y)``, the first as `apq_tvm.ops.activations.mixed` makes them.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            operands = Operands(spec)
            m = operands.m
            xq = operands.declare("xq", (m, layout.padded_k(spec.k)), "int8")
            xs = operands.declare("xs", (m, 1), "float32")
            minus = operands.declare("minus", (m, layout.places(spec.k) + 1), "int32")
            sparse = "outliers" in layout.shapes(spec.n, spec.k)
            xf = operands.declare("xf", (m, spec.k), "float32") if sparse else None
            arrays = operands.weights(layout)
            epilogue = operands.epilogue()
            with b.sblock("root"):
                b.reads()
                b.writes()
                nest = _Nest(spec, layout, blocking, m, arrays)
                nest.emit(xq, xs, minus, xf, epilogue)
    return builder.get()


class _Nest:
    def __init__(
        self,
        spec: LinearSpec,
        layout: MixedLayout,
        blocking: MixedBlocking,
        m: Expr,
        arrays: dict[str, Buffer],
    ) -> None:
        self.spec, self.layout, self.blocking, self.m = spec, layout, blocking, m
        self.arrays, self.views = arrays, layout.views(arrays)
        self.blocks = layout.row_blocks(spec.n)
        self.bundles = -(-self.blocks // blocking.streams)
        self.triples = layout.triples(spec.k)

    def emit(
        self,
        xq: Buffer,
        xs: Buffer,
        minus: Buffer,
        xf: Buffer | None,
        epilogue: tuple[Buffer | None, Buffer | None, Buffer],
    ) -> None:
        """All loops."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, rows = self.blocking, self.layout.rows
        tiles = (self.m + i64(bl.m_tile - 1)) // i64(bl.m_tile)
        with (b.parallel if bl.parallel else b.serial)(0, self.bundles) as n0, b.sblock("bundle"):
            bundle = b.axis.spatial(self.bundles, n0)
            b.reads()
            b.writes()
            with each("tile", tiles) as tile:
                self.first = b.bind(tirx.min(tile * i64(bl.m_tile), self.m - i64(bl.m_tile)))
                self.index = [b.bind(i64(s * self.bundles) + bundle) for s in range(bl.streams)]
                self.block = [b.bind(tirx.min(i, i64(self.blocks - 1))) for i in self.index]
                shape = (bl.streams, bl.m_tile, rows)
                self.sums = b.sblock_alloc_buffer(shape, "float32", align=64)
                self.fours = b.sblock_alloc_buffer(shape, "int32", align=64)
                self._clear()
                self._prefetch_header()
                if xf is not None:
                    self._prefetch_sparse()
                self._products(xq, minus)
                extra = None if xf is None else self._sparse(xf)
                self._store(xs, minus, extra, *epilogue)

    def _prefetch_header(self) -> None:
        """Ask for what lies as far behind headers as word rows ask for what follows them."""
        for block in self.block if self.blocking.ahead else ():
            header = self.views.header(block)
            if header is not None:
                place, nbytes = header
                first = place.start + i64(self.blocking.ahead)
                prefetch(place.buffer, first, nbytes, place.lead)

    def _each(self) -> list[tuple[int, int]]:
        """(stream, row of the tile)"""
        bl = self.blocking
        return [(s, i) for s in range(bl.streams) for i in range(bl.m_tile)]

    def _clear(self) -> None:
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        for s, i in self._each():
            for buffer, name in ((self.sums, "sums"), (self.fours, "fours")):
                with b.vectorized(0, self.layout.rows) as r0, b.sblock(f"clear_{name}{s}_{i}"):
                    r = b.axis.spatial(self.layout.rows, r0)
                    put(buffer, [s, i, r], tirx.const(0, buffer.dtype))

    def _products(self, xq: Buffer, minus: Buffer) -> None:
        from tvm.tirx.script.builder import ir as b

        bl = self.blocking
        shape = (bl.streams, TRIPLE * bl.span)
        self.scale = b.sblock_alloc_buffer(shape, "float32", align=64)
        self.plus = b.sblock_alloc_buffer(shape, "int32", align=64)
        spans = self.triples // bl.span
        with each("span", spans) as span:
            self._super(span)
            with each("word", bl.span) as t:
                word = b.bind(span * i64(bl.span) + t)
                for s in range(bl.streams):
                    self._narrow(s, word, t, xq, minus)
                    if self.layout.one_stream:
                        self._wide(s, word, xq)
        if not self.layout.one_stream:
            groups = self.layout.wide_groups(self.spec.k)
            with each("wide_group", groups) as group:
                for s in range(bl.streams):
                    self._wide(s, group, xq)

    def _super(self, span: Expr) -> None:
        """Second-order scales of a span, as wide as its length allows."""
        from tvm.tirx.script.builder import ir as b

        count = TRIPLE * self.blocking.span
        lanes = max(n for n in (16, 8, 4, 1) if count % n == 0)
        for s in range(self.blocking.streams):
            block, views = self.block[s], self.views
            sources = (
                ("super_scales", views.super_scale, self.scale),
                ("super_zeros", views.super_zero, self.plus),
            )
            for name, source, target in sources:
                loops = (b.serial(0, count // lanes), b.vectorized(0, lanes))
                with loops[0] as c, loops[1] as e, b.sblock(f"{name}{s}"):
                    at = b.axis.spatial(count, c * lanes + e)
                    put(target, [s, at], source(block, span * count + at))

    def _narrow(self, s: int, word: Expr, t: Expr, xq: Buffer, minus: Buffer) -> None:
        place = self.layout.narrow_place(TRIPLE * word)
        views = (
            _view(self.views.narrow(self.block[s], word)),
            _View(xq, (self.first, place * GROUP)),
            _View(minus, (self.first, place)),
            _View(self.scale, (i64(s), t * i64(TRIPLE))),
            _View(self.plus, (i64(s), t * i64(TRIPLE))),
            _View(self.sums, (i64(s), i64(0), i64(0))),
        )
        meaning = narrow_dot(self.layout.rows, self.blocking.m_tile)
        product(meaning, f"narrow{s}", lambda: views)

    def _wide(self, s: int, group: Expr, xq: Buffer) -> None:
        place = self.layout.wide_place(group, self.spec.k)
        views = (
            _view(self.views.wide(self.block[s], group)),
            _View(xq, (self.first, place * GROUP)),
            _View(self.fours, (i64(s), i64(0), i64(0))),
        )
        product(wide_dot(self.layout.rows, self.blocking.m_tile), f"wide{s}", lambda: views)

    def _prefetch_sparse(self) -> None:
        """Ask for the outliers of these rows while the dense part is computed.

        As many cache lines as a block has on average, and one more for its neighbours' share.
        """
        from tvm.tirx.script.builder import ir as b

        arrays, rows = self.arrays, self.layout.rows
        lines = _LINE + 2 * int(arrays["outliers"].shape[0]) // self.blocks
        for s in range(self.blocking.streams):
            with b.sblock(f"prefetch{s}"):
                b.reads()
                b.writes()
                first = self.block[s] * i64(rows)
                begin = b.bind(arrays["row_start"][first].astype("int64"))
                prefetch(arrays["row_start"], first + i64(rows), _LINE)
                for name in ("columns", "outliers"):
                    prefetch(arrays[name], begin, lines)

    def _sparse(self, xf: Buffer) -> Buffer:
        """Σ outlier x of every row of the weights; past N there are none."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, rows = self.blocking, self.layout.rows
        extra = b.sblock_alloc_buffer((bl.streams, bl.m_tile, rows), "float32", align=64)
        run = b.sblock_alloc_buffer((bl.m_tile,), "float32", align=64)
        start, columns = self.arrays["row_start"], self.arrays["columns"]
        values = self.arrays["outliers"]
        for s in range(bl.streams):
            with each(f"sparse{s}", rows) as r:
                row = b.bind(self.block[s] * i64(rows) + r)
                for i in range(bl.m_tile):
                    b.buffer_store(run, tirx.const(0.0, "float32"), [i])
                begin = start[row].astype("int64")
                with b.serial(0, start[row + 1].astype("int64") - begin) as p0:
                    p = p0 + begin
                    value = values[p].astype("float32")
                    for i in range(bl.m_tile):
                        x = xf[self.first + i64(i), columns[p].astype("int64")]
                        b.buffer_store(run, run[i] + value * x, [i])
                for i in range(bl.m_tile):
                    b.buffer_store(extra, run[i], [s, i, r])
        return extra

    def _store(
        self,
        xs: Buffer,
        minus: Buffer,
        extra: Buffer | None,
        bias: Buffer | None,
        residual: Buffer | None,
        y: Buffer,
    ) -> None:
        """The epilogue of every sum inside [M, N]."""
        from tvm.tirx.script.builder import ir as b

        n, rows, last = self.spec.n, self.layout.rows, self.layout.places(self.spec.k)

        def value(s: int, i: int, r: Expr) -> tuple[Expr, list[Expr]]:
            row, block = self.first + i64(i), self.block[s]
            four = self.fours[s, i, r] + self.views.zero(block, r) * minus[row, last]
            total = self.views.scale(block, r) * four.astype("float32")
            total = (self.sums[s, i, r] + total) * xs[row, 0]
            if extra is not None:
                total = total + extra[s, i, r]
            at = [row, self.index[s] * i64(rows) + r]
            return epilogue_of(self.spec, total, bias, residual, *at), at

        for s, i in self._each():
            with b.sblock(f"store{s}_{i}"):
                b.reads()
                b.writes()
                inside = self.index[s] < i64(n // rows)
                with b.If(inside):
                    with b.Then(), b.vectorized(0, rows) as r:
                        total, at = value(s, i, r)
                        b.buffer_store(y, total, at)
                    if n % rows:
                        with b.Else(), b.If(self.index[s] == i64(n // rows)), b.Then():
                            self._store_ragged(value, s, i, y)

    def _store_ragged(self, value: Any, s: int, i: int, y: Buffer) -> None:
        """Lane by lane, from copies: the sums themselves must keep constant indices."""
        from tvm.tirx.script.builder import ir as b

        rows = self.layout.rows
        kept = self.sums, self.fours
        copies = []
        for buffer in kept:
            copy = b.sblock_alloc_buffer(
                (self.blocking.streams, self.blocking.m_tile, rows), buffer.dtype, align=64
            )
            with b.vectorized(0, rows) as r:
                b.buffer_store(copy, buffer[s, i, r], [s, i, r])
            copies.append(copy)
        self.sums, self.fours = copies
        with b.serial(0, self.spec.n % rows) as r:
            total, at = value(s, i, r)
            b.buffer_store(y, total, at)
        self.sums, self.fours = kept


def prefetch(buffer: Buffer, first: Expr, nbytes: int, lead: tuple[Expr, ...] = ()) -> None:
    """Prefetch some bytes from an element on; a prefetch never faults, wherever it points.

    `lead` are the indices before the last one.
    """

    step = _LINE // np.dtype(str(buffer.dtype)).itemsize
    for line in range(-(-nbytes // _LINE)):
        prefetch_line(buffer[(*lead, first + i64(line * step))])


class _View(View):
    """Whose regions have int64 extents, whatever they start from."""

    def region(self, shape: tuple[int, ...]) -> Any:
        """All that an operand of `shape` covers."""
        return super().region(tuple(map(i64, shape)))


def _view(place: Place) -> _View:
    return _View(place.buffer, (*place.lead, place.start))

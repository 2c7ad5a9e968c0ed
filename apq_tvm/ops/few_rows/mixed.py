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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.mixed import MixedLayout
from apq_tvm.codegen.layouts.mixed_views import Place
from apq_tvm.formats.mixed import GROUP
from apq_tvm.ops.blocks import each, put
from apq_tvm.ops.few_rows.task import FewRows
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import Buffer, Expr, i64, prefetch_line
from apq_tvm.tensorize.meaning.mixed import TRIPLE, narrow_dot, wide_dot
from apq_tvm.tensorize.meaning.scaffold import View

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
    """

    m_tile: int = 1
    streams: int = 1
    span: int = 1
    ahead: int = 0


def mixed_linear(spec: LinearSpec, layout: MixedLayout, blocking: MixedBlocking) -> Any:
    """Linear layer with ``mixed24`` weights.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, 1], minus i32 [M, P + 1], [xf f32 [M, K],] *packed arrays,
        [bias], [residual], y)``, the first as `apq_tvm.ops.activations.mixed` makes them.
    """
    return _MixedLinear(spec, layout, blocking).build()


class _MixedLinear(FewRows):
    layout: MixedLayout

    def __init__(self, spec: LinearSpec, layout: MixedLayout, blocking: MixedBlocking) -> None:
        super().__init__(spec, layout, blocking.m_tile, blocking.streams)
        self.blocking, self.triples = blocking, layout.triples(spec.k)
        self.sparse = "outliers" in layout.shapes(spec.n, spec.k)

    def declare(self, operands: Operands) -> None:
        k = self.spec.k
        self.xq = operands.declare("xq", (self.m, self.layout.padded_k(k)), "int8")
        self.xs = operands.declare("xs", (self.m, 1), "float32")
        self.minus = operands.declare("minus", (self.m, self.layout.places(k) + 1), "int32")
        if self.sparse:
            self.xf = operands.declare("xf", (self.m, k), "float32")

    def products(self) -> None:
        self.views = self.layout.views(self.arrays)
        self.blocks = [b.bind(self.block(i64(s))) for s in range(self.streams.count)]
        self.fours = self.cleared("fours", "int32")
        self._prefetch_header()
        if self.sparse:
            self._prefetch_sparse()
        self._dense()
        if self.sparse:
            self._sparse()

    def _prefetch_header(self) -> None:
        """Ask for what lies as far behind headers as word rows ask for what follows them."""
        for block in self.blocks if self.blocking.ahead else ():
            header = self.views.header(block)
            if header is not None:
                place, nbytes = header
                first = place.start + i64(self.blocking.ahead)
                prefetch(place.buffer, first, nbytes, place.lead)

    def _dense(self) -> None:
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
                    self._narrow(s, word, t)
                    if self.layout.one_stream:
                        self._wide(s, word)
        if not self.layout.one_stream:
            groups = self.layout.wide_groups(self.spec.k)
            with each("wide_group", groups) as group:
                for s in range(bl.streams):
                    self._wide(s, group)

    def _super(self, span: Expr) -> None:
        """Second-order scales of a span, as wide as its length allows."""
        count = TRIPLE * self.blocking.span
        lanes = max(n for n in (16, 8, 4, 1) if count % n == 0)
        for s in range(self.blocking.streams):
            block, views = self.blocks[s], self.views
            sources = (
                ("super_scales", views.super_scale, self.scale),
                ("super_zeros", views.super_zero, self.plus),
            )
            for name, source, target in sources:
                loops = (b.serial(0, count // lanes), b.vectorized(0, lanes))
                with loops[0] as c, loops[1] as e, b.sblock(f"{name}{s}"):
                    at = b.axis.spatial(count, c * lanes + e)
                    put(target, [s, at], source(block, span * count + at))

    def _narrow(self, s: int, word: Expr, t: Expr) -> None:
        place = self.layout.narrow_place(TRIPLE * word)
        views = (
            _view(self.views.narrow(self.blocks[s], word)),
            _View(self.xq, (self.row, place * GROUP)),
            _View(self.minus, (self.row, place)),
            _View(self.scale, (i64(s), t * i64(TRIPLE))),
            _View(self.plus, (i64(s), t * i64(TRIPLE))),
            _View(self.sums, (i64(s), i64(0), i64(0))),
        )
        meaning = narrow_dot(self.layout.rows, self.blocking.m_tile)
        self.product(meaning, views, f"narrow{s}")

    def _wide(self, s: int, group: Expr) -> None:
        place = self.layout.wide_place(group, self.spec.k)
        views = (
            _view(self.views.wide(self.blocks[s], group)),
            _View(self.xq, (self.row, place * GROUP)),
            _View(self.fours, (i64(s), i64(0), i64(0))),
        )
        self.product(wide_dot(self.layout.rows, self.m_tile), views, f"wide{s}")

    def _prefetch_sparse(self) -> None:
        """Ask for the outliers of these rows while the dense part is computed.

        As many cache lines as a block has on average, and one more for its neighbours' share.
        """
        arrays, rows = self.arrays, self.layout.rows
        lines = _LINE + 2 * int(arrays["outliers"].shape[0]) // self.streams.blocks
        for s in range(self.blocking.streams):
            with b.sblock(f"prefetch{s}"):
                b.reads()
                b.writes()
                first = self.blocks[s] * i64(rows)
                begin = b.bind(arrays["row_start"][first].astype("int64"))
                prefetch(arrays["row_start"], first + i64(rows), _LINE)
                for name in ("columns", "outliers"):
                    prefetch(arrays[name], begin, lines)

    def _sparse(self) -> None:
        """Σ outlier x of every row of the weights; past N there are none."""
        bl, rows = self.blocking, self.layout.rows
        self.extra = b.sblock_alloc_buffer(self.shape, "float32", align=64)
        run = b.sblock_alloc_buffer((bl.m_tile,), "float32", align=64)
        start, columns = self.arrays["row_start"], self.arrays["columns"]
        values = self.arrays["outliers"]
        for s in range(bl.streams):
            with each(f"sparse{s}", rows) as r:
                row = b.bind(self.blocks[s] * i64(rows) + r)
                for i in range(bl.m_tile):
                    b.buffer_store(run, tirx.const(0.0, "float32"), [i])
                begin = start[row].astype("int64")
                with b.serial(0, start[row + 1].astype("int64") - begin) as p0:
                    p = p0 + begin
                    value = values[p].astype("float32")
                    for i in range(bl.m_tile):
                        x = self.xf[self.row + i64(i), columns[p].astype("int64")]
                        b.buffer_store(run, run[i] + value * x, [i])
                for i in range(bl.m_tile):
                    b.buffer_store(self.extra, run[i], [s, i, r])

    def kept(self) -> list[Buffer]:
        return [self.sums, self.fours, *([self.extra] if self.sparse else [])]

    def value(self, kept: Sequence[Buffer], s: Expr, m: Expr, r: Expr) -> Expr:
        sums, fours, *extra = kept
        row, block, last = self.row + m, self.block(s), self.layout.places(self.spec.k)
        four = fours[s, m, r] + self.views.zero(block, r) * self.minus[row, last]
        total = self.views.scale(block, r) * four.astype("float32")
        total = (sums[s, m, r] + total) * self.xs[row, 0]
        return total + extra[0][s, m, r] if extra else total


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

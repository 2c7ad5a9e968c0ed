"""``mixed24`` layers for many rows of x: every group of 16 as bytes less its zero point.

Groups of the panel are in the order of x, which is not permuted: a group is looked for where the
layout's ``permutation`` put it. Outliers are multiplied with x itself, tile by tile, before the
epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import MixedLayout
from apq_tvm.formats.mixed import GROUP
from apq_tvm.ops.blocks import argument, put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.panels import PanelFormat, PanelGemm
from apq_tvm.ops.many_rows.task import GemmBlocking, around
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.decoded_formats import offset_unit
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.mixed import TRIPLE, sub_scale, sub_zero
from apq_tvm.tensorize.meaning.scaffold import View

Arrays = Any

LARGEST = 15
"""Of a code less its zero point."""


class MixedPanel(PanelFormat):
    """2-bit and 4-bit groups side by side; both have the shape of a plane."""

    def __init__(self, layout: MixedLayout, k: int) -> None:
        weights = CentredGroups(-(-k // UNIT_K) * UNIT_K, GROUP, LARGEST)
        super().__init__(layout, weights, offset_unit(False), offset_unit(True))

    def place(self, arrays: Arrays, group: Expr) -> tuple[Expr, Expr, Expr]:
        """Whether a group has 4 bits, its word row, and which of three it is if it has 2."""
        permutation = arrays["permutation"]
        # K may be padded to one more group, whose activations are 0.
        at = tirx.min(group, permutation.shape[0] - 1)
        place = permutation[at].astype("int64")
        return place % 4 == 3, place // 4, tirx.min(place % 4, 2)

    def words(self, arrays: Arrays, block: Expr, part: Expr, group: Expr) -> Expr:
        """uint16x4: zeros and sub-scales of 4 rows and the group's triple.

        Loaded at once: loops over rows become vectors, whose lanes are to be next to each other.
        """
        _, of, _ = self.place(arrays, group)
        return self.layout.views(arrays).words(block, of, part * 4, 4)

    def codes(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, wide: bool) -> View:
        """Bytes of 4 rows of a group that is known to have 4 bits, or 2."""
        _, of, j = self.place(arrays, group)
        views = self.layout.views(arrays)
        place = views.wide(block, of) if wide else views.narrow(block, of)
        first = place.start if wide else place.start + j * (4 * self.layout.rows)
        return View(place.buffer, (*place.lead, first + part * 16))

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        raise NotImplementedError("the GEMM asks for codes of either kind")

    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        raise NotImplementedError("the GEMM has a row's bits and scale at hand: `factor_of`")

    def factor_of(self, arrays: Arrays, block: Expr, group: Expr, word: Expr, four: Expr) -> Expr:
        """`factor` of a row with these zeros and sub-scales, and scale of 4-bit groups."""
        wide, of, j = self.place(arrays, group)
        views = self.layout.views(arrays)
        level = sub_scale(word, j) + views.super_zero(block, of * TRIPLE + j)
        narrow = views.super_scale(block, of * TRIPLE + j) * level.astype("float32")
        return tirx.Select(wide, four, narrow)

    def gemm(self, spec: LinearSpec, blocking: GemmBlocking, tuning: CentredTuning) -> PrimFunc:
        """As of other formats; where there are outliers, x itself (``xf``) follows ``xsum``."""
        return _MixedGemm(spec, self, blocking, tuning).build()


class _MixedGemm(PanelGemm):
    def declare_more(self) -> None:
        self.sparse = "outliers" in self.shapes()
        if self.sparse:
            self.xf = argument("xf", (self.m, self.spec.k), "float32", 4)

    def scratch(self) -> None:
        super().scratch()
        # Zeros and sub-scales of the K block: scales are made after codes are decoded.
        shape = (self.per_block, self.blocking.vectors, 4)
        self.words = b.sblock_alloc_buffer(shape, "uint16", align=16)

    def unpack_plane(self, at: Expr, u: Expr, j: Expr, plane: int) -> None:
        panel, arrays = self.format, self.weights
        block, part = self.place(j)
        words, lanes = self.words, tirx.Ramp(i64(0), i64(1), 4)
        b.buffer_store(words, panel.words(arrays, block, part, at), [u, j, lanes])
        wide, _, tile = panel.place(arrays, at)
        with b.If(wide):
            with b.Then():
                zero = panel.layout.views(arrays).zero
                self._decode(at, u, j, lambda r: zero(block, part * 4 + r), True)
            with b.Else():
                self._decode(at, u, j, lambda r: sub_zero(words[u, j, r], tile), False)

    def _decode(self, at: Expr, u: Expr, j: Expr, zero: Callable[[Expr], Expr], wide: bool) -> None:
        """Decode a group of 4 rows, whose zero points are `zero`."""
        zeros = b.sblock_alloc_buffer((4,), "uint8", align=16)
        with self.stage(f"zeros{int(wide)}", 4) as (r,):
            put(zeros, (r,), zero(r).astype("uint8"))
        codes = self.format.codes(self.weights, *self.place(j), at, wide)
        sources = codes, View(zeros, (0,))
        self.decode(self.format.units[wide], sources, u, j, f"unpack{int(wide)}")

    def spread(self, name: str, target: Buffer, start: int, mine: Any, first: Expr) -> None:
        vectors, views = self.blocking.vectors, self.format.layout.views(self.weights)
        self.fours = b.sblock_alloc_buffer((vectors, 4), "float32", align=64)
        with self.stage("fours", vectors, 4) as (j, r):
            block, part = self.place(j)
            put(self.fours, (j, r), views.scale(block, part * 4 + r))
        super().spread(name, target, start, mine, first)

    def make(self, name: str, g: Expr, first: Expr, j: Expr, r: Expr) -> Expr:
        word, block = self.words[g, j, r].astype("int32"), self.place(j)[0]
        return self.format.factor_of(self.weights, block, first + g, word, self.fours[j, r])

    def add_to_results(self, results: Buffer, place: Callable[[Any, Expr], list[Expr]]) -> None:
        """Outliers times x, row of weights by row."""
        if not self.sparse:
            return
        bl, arrays = self.blocking, self.weights
        run = b.sblock_alloc_buffer((bl.m_tile,), "float32", align=64)
        start, columns = arrays["row_start"], arrays["columns"]
        with around("outliers", (4 * bl.vectors, 4 * bl.vectors)) as (n,):
            # Past the last row block there are no starts; what is computed there is not stored.
            row = b.bind(tirx.min(self.panel * i64(4) + n, i64(self.spec.n - 1)))
            for m in range(bl.m_tile):
                b.buffer_store(run, tirx.const(0.0, "float32"), [m])
            begin = start[row].astype("int64")
            with b.serial(0, start[row + 1].astype("int64") - begin) as p0:
                p = p0 + begin
                value = arrays["outliers"][p].astype("float32")
                for m in range(bl.m_tile):
                    of_x = tirx.min(self.row + i64(m), self.m - i64(1))
                    x = self.xf[of_x, columns[p].astype("int64")]
                    b.buffer_store(run, run[m] + value * x, [m])
            for m in range(bl.m_tile):
                at = place(m, n)
                b.buffer_store(results, results[tuple(at)] + run[m], at)

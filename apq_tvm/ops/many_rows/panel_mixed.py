"""``mixed24`` layers for many rows of x: every group of 16 as bytes less its zero point.

Groups of the panel are in the order of x, which is not permuted: a group is looked for where the
layout's ``permutation`` put it. Outliers are multiplied with x itself, tile by tile, before the
epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import MixedLayout
from apq_tvm.formats.mixed import GROUP
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.panel_formats import stretch
from apq_tvm.ops.many_rows.panels import PanelFormat, PanelGemm
from apq_tvm.ops.many_rows.task import GemmBlocking, argument
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.decoded import Source, decode_loops
from apq_tvm.tensorize.meaning.decoded_formats import OffsetUnit
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.mixed import TRIPLE, sub_scale, sub_zero

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any
Arrays = Any

LARGEST = 15
"""Of a code less its zero point."""


class MixedPanel(PanelFormat):
    """2-bit and 4-bit groups side by side; both have the shape of a plane."""

    def __init__(self, layout: MixedLayout, k: int) -> None:
        self.layout: Any = layout
        self.units = (OffsetUnit(False), OffsetUnit(True))
        self.weights = CentredGroups(-(-k // UNIT_K) * UNIT_K, GROUP, LARGEST)

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

    def codes(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, wide: bool) -> Source:
        """Bytes of 4 rows of a group that is known to have 4 bits, or 2."""
        _, of, j = self.place(arrays, group)
        views = self.layout.views(arrays)
        place = views.wide(block, of) if wide else views.narrow(block, of)
        first = place.start if wide else place.start + j * (4 * self.layout.rows)
        (size,), _, _ = self.units[wide].operands["codes"]
        return stretch(place.buffer, place.lead, size, first + part * 16)

    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
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


class _MixedGemm(PanelGemm):
    def __init__(
        self, spec: LinearSpec, panel: MixedPanel, blocking: GemmBlocking, tuning: CentredTuning
    ) -> None:
        super().__init__(spec, panel, blocking, tuning)
        self.mixed = panel
        self.sparse = "outliers" in self.shapes()

    def declare_more(self) -> None:
        if self.sparse:
            self.xf = argument("xf", (self.m, self.spec.k), "float32", 4)

    def scratch(self) -> None:
        super().scratch()
        # Zeros and sub-scales of the K block: scales are made after codes are decoded.
        shape = (self.per_block, self.blocking.vectors, 4)
        self.words = b.sblock_alloc_buffer(shape, "uint16", align=16)

    def _unpack(self, at: Expr, u: Expr, j: Expr, plane: int) -> None:
        panel, arrays = self.mixed, self.weights
        block, part = self._block(j), self._part(j)
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
            b.reads()
            b.writes(zeros[r])
            b.buffer_store(zeros, zero(r).astype("uint8"), [r])
        panel, unit = self.mixed, self.mixed.units[wide]
        steps, columns = unit.shape(self.pairs)[:2]

        def place(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
            return (u * steps + index[0], j * columns + index[1], *index[2:])

        codes = panel.codes(self.weights, self._block(j), self._part(j), at, wide)
        decode_loops(
            unit,
            self.pairs,
            {"codes": codes, "zeros": stretch(zeros, (), 4)},
            lambda *index: self.decoded[place(index)],
            lambda index, value: b.buffer_store(self.decoded, value, list(place(index))),
            f"unpack{int(wide)}",
        )

    def _spread_made(self, name: str, target: Buffer, start: int, mine: Any, first: Expr) -> None:
        vectors, views = self.blocking.vectors, self.mixed.layout.views(self.weights)
        self.fours = b.sblock_alloc_buffer((vectors, 4), "float32", align=64)
        with self.stage("fours", vectors, 4) as (j, r):
            b.reads()
            b.writes(self.fours[j, r])
            scale = views.scale(self._block(j), self._part(j) * 4 + r)
            b.buffer_store(self.fours, scale, [j, r])
        super()._spread_made(name, target, start, mine, first)

    def _make(
        self, name: str, first: Expr, where: tuple[Expr, ...], target: Buffer, at: list[Expr]
    ) -> None:
        g, j, r = where
        b.reads()
        b.writes(target[tuple(at)])
        word = self.words[g, j, r].astype("int32")
        four, block = self.fours[j, r], self._block(j)
        b.buffer_store(target, self.mixed.factor_of(self.weights, block, first + g, word, four), at)

    def add_to_results(self, results: Buffer, place: Callable[[Any, Expr], list[Expr]]) -> None:
        """Outliers times x, row of weights by row."""
        if not self.sparse:
            return
        bl, arrays = self.blocking, self.weights
        run = b.sblock_alloc_buffer((bl.m_tile,), "float32", align=64)
        start, columns = arrays["row_start"], arrays["columns"]
        with b.serial(0, 4 * bl.vectors) as n0, b.sblock("outliers"):
            n = b.axis.spatial(4 * bl.vectors, n0)
            b.reads()
            b.writes()
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


def mixed_gemm(
    spec: LinearSpec, panel: MixedPanel, blocking: GemmBlocking, tuning: CentredTuning
) -> PrimFunc:
    """Linear layer with ``mixed24`` weights, as `apq_tvm.ops.many_rows.panels.panel_gemm`.

    Where there are outliers, x itself (``xf`` float32 [M, K]) follows ``xsum``.
    """
    return _MixedGemm(spec, panel, blocking, tuning).build()

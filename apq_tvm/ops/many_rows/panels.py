"""Large-M linear layers with int8 activations, on weights of formats that decode to int8.

The GEMM is that of `apq_tvm.ops.many_rows.centred`. A format says how a unit becomes bytes of the
panel, by an intrinsic of `apq_tvm.tensorize.meaning.decoded`, and what each group's sum is
multiplied by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred import CentredGemm
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.decoded import DecodedUnit, Source, decode_loops

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any
Arrays = Any


class PanelFormat(ABC):
    """How a layer's weights become panels.

    Attributes
    ----------
    layout : WeightLayout
    units : tuple of DecodedUnit
        For every plane, of one shape.
    weights : CentredGroups
    minima : bool
        Whether groups have a `minimum`.
    """

    minima = False
    layout: Any
    units: tuple[DecodedUnit, ...]
    weights: CentredGroups

    @abstractmethod
    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> dict[str, Source]:
        """What unit `u` along K of a row block is decoded from, its 4 rows `part` and following."""

    @abstractmethod
    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        """float32: the scale of row `r` 0..3 of the row block's 4 rows `part`.

        Planes of a group count as groups that follow each other.
        """

    def minimum(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        """float32: what is taken off the weights of a group besides."""
        raise NotImplementedError


class PanelGemm(CentredGemm):
    """A panel is some row blocks of the layout."""

    def __init__(
        self, spec: LinearSpec, panel: PanelFormat, blocking: GemmBlocking, tuning: CentredTuning
    ) -> None:
        self.minima = panel.minima
        super().__init__(spec, panel.weights, blocking, tuning)
        self.format = panel
        self.per_unit, self.per_row_block = panel.units[0].vectors, panel.layout.rows // 4
        assert blocking.vectors % self.per_unit == 0

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return dict(self.format.layout.shapes(self.spec.n, self.spec.k))

    def row_block(self, j: Expr) -> Expr:
        """4 rows of W; past the last ones there may be some that are computed, but not stored."""
        return self.panel + j

    def stored(self, j: Expr) -> Expr:
        return self.row_block(j) < i64(self.row_blocks)

    def _block(self, j: Expr) -> Expr:
        """Row block of the layout that the panel's vector j is of."""
        last = self.format.layout.row_blocks(self.spec.n) - 1
        return tirx.min((self.panel + j) // i64(self.per_row_block), i64(last))

    def _part(self, j: Expr) -> Expr:
        """Which vector of its row block the panel's vector j is."""
        if self.per_row_block == 1:
            return tirx.const(0, "int32")
        return (self.panel + j) % i64(self.per_row_block)

    def unpack(self, kb: Expr) -> None:
        bl, (unit, *_) = self.blocking, self.format.units
        per_block, blocks = bl.k_block // unit.k, bl.vectors // unit.vectors
        mine = self.count(per_block, -(-self.k // unit.k), kb)
        with b.grid(mine, blocks) as (u0, j0), b.sblock("unit"):
            u, j = b.axis.spatial(per_block, u0), b.axis.spatial(blocks, j0)
            b.reads()
            b.writes()
            for plane in range(self.planes):
                self._unpack(kb * per_block + u, u, j, plane)

    def _unpack(self, at: Expr, u: Expr, j: Expr, plane: int) -> None:
        """Decode a plane of unit `at` of the panel's j-th stretch of rows."""
        unit = self.format.units[plane]
        steps, columns = unit.shape(self.pairs)[:2]
        first = u * steps
        if self.planes > 1:
            per_group = self.group // unit.k
            group = u // per_group * self.planes + plane
            first = (group * per_group + u % per_group) * steps
        vector = j * unit.vectors
        block, part = self._block(vector), self._part(vector)

        def place(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
            return (first + index[0], j * columns + index[1], *index[2:])

        decode_loops(
            unit,
            self.pairs,
            self.format.sources(self.weights, block, part, at),
            lambda *index: self.decoded[place(index)],
            lambda index, value: b.buffer_store(self.decoded, value, list(place(index))),
            f"unpack{plane}",
        )

    def spread_scales(self, mine: Any, first: Expr) -> None:
        self._spread_made("scales", self.scales, self.origins, mine, first)
        if self.minima:
            planes = self.planes
            self._spread_made("least", self.least, 0, mine // planes, first // planes)

    def _spread_made(self, name: str, target: Buffer, start: int, mine: Any, first: Expr) -> None:
        """Factors or minima of groups in the order of the sums, from row `start` on."""
        vectors = self.blocking.vectors
        if not self.pairs:
            with self.stage(name, mine, vectors, 4) as (g, j, r):
                self._make(name, first, (g, j, r), target, [start + g * self.stride + j, r])
            return
        made = b.sblock_alloc_buffer((self.per_block, vectors, 4), "float32", align=64)
        with self.stage(f"{name}_made", mine, vectors, 4) as (g, j, r):
            self._make(name, first, (g, j, r), made, [g, j, r])
        self.spread(name, target, start, mine, first, made)

    def _make(
        self, name: str, first: Expr, where: tuple[Expr, ...], target: Buffer, at: list[Expr]
    ) -> None:
        g, j, r = where
        make = self.format.factor if name == "scales" else self.format.minimum
        b.reads()
        b.writes(target[tuple(at)])
        value = make(self.weights, self._block(j), self._part(j), first + g, r)
        b.buffer_store(target, value, at)


def panel_gemm(
    spec: LinearSpec, panel: PanelFormat, blocking: GemmBlocking, tuning: CentredTuning
) -> PrimFunc:
    """Linear layer with int8 activations.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    panel : PanelFormat
    blocking : GemmBlocking
        `vectors` is a multiple of those of a unit, `k_block` of its columns.
    tuning : CentredTuning

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq, xs, xsum, *packed arrays, [bias], [residual], y)``, with activations as
        `apq_tvm.ops.activations.rows` gives them, M >= m_tile - 1 (pairs) or M >= 1.
    """
    return PanelGemm(spec, panel, blocking, tuning).build()

"""Large-M linear layers with int8 activations, on weights of formats that decode to int8.

The GEMM is that of `apq_tvm.ops.many_rows.centred`. A format says how a unit becomes bytes of the
panel, by an intrinsic of `apq_tvm.tensorize.meaning.decoded`, and what each group's sum is
multiplied by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.ops.blocks import put
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred import CentredGemm
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.task import GemmBlocking, around
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.centred import spreading
from apq_tvm.tensorize.meaning.decoded import DecodedUnit, decode_loops
from apq_tvm.tensorize.meaning.scaffold import View, product

Arrays = Any


class PanelFormat(ABC):
    """How a layer's weights become panels.

    Parameters
    ----------
    layout : WeightLayout
    weights : CentredGroups
    units : tuple of DecodedUnit
        For every plane, of one shape.
    """

    minima = False
    """Whether groups have a `minimum`."""

    wide_zeros = False
    """Whether groups have zero points that are not in the panel (`CentredGemm`)."""

    def __init__(self, layout: Any, weights: CentredGroups, *units: DecodedUnit) -> None:
        self.layout, self.weights, self.units = layout, weights, units

    @property
    def spread(self) -> Mapping[str, str]:
        """What values of groups that are spread over pairs (blocks ``spread_...``) are made of."""
        return dict.fromkeys(("scales", "least") if self.minima else ("scales",), "float32")

    @abstractmethod
    def sources(self, arrays: Arrays, block: Expr, part: Expr, u: Expr) -> Sequence[View]:
        """What unit `u` along K of a row block is decoded from, its 4 rows `part` and following."""

    @abstractmethod
    def factor(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        """float32: the scale of row `r` 0..3 of the row block's 4 rows `part`.

        Planes of a group count as groups that follow each other.
        """

    def minimum(self, arrays: Arrays, block: Expr, part: Expr, group: Expr, r: Expr) -> Expr:
        """float32: what is taken off the weights of a group besides."""
        raise NotImplementedError

    def gemm(self, spec: LinearSpec, blocking: GemmBlocking, tuning: CentredTuning) -> PrimFunc:
        """Linear layer with int8 activations.

        Parameters
        ----------
        spec : LinearSpec
            With integer activations.
        blocking : GemmBlocking
            `vectors` is a multiple of those of a unit, `k_block` of its columns; `m_tile` is even
            for pairs, 4 for lanes.
        tuning : CentredTuning

        Returns
        -------
        tvm.tirx.PrimFunc
            ``(xq, xs, xsum, *packed arrays, [bias], [residual], y)``, with activations as
            `apq_tvm.ops.activations.rows` gives them, M >= m_tile - 1 (pairs) or M >= 1.
        """
        return PanelGemm(spec, self, blocking, tuning).build()


class PanelGemm(CentredGemm):
    """A panel is some row blocks of the layout."""

    def __init__(
        self, spec: LinearSpec, panel: Any, blocking: GemmBlocking, tuning: CentredTuning
    ) -> None:
        self.minima, self.wide_zeros = panel.minima, panel.wide_zeros
        super().__init__(spec, panel.weights, blocking, tuning)
        self.format: Any = panel
        self.per_unit, self.per_row_block = panel.units[0].vectors, panel.layout.rows // 4
        assert blocking.vectors % self.per_unit == 0

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return dict(self.format.layout.shapes(self.spec.n, self.spec.k))

    def row_block(self, j: Expr) -> Expr:
        """4 rows of W; past the last ones there may be some that are computed, but not stored."""
        return self.panel + j

    def stored(self, j: Expr) -> Expr:
        return self.row_block(j) < i64(self.row_blocks)

    def place(self, j: Expr) -> tuple[Expr, Expr]:
        """Row block of the layout that the panel's vector j is of, and which of its vectors."""
        last = self.format.layout.row_blocks(self.spec.n) - 1
        block = tirx.min((self.panel + j) // i64(self.per_row_block), i64(last))
        if self.per_row_block == 1:
            return block, tirx.const(0, "int32")
        return block, (self.panel + j) % i64(self.per_row_block)

    def unpack(self, kb: Expr) -> None:
        bl, (unit, *_) = self.blocking, self.format.units
        per_block, blocks = bl.k_block // unit.k, bl.vectors // unit.vectors
        mine = self.count(per_block, -(-self.k // unit.k), kb)
        with around("unit", (mine, per_block), (blocks, blocks)) as (u, j):
            for plane in range(self.planes):
                self.unpack_plane(kb * per_block + u, u, j, plane)

    def unpack_plane(self, at: Expr, u: Expr, j: Expr, plane: int) -> None:
        """Decode a plane of unit `at` of the panel's j-th stretch of rows."""
        unit, group = self.format.units[plane], u
        if self.planes > 1:
            per_group = self.group // unit.k
            group = (u // per_group * self.planes + plane) * per_group + u % per_group
        sources = self.format.sources(self.weights, *self.place(j * unit.vectors), at)
        self.decode(unit, sources, group, j, f"unpack{plane}")

    def decode(
        self, unit: DecodedUnit, sources: Sequence[View], u: Expr, j: Expr, name: str
    ) -> None:
        """Decode a unit to its place in the panel."""
        steps, columns = unit.shape(self.pairs)[:2]
        out = View(self.decoded, (u * steps, j * columns, 0, 0))
        decode_loops(unit, self.pairs, (*sources, out), name)

    def four(self, name: str, j: Expr, group: Expr) -> View | None:
        """A group's values of the panel's vector j, if they lie in the weights as they are."""
        return None

    def make(self, name: str, g: Expr, first: Expr, j: Expr, r: Expr) -> Expr:
        """A value of group ``first + g`` of row r of the panel's vector j."""
        make = self.format.factor if name == "scales" else self.format.minimum
        return make(self.weights, *self.place(j), first + g, r)

    def spread(self, name: str, target: Buffer, start: int, mine: Any, first: Expr) -> None:
        vectors, stride, made = self.blocking.vectors, self.stride, None
        if not self.pairs:
            with self.stage(name, mine, vectors, 4) as (g, j, r):
                at = start + g * stride + j, r
                if four := self.four(name, j, first + g):
                    value = four.buffer[four.at(1, (r,))]
                    put(target, at, value.astype(target.dtype), value)
                else:
                    put(target, at, self.make(name, g, first, j, r))
            return
        if self.four(name, i64(0), first) is None:
            made = b.sblock_alloc_buffer((self.per_block, vectors, 4), "float32", align=64)
            with self.stage(f"{name}_made", mine, vectors, 4) as (g, j, r):
                put(made, (g, j, r), self.make(name, g, first, j, r))
        with around(f"{name}_of", (mine, self.per_block), (vectors, vectors)) as (g, j):
            four = self.four(name, j, first + g) or View(made, (g, j, 0))
            views = four, View(target, (start + g * stride + j * 2, 0))
            product(spreading(self.format.spread[name]), f"spread_{name}", lambda: views)

"""Large-M linear layers of uniform integers, decoded to centred int8 once a panel."""

from __future__ import annotations

from typing import Any

from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.spec import LinearSpec
from apq_tvm.ops.many_rows.centred import CentredGemm
from apq_tvm.ops.many_rows.centred_groups import CentredGroups, CentredTuning
from apq_tvm.ops.many_rows.task import GemmBlocking
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.centred import largest_byte, unpack_loops
from apq_tvm.tensorize.meaning.interleaved import HALF

PrimFunc = Any  # tvm is untyped
Expr = Any


def integer_groups(layout: InterleavedLayout, k: int) -> CentredGroups:
    """Groups and the largest byte of uniform integers, whose columns are padded."""
    wide = layout.bits == 8 and layout.zero_points
    largest = 255 if wide else largest_byte(layout.bits, layout.zero_points)
    return CentredGroups(layout.padded_k(k), layout.group_width(k), largest)


class _IntegerGemm(CentredGemm):
    """Of uniform integers, whose zero points but those of 8 bits are in the panel."""

    def __init__(
        self,
        spec: LinearSpec,
        layout: InterleavedLayout,
        blocking: GemmBlocking,
        tuning: CentredTuning,
    ) -> None:
        assert layout.rows == 4 or layout.run == 8
        self.layout = layout
        self.unit = layout.unit if layout.rows == 4 else layout.half_unit
        self.wide_zeros = layout.zero_points and layout.bits == 8
        super().__init__(spec, integer_groups(layout, spec.k), blocking, tuning)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.layout.shapes(self.spec.n, self.spec.k)

    def of_rows(self, name: str, j: Expr, group: Expr, r: Expr) -> Expr:
        if not self.unit.half:
            return super().of_rows(name, j, group, r)
        block = self.row_block(j)
        return self.weights[name][block // i64(2), group, block % i64(2) * i64(4) + r]

    def unpack(self, kb: Expr) -> None:
        bl = self.blocking
        units = bl.k_block // UNIT_K
        mine = self.count(units, self.k // UNIT_K, kb)
        with b.grid(mine, bl.vectors) as (u0, j0), b.sblock("unit"):
            u, j = b.axis.spatial(units, u0), b.axis.spatial(bl.vectors, j0)
            b.reads()
            b.writes()
            self._unpack(kb, u, j)

    def _unpack(self, kb: Expr, u: Expr, j: Expr) -> None:
        codes, unit = self.weights["codes"], self.unit
        block, at = self.row_block(j), kb * (self.blocking.k_block // UNIT_K) + u
        start: Any = 0
        if unit.half:
            start, block = block % i64(2) * i64(HALF), block // i64(2)
        zero = None
        if self.layout.zero_points and not self.wide_zeros:
            per_unit, width = unit.groups, max(1, self.group // UNIT_K)

            def zero(index: tuple[Expr, ...]) -> Expr:
                group = at * per_unit + index[0] if per_unit > 1 else at // width
                return self.of_rows("zeros", j, group, index[-1])

        def place(index: tuple[Expr, ...]) -> tuple[Expr, ...]:
            if self.pairs:
                return (u * 4 + index[0], j * 2 + index[1], index[2], index[3])
            return (u * 8 + index[0], j, index[1], index[2])

        unpack_loops(
            unit,
            self.pairs,
            lambda byte: codes[block, at, start + byte],
            codes[block, at, start : start + unit.nbytes],
            zero,
            lambda index: self.decoded[place(index)],
            lambda index, value: b.buffer_store(self.decoded, value, list(place(index))),
        )


def centred_gemm(
    spec: LinearSpec,
    layout: InterleavedLayout,
    blocking: GemmBlocking,
    tuning: CentredTuning,
) -> PrimFunc:
    """Linear layer with int8 activations, as `apq_tvm.ops.linear.interleaved.packed_linear`.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : InterleavedLayout
        With blocks of 4 rows, or of 8 in runs of 8.
    blocking : GemmBlocking
        `m_tile` is even for pairs, 4 for lanes.
    tuning : CentredTuning

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq, xs, xsum, codes, scales, [zeros], [bias], [residual], y)``, with activations as
        `apq_tvm.ops.activations.rows` gives them, M >= m_tile - 1 (pairs) or M >= 1.
    """
    return _IntegerGemm(spec, layout, blocking, tuning).build()

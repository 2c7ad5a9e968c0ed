"""``y = act(x Wᵀ + b) + residual`` on packed integer weights with folded activations, unscheduled.

Two plain loop nests: scaled dot products of chunks (`apq_tvm.tensorize.pairs.folded_dot`) and the
store with its epilogue. Tiles of M and streams of row blocks are those of
`apq_tvm.ops.linear.nest`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.nest import Blocking, LinearNest
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.fold import Fold
from apq_tvm.tensorize.pairs.folded_dot import STARTS, FoldedDot, term

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any

CHUNK_UNITS = (4, 2, 1)
"""Units that a chunk may have. Sums of one are bounded by 4 units of W8: 128 * 128 * 127 < 2^22."""


def fold_of(layout: InterleavedLayout) -> Fold:
    """How the codes of `layout` meet activations."""
    return Fold(layout.unit, layout.zero_points)


def chunk_units(layout: InterleavedLayout, k: int) -> int:
    """Units of a chunk: as many as divide a group."""
    units = layout.group_width(k) // UNIT_K
    return next(c for c in CHUNK_UNITS if units % c == 0)


def folded_linear(
    spec: LinearSpec,
    layout: InterleavedLayout,
    m_tile: int = 1,
    streams: int = 1,
    copies: int = 1,
    neighbours: bool = False,
) -> PrimFunc:
    """Linear layer with int8 activations prepared by `apq_tvm.ops.activations.fold`.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations and groups of whole units.
    layout : InterleavedLayout
    m_tile, streams : int
        As for `apq_tvm.ops.linear.interleaved.packed_linear`.
    copies : int
        Of what a chunk starts from: 1, or one for each stream. LLVM loads one only once and copies
        it between registers, which costs cores an operation that loads are cheaper than.
    neighbours : bool
        True if streams read row blocks side by side, which one intrinsic may then have together; a
        stream of its own else reads consecutive ones.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], starts f32 [M, chunks, copies, 8], factors f32 [M, chunks, 4 or 8],
        codes, scales, [zeros], [bias], [residual], y)``, blocks ``dot`` and ``store``.
    """
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        fold, units = fold_of(layout), chunk_units(layout, spec.k)
        chunks = layout.padded_k(spec.k) // UNIT_K // units
        xq = operands.declare("xq", (operands.m, layout.padded_k(spec.k)), "int8")
        starts = operands.declare("starts", (operands.m, chunks, copies, STARTS), "float32")
        factors = operands.declare("factors", (operands.m, chunks, fold.factors), "float32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        whole = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
        blocking = Blocking(m_tile, streams, whole.bundles, 1, chunks, units)
        nest = (_Neighbours if neighbours else _Folded)(spec, layout, blocking, operands.m)
        sums = b.sblock_alloc_buffer(nest.sums_shape, "float32")
        nest.folded_dot(sums, FoldedDot(fold, m_tile, units), (xq, starts, factors), weights)
        nest.store(y, sums, None, bias, residual)
    return builder.get()


class _Folded(LinearNest):
    def folded_dot(
        self, sums: Buffer, dot: FoldedDot, x: tuple[Buffer, ...], weights: dict[str, Buffer]
    ) -> None:
        """Σ over chunks of the scaled products."""
        bl, unit = self.blocking, dot.fold.unit
        xq, starts, factors = x
        per_group = max(1, self.layout.group_width(self.spec.k) // UNIT_K // dot.units)
        codes = weights["codes"]
        reduced = [bl.spans, *dot.reduced]
        kinds = "S" * len(self.sums_shape) + "R" * len(reduced)
        with b.grid(*self.sums_shape, *map(i64, reduced)) as loops, b.sblock("dot"):
            axes = b.axis.remap(kinds, loops)
            target, (chunk, *inner, j, c) = list(axes[: -len(reduced)]), axes[-len(reduced) :]
            t, nb, s, *row_axis, r = target
            row, block = self._row(t, row_axis), self._block(nb, s)
            first = chunk * i64(UNIT_K * dot.units)
            base = chunk * i64(dot.units)
            at = base + inner[0] if inner else chunk
            whole = slice(base, base + i64(dot.units)) if inner else chunk
            group = chunk // i64(per_group) if bl.spans > per_group else i64(0)
            mine = [weights[n][block, group, r] for n in ("scales", "zeros") if n in weights]
            k0 = first + inner[0] * i64(UNIT_K) if inner else first
            b.reads(
                codes[block, whole, 0 : unit.nbytes],
                xq[row, first : first + i64(UNIT_K * dot.units)],
                starts[row, chunk, s if int(starts.shape[2]) > 1 else 0, 0:STARTS],
                factors[row, chunk, 0 : dot.fold.factors],
                *mine,
            )
            b.writes(sums[tuple(target)])
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            value = term(
                dot.fold,
                lambda byte: codes[block, at, byte],
                lambda k: xq[row, k0 + k],
                lambda i: factors[row, chunk, i],
                mine[0],
                mine[1] if dot.fold.zeros else None,
                (r, j, c),
            )
            b.buffer_store(sums, sums[tuple(target)] + value, target)


class _Neighbours(_Folded):
    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        return bundle * i64(self.blocking.streams) + stream

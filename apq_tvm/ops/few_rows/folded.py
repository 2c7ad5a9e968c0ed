"""``y = act(x Wᵀ + b) + residual`` on packed integer weights with folded activations, unscheduled.

Two plain loop nests: scaled dot products of chunks (`apq_tvm.tensorize.pairs.folded_dot`) and the
store with its epilogue. Tiles of M and streams of row blocks are those of
`apq_tvm.ops.linear.nest`. Sums of several rows of x in pairs (`apq_tvm.tensorize.pairs.paired_dot`)
are stored in the order of smmla, 2 rows of x by 2 rows of weights, and put in rows at the end
(block ``rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.ops.linear.nest import Blocking, LinearNest
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import Buffer, Expr, PrimFunc, i64
from apq_tvm.tensorize.meaning.interleaved import HALF
from apq_tvm.tensorize.meaning.scaffold import View, product
from apq_tvm.tensorize.meaning.spans.fold import Fold
from apq_tvm.tensorize.pairs.folded_dot import STARTS, FoldedDot

CHUNK_UNITS = (4, 2, 1)
"""Units that a chunk may have. Sums of one are bounded by 4 units of W8: 128 * 128 * 127 < 2^22."""


def fold_of(layout: InterleavedLayout) -> Fold:
    """How the codes of `layout` meet activations."""
    return Fold(layout.unit, layout.zero_points)


def chunk_units(layout: InterleavedLayout, k: int) -> int:
    """Units of a chunk: as many as divide a group."""
    units = layout.group_width(k) // UNIT_K
    return next(c for c in CHUNK_UNITS if units % c == 0)


def start_copies(dot: FoldedDot, streams: int, own: bool) -> int:
    """Copies of what a chunk starts from: one, or one for each vector of the sums of all streams.

    Of a dot by lane those of a stream share one.
    """
    return streams // dot.blocks * dot.copies if own else 1


def folded_linear(
    spec: LinearSpec,
    layout: InterleavedLayout,
    dot: FoldedDot,
    streams: int = 1,
    own: bool = False,
    neighbours: bool = False,
) -> PrimFunc:
    """Linear layer with int8 activations prepared by `apq_tvm.ops.activations.fold` or ``paired``.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations and groups of whole units.
    layout : InterleavedLayout
        Of 4 rows, or of 8 in runs of 8 that a dot of half units takes in two row blocks.
    dot : FoldedDot
        Of a chunk. M is ``dot.m`` at least, for pairs ``dot.m - 1``. Its row blocks, if several,
        are the streams.
    streams : int
        As for `apq_tvm.ops.linear.interleaved.packed_linear`.
    own : bool
        Whether there are several copies of what a chunk starts from (`start_copies`). LLVM loads
        one only once and copies it between registers, which costs cores an operation that loads are
        cheaper than.
    neighbours : bool
        True if streams read row blocks side by side, which one intrinsic may then have together; a
        stream of its own else reads consecutive ones.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], starts f32 [M, chunks, copies, 8], factors f32 [M, chunks, 4 or 8],
        [centres f32 [M, 1]], codes, scales, [zeros], [row_sums], [bias], [residual],
        y)``, blocks ``dot``, ``store`` and, for pairs, ``rows``. In the place of M pairs have
        ceil(M / 2).
    """
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        padded = layout.padded_k(spec.k)
        chunks = padded // UNIT_K // dot.units
        lead = tirx.Var("pairs", "int64") if dot.in_pairs else operands.m
        xq = operands.declare("xq", (lead, dot.x_bytes(padded)), "int8")
        copies = start_copies(dot, streams, own)
        starts = operands.declare("starts", (lead, chunks, copies, STARTS), "float32")
        factors = operands.declare("factors", (lead, chunks, dot.fold.factors), "float32")
        centres = (
            operands.declare("centres", (operands.m, 1), "float32") if spec.asymmetric else None
        )
        weights = operands.weights(layout)
        if dot.fold.unit.half:
            layout = replace(layout, rows=4)
        bias, residual, y = operands.epilogue()
        width = dot.units * UNIT_K
        blocking = Blocking.of(layout, spec.n, spec.k, dot.m, streams, width)
        nest = _Folded(spec, layout, blocking, operands.m, dot, neighbours)
        sums = nest.dot_products((xq, starts, factors), weights, own)
        if dot.in_pairs:
            sums = nest.in_rows(sums)
        centre = None if centres is None else (centres, 0, weights[ROW_SUMS])
        nest.store(y, sums, bias, residual, centre=centre)
    return builder.get()


class _Folded(LinearNest):
    def __init__(
        self,
        spec: LinearSpec,
        layout: InterleavedLayout,
        blocking: Blocking,
        m: Expr,
        dot: FoldedDot,
        neighbours: bool,
    ) -> None:
        super().__init__(spec, layout, blocking, m)
        self.dot, self.neighbours = dot, neighbours

    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        if self.neighbours:
            return bundle * i64(self.blocking.streams) + stream
        return super()._block_index(bundle, stream)

    def _pair(self, tile: Expr, inner: list[Expr]) -> Expr:
        """Pair of rows of x; the last tile ends at the last one."""
        pairs, mine = (self.m + i64(1)) // i64(2), i64(max(1, self.dot.m // 2))
        first = tirx.min(tile * mine, pairs - mine)
        return first + inner[0] if inner else first

    def _row(self, tile: Expr, inner: Sequence[Expr]) -> Expr:
        if not (inner and self.dot.in_pairs):
            return super()._row(tile, inner)
        pair = self._pair(tile, [inner[0] // i64(2)])
        return tirx.min(pair * i64(2), self.m - i64(2)) + inner[0] % i64(2)

    def dot_products(self, x: tuple[Buffer, ...], weights: dict[str, Buffer], own: bool) -> Buffer:
        """Σ over chunks of the scaled products."""
        dot, spans = self.dot, self.blocking.spans
        xq, starts, factors = x
        outer = self.sums_shape[: 2 if dot.beside else 3]
        sums = b.sblock_alloc_buffer([*outer, *map(i64, dot.spatial)], "float32")
        per_group = max(1, self.layout.group_width(self.spec.k) // UNIT_K // dot.units)
        scaling = [name for name in ("scales", "zeros") if name in weights]
        none: Any = i64(0) if dot.fold.unit.run == 8 else 0

        def views(t: Expr, nb: Expr, *inner: Expr) -> list[View]:
            *stream, chunk = inner
            s = stream[0] if stream else i64(0)
            row = self._pair(t, []) if dot.in_pairs else self._first(t)
            block, byte, lane = self._block(nb, s), none, i64(0)
            if dot.fold.unit.half:
                half, block = block % i64(2), block // i64(2)
                byte, lane = half * i64(HALF), half * i64(4)
            group = chunk // i64(per_group) if spans > per_group else i64(0)
            unit = chunk * i64(dot.units) if dot.units > 1 else chunk
            mine: Any = s * i64(dot.copies) if own and not dot.beside else none
            return [
                View(weights["codes"], (block, unit, byte)),
                View(xq, (row, chunk * i64(dot.unit_bytes * dot.units))),
                View(starts, (row, chunk, mine, 0)),
                View(factors, (row, chunk, 0)),
                *(View(weights[n], (block, group, lane)) for n in scaling),
                View(sums, (t, nb, *stream, *[0] * len(dot.spatial))),
            ]

        product(dot.meaning, "dot", views, (), outer, [i64(spans)], init=True)
        return sums

    def in_rows(self, sums: Buffer) -> Buffer:
        """Sums in pairs as rows of x by rows of the block."""
        rows = b.sblock_alloc_buffer(self.sums_shape, "float32")
        with b.grid(*self.sums_shape) as loops, b.sblock("rows"):
            *target, i, r = b.axis.remap("S" * len(self.sums_shape), loops)
            pair = [i // i64(2)] if self.dot.lead else []
            value = sums[(*target, *pair, r // i64(2), i % i64(2) * i64(2) + r % i64(2))]
            b.buffer_store(rows, value, [*target, i, r])
        return rows

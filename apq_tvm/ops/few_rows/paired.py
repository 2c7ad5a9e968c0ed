"""``y = act(x Wᵀ + b) + residual`` on packed integer weights in runs of 8 k, unscheduled.

As `apq_tvm.ops.few_rows.folded`, with the scaled dot products of
`apq_tvm.tensorize.pairs.paired_dot` and the activations of `apq_tvm.ops.activations.paired`. Sums
of several rows of x are stored in the order of smmla, 2 rows of x by 2 rows of weights, and put in
rows at the end (block ``rows``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.nest import Blocking, LinearNest
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.interleaved import HALF
from apq_tvm.tensorize.pairs.folded_dot import STARTS
from apq_tvm.tensorize.pairs.paired_dot import PairedDot, activation_bytes, paired_term

PrimFunc = Any  # tvm is untyped
Expr = Any
Buffer = Any


def paired_linear(
    spec: LinearSpec, layout: InterleavedLayout, dot: PairedDot, streams: int
) -> PrimFunc:
    """Linear layer with int8 activations prepared by `apq_tvm.ops.activations.paired`.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations and groups of whole units.
    layout : InterleavedLayout
        With runs of 8: of 4 rows, or of 8 that a dot of half units takes in two row blocks.
    dot : PairedDot
        Of a chunk. M is ``dot.m - 1`` at least. Its row blocks, if several, are the streams.
    streams : int
        Row blocks that are read at once, side by side.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq, starts, factors, codes, scales, [zeros], [bias], [residual], y)``, blocks ``dot``,
        ``store`` and, for several rows, ``rows``.
    """
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m_tile, units = dot.m, dot.units
        chunks = layout.padded_k(spec.k) // UNIT_K // units
        lead = operands.m if m_tile == 1 else tirx.Var("pairs", "int64")
        copies = streams // dot.blocks * dot.columns if dot.own else 1
        nbytes = activation_bytes(layout.padded_k(spec.k), m_tile)
        xq = operands.declare("xq", (lead, nbytes), "int8")
        starts = operands.declare("starts", (lead, chunks, copies, STARTS), "float32")
        factors = operands.declare("factors", (lead, chunks, dot.fold.factors), "float32")
        weights = operands.weights(layout)
        if dot.fold.unit.half:
            layout = replace(layout, rows=4)
        bias, residual, y = operands.epilogue()
        whole = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
        blocking = Blocking(m_tile, streams, whole.bundles, 1, chunks, units)
        nest = _Paired(spec, layout, blocking, operands.m, dot)
        sums = b.sblock_alloc_buffer(nest.paired_shape, "float32")
        nest.dot_products(sums, (xq, starts, factors), weights)
        if m_tile > 1:
            sums = nest.in_rows(sums)
        nest.store(y, sums, None, bias, residual)
    return builder.get()


class _Paired(LinearNest):
    def __init__(
        self,
        spec: LinearSpec,
        layout: InterleavedLayout,
        blocking: Blocking,
        m: Expr,
        dot: PairedDot,
    ) -> None:
        super().__init__(spec, layout, blocking, m)
        self.dot = dot
        self.pairs = (m + i64(1)) // i64(2)
        outer = self.sums_shape[: 2 if dot.beside else 3]
        self.paired_shape = [*outer, *map(i64, dot.spatial)]

    def _pair(self, tile: Expr, inner: list[Expr]) -> Expr:
        """Pair of rows of x; the last tile ends at the last one."""
        first = tirx.min(tile * i64(self.dot.pairs), self.pairs - i64(self.dot.pairs))
        return first + inner[0] if inner else first

    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        """Streams read row blocks side by side: few addresses reach all of them."""
        return bundle * i64(self.blocking.streams) + stream

    def _row(self, tile: Expr, inner: list[Expr]) -> Expr:
        if not inner:
            return tile
        pair = self._pair(tile, [inner[0] // i64(2)])
        return tirx.min(pair * i64(2), self.m - i64(2)) + inner[0] % i64(2)

    def dot_products(self, sums: Buffer, x: tuple[Buffer, ...], weights: dict[str, Buffer]) -> None:
        """Σ over chunks of the scaled products."""
        bl, dot, unit = self.blocking, self.dot, self.dot.fold.unit
        xq, starts, factors = x
        per_group = max(1, self.layout.group_width(self.spec.k) // UNIT_K // dot.units)
        codes = weights["codes"]
        reduced = [bl.spans, *dot.reduced]
        kinds = "S" * len(self.paired_shape) + "R" * len(reduced)
        with b.grid(*self.paired_shape, *map(i64, reduced)) as loops, b.sblock("dot"):
            axes = b.axis.remap(kinds, loops)
            target, (chunk, *inner, j, c) = list(axes[: -len(reduced)]), axes[-len(reduced) :]
            t, nb, s = target[:3]
            at = target[2 if dot.beside else 3 :]
            inner_pair, _, r = dot.rows(tuple(at))
            lead = t if dot.m == 1 else self._pair(t, list(inner_pair))
            block = self._block(nb, s)
            first, base = chunk * i64(2 * UNIT_K * dot.units), chunk * i64(dot.units)
            unit_at = base + inner[0] if inner else chunk
            whole = slice(base, base + i64(dot.units)) if inner else chunk
            group = chunk // i64(per_group) if bl.spans > per_group else i64(0)
            start = i64(0)
            if dot.fold.unit.half:
                start, block = block % i64(2), block // i64(2)
                r = start * i64(4) + r
                start = start * i64(HALF)
            mine = [weights[n][block, group, r] for n in ("scales", "zeros") if n in weights]
            byte0 = first + inner[0] * i64(2 * UNIT_K) if inner else first
            copies = dot.copies
            own: Any = s * i64(copies) if dot.own and not dot.beside else i64(0)
            if copies > 1:
                own = slice(own, own + i64(copies))
            nbytes = activation_bytes(UNIT_K * dot.units, dot.m)
            b.reads(
                codes[block, whole, start : start + i64(unit.nbytes)],
                xq[lead, first : first + i64(nbytes)],
                starts[lead, chunk, own, 0:STARTS],
                factors[lead, chunk, 0 : dot.fold.factors],
                *mine,
            )
            b.writes(sums[tuple(target)])
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            value = paired_term(
                dot,
                (*at, j, c),
                lambda byte: codes[block, unit_at, start + byte],
                lambda byte: xq[lead, byte0 + byte],
                lambda i: factors[lead, chunk, i],
                lambda row: mine,
            )
            b.buffer_store(sums, sums[tuple(target)] + value, target)

    def in_rows(self, sums: Buffer) -> Buffer:
        """Sums in pairs as rows of x by rows of the block."""
        rows = b.sblock_alloc_buffer(self.sums_shape, "float32")
        with b.grid(*self.sums_shape) as loops, b.sblock("rows"):
            *target, i, r = b.axis.remap("S" * len(self.sums_shape), loops)
            pair = [i // i64(2)] if self.dot.lead else []
            value = sums[(*target, *pair, r // i64(2), i % i64(2) * i64(2) + r % i64(2))]
            b.buffer_store(rows, value, [*target, i, r])
        return rows

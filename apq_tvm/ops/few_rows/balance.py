"""``y = act(x Wᵀ + b) + residual`` on packed ``W2*`` weights, as unscheduled TensorIR.

The nests of `apq_tvm.ops.linear.nest`, with rows of weights as (third of the block, lane): three
rows share a code (`apq_tvm.codegen.layouts.balance`).
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import BalanceLayout
from apq_tvm.formats.balance import CENTRE, TRIPLE
from apq_tvm.ops.linear.nest import Blocking
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of, store_inside
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.balance import balance_dot
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import View, product

Expr = Any  # tvm is untyped
Buffer = Any


def balance_blocking(layout: BalanceLayout, n: int, k: int, m_tile: int, streams: int) -> Blocking:
    """Extents of the loops for an [n, k] matrix."""
    units = layout.group_width(k) // UNIT_K
    bundles = -(-layout.row_blocks(n) // streams)
    return Blocking(m_tile, streams, bundles, 1, layout.padded_k(k) // UNIT_K // units, units)


def act_groups(spec: LinearSpec, layout: BalanceLayout) -> int:
    """Columns of ``xs``: scales of one row of activations."""
    assert spec.scheme is not None
    return 1 if spec.scheme.act_group == -1 else layout.padded_groups(spec.k)


def balance_linear(
    spec: LinearSpec, layout: BalanceLayout, m_tile: int = 1, streams: int = 1
) -> Any:
    """Linear layer with integer activations and five-level weights.

    ``y[m, n] = act(Σ_g scale[n, g] xs[m, g] (Σ_k digit[n, k] xq[m, k] - 2 xsum[m, g]) + b[n]) +
    residual[m, n]``; a scale of the whole token is applied after the sum.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : BalanceLayout
    m_tile, streams : int
        As `apq_tvm.ops.linear.nest`.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [bias], [residual],
        y)``, blocks ``dot``, ``scale`` and ``store``.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m = operands.m
        xq = operands.declare("xq", (m, layout.padded_k(spec.k)), "int8")
        xs = operands.declare("xs", (m, act_groups(spec, layout)), "float32")
        xsum = operands.declare("xsum", (m, layout.padded_groups(spec.k)), "int32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = _Nest(spec, layout, balance_blocking(layout, spec.n, spec.k, m_tile, streams), m)
        dots = b.sblock_alloc_buffer(nest.dots_shape, "int32")
        sums = b.sblock_alloc_buffer(nest.sums_shape, "float32")
        nest.dot(dots, xq, weights["codes"])
        nest.scale(sums, dots, weights["scales"], xs, xsum)
        nest.store(y, sums, xs, bias, residual)
    return builder.get()


class _Nest:
    """Emits the loop nests; buffers are (tile, bundle, [span,] stream, [row,] third, lane)."""

    def __init__(
        self, spec: LinearSpec, layout: BalanceLayout, blocking: Blocking, m: Expr
    ) -> None:
        self.spec, self.layout, self.blocking, self.m = spec, layout, blocking, m
        assert spec.scheme is not None
        self.token_scale = spec.scheme.act_group == -1
        tiles = (m + i64(blocking.m_tile - 1)) // i64(blocking.m_tile)
        outer, streams = [tiles, i64(blocking.bundles)], i64(blocking.streams)
        rows = [i64(blocking.m_tile)] if blocking.m_tile > 1 else []
        lanes = [*rows, i64(TRIPLE), i64(layout.lanes)]
        self.dots_shape = [*outer, i64(blocking.spans), streams, *lanes]
        self.sums_shape = [*outer, streams, *lanes]

    def _first(self, tile: Expr) -> Expr:
        """First row of x of a tile. The last tile ends at M."""
        from tvm import tirx

        mt = self.blocking.m_tile
        return tirx.min(tile * i64(mt), self.m - i64(mt)) if mt > 1 else tile

    def _row(self, tile: Expr, row: list[Expr]) -> Expr:
        """Row of x; `row` is empty where tiles have one."""
        return self._first(tile) + row[0] if row else tile

    @property
    def _ragged(self) -> bool:
        return self.layout.row_blocks(self.spec.n) % self.blocking.streams != 0

    def _block_index(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block, past the end in the last bundle of ragged streams."""
        return stream * i64(self.blocking.bundles) + bundle

    def _block(self, bundle: Expr, stream: Expr) -> Expr:
        """Row block to read: past the end the last one."""
        from tvm import tirx

        index, last = self._block_index(bundle, stream), self.layout.row_blocks(self.spec.n) - 1
        return tirx.min(index, i64(last)) if self._ragged else index

    def dot(self, dots: Buffer, xq: Buffer, codes: Buffer) -> None:
        """Σ digit xq per group."""
        bl, meaning = self.blocking, balance_dot(self.layout.lanes, self.blocking.m_tile)

        def views(t: Expr, nb: Expr, g: Expr, s: Expr, u: Expr) -> tuple[View, ...]:
            index = g * i64(bl.units) + u
            return (
                View(codes, (self._block(nb, s), index, 0)),
                View(xq, (self._first(t), index * i64(UNIT_K))),
                View(dots, (t, nb, g, s, *(0,) * len(meaning.operands[-1].shape))),
            )

        outer = self.dots_shape[:4]
        product(meaning, "dot", views, (), outer, [i64(bl.units)], init=True)

    def scale(self, sums: Buffer, dots: Buffer, scales: Buffer, xs: Buffer, xsum: Buffer) -> None:
        """Σ_g scale (dot - 2 xsum), times xs where activations have a scale per group."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        shape = [*self.sums_shape, i64(self.blocking.spans)]
        with b.grid(*shape) as loops, b.sblock("scale"):
            *target, g = b.axis.remap("S" * len(self.sums_shape) + "R", loops)
            t, nb, s, *inner, part, r = target
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            block, row = self._block(nb, s), self._row(t, inner)
            dot = dots[(t, nb, g, s, *inner, part, r)]
            centred = dot - xsum[row, g] * tirx.const(CENTRE, "int32")
            lane = part * i64(self.layout.lanes) + r
            factor = scales[block, g, lane].astype("float32")
            if not self.token_scale:
                factor = factor * xs[row, g]
            value = sums[tuple(target)] + factor * centred.astype("float32")
            b.buffer_store(sums, value, target)

    def store(
        self, y: Buffer, sums: Buffer, xs: Buffer, bias: Buffer | None, residual: Buffer | None
    ) -> None:
        """Epilogue of every sum inside [M, N]."""
        from tvm.tirx.script.builder import ir as b

        n, lanes = self.spec.n, self.layout.lanes

        def output(target: list[Expr], total: Expr, r: Expr) -> tuple[Expr, list[Expr]]:
            row, col = self._row(target[0], target[3:-1]), self._vector(target) * i64(lanes) + r
            if self.token_scale:
                total = total * xs[row, i64(0)]
            return epilogue_of(self.spec, total, bias, residual, row, col), [row, col]

        if n % lanes:
            self._store_ragged(sums, y, output)
            return
        always = not self._ragged and n % self.layout.rows == 0
        with b.grid(*self.sums_shape) as loops, b.sblock("store"):
            *target, r = b.axis.remap("S" * len(self.sums_shape), loops)
            value, (row, col) = output(target, sums[(*target, r)], r)
            store_inside(y, value, row, col, self._vector(target) < i64(n // lanes), always)

    def _vector(self, target: list[Expr]) -> Expr:
        """Which vector of L rows of weights a sum belongs to."""
        return self._block_index(target[1], target[2]) * i64(TRIPLE) + target[-1]

    def _store_ragged(self, sums: Buffer, y: Buffer, output: Any) -> None:
        """Whole vectors for full ones; lane by lane, from a copy, for the last one.

        The copy leaves the sums with constant indices, so that they stay in registers.
        """
        from tvm.tirx.script.builder import ir as b

        n, count = self.spec.n, self.layout.lanes
        lanes, full = i64(count), i64(self.spec.n // count)
        with b.grid(*self.sums_shape[:-1]) as loops, b.sblock("store"):
            target = list(b.axis.remap("S" * len(loops), loops))
            row, index = self._row(target[0], target[3:-1]), self._vector(target)
            b.reads(sums[(*target, slice(0, lanes))])
            b.writes(y[row, index * lanes : index * lanes + lanes])
            tail = b.sblock_alloc_buffer([lanes], "float32")
            with b.If(index < full):
                with b.Then(), b.vectorized(lanes) as r:
                    value, at = output(target, sums[(*target, r)], r)
                    b.buffer_store(y, value, at)
                with b.Else(), b.If(index == full), b.Then():
                    with b.vectorized(lanes) as r:
                        b.buffer_store(tail, sums[(*target, r)], [r])
                    with b.serial(i64(n % count)) as r:
                        value, at = output(target, tail[r], r)
                        b.buffer_store(y, value, at)

"""``y = act(x Wᵀ + b) + residual`` on binary codes by tables of activation sums, unscheduled.

LUT-GEMM (section 3)::

    y[m, n] = Σ_g (Σ_i alpha[n, g, i] Σ_quads table[m, quad, key] + z[n, g] Σ x[m, k])

No weight is decoded: four bits of a plane pick a sum out of `apq_tvm.ops.activations.lut_tables`.
Three loop nests: lookups per span of columns, their sum with the scales, and the store with its
epilogue. M is covered by tiles and row blocks are read by streams as in `apq_tvm.ops.linear.nest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts.bcq import BcqLayout
from apq_tvm.ops.activations.lut_tables import MIDDLE, span_width
from apq_tvm.ops.linear.nest import Blocking, LinearNest
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import MAGIC, MAGIC_BITS, Buffer, Expr, f32, i32, i64
from apq_tvm.tensorize.meaning.binary_codes import ENTRIES, QUADS, LutDot, lut_meaning
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import View


def lut_blocking(layout: BcqLayout, n: int, k: int, m_tile: int, streams: int) -> Blocking:
    """Extents of the loops for an [n, k] matrix; a span shares a table scale."""
    span = span_width(layout.padded_k(k), layout.group_size)
    return Blocking.of(layout, n, k, m_tile, streams, span)


def lut_linear(spec: LinearSpec, layout: BcqLayout, blocking: Blocking, table_dtype: str) -> Any:
    """Linear layer on binary codes.

    Parameters
    ----------
    spec : LinearSpec
    layout : BcqLayout
    blocking : Blocking
        Of `lut_blocking`.
    table_dtype : {"uint8", "float32"}

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(tables [M, 4 Kp], [table_scales f32 [M, spans],] sums f32 [M, spans], codes, scales,
        [bias], [residual], y)``, blocks ``dot``, ``scale`` and ``store``.
    """
    dot = LutDot(layout.unit, blocking.m_tile, table_dtype)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m, spans = operands.m, blocking.spans
        tables = operands.declare("tables", (m, 4 * layout.padded_k(spec.k)), table_dtype)
        steps = None
        if table_dtype == "uint8":
            steps = operands.declare("table_scales", (m, spans), "float32")
        totals = operands.declare("sums", (m, spans), "float32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = _Nest(spec, layout, blocking, m, (2, 16) if dot.unit.paired else ())

        def views(block: Expr, row: Expr, span: Expr, unit: Expr) -> list[View]:
            table = View(tables, (row, unit * i64(QUADS * ENTRIES)))
            return [View(weights["codes"], (block, unit, 0)), table]

        start = _start(dot, blocking.units * UNIT_K)
        dots = nest.multiply(lut_meaning(dot), views, start)
        nest.store(y, nest.scale_planes(dots, weights["scales"], steps, totals), bias, residual)
    return builder.get()


def _start(dot: LutDot, span: int) -> Callable[[Sequence[Expr]], Expr]:
    """What sums start from, so that they end as if tables held no `MIDDLE`."""
    excess = -MIDDLE * (span // 4)

    def start(lanes: Sequence[Expr]) -> Expr:
        if dot.table_dtype == "float32":
            return f32(0.0)
        if not dot.unit.bytewise:
            return i32(excess)
        if not dot.unit.paired:
            return tirx.const(excess % 65536, "uint16")
        odd, both = excess % 65536, excess * 257 % 65536
        second = lanes[-2] == i64(1)
        return tirx.Select(second, tirx.const(odd, "uint16"), tirx.const(both, "uint16"))

    return start


class _Nest(LinearNest):
    def scale_planes(
        self, dots: Buffer, scales: Buffer, steps: Buffer | None, totals: Buffer
    ) -> Buffer:
        """Σ over spans of (Σ_i alpha_i dot_i) step + z Σx."""
        bl, unit, k = self.blocking, self.layout.unit, self.spec.k
        span, width = bl.units * UNIT_K, self.layout.group_width(k)
        sums = b.sblock_alloc_buffer(self.sums_shape, "float32")
        kinds = "S" * len(self.sums_shape) + "R"
        with b.grid(*self.sums_shape, i64(bl.spans)) as loops, b.sblock("scale"):
            *target, g = b.axis.remap(kinds, loops)
            t, nb, s, *inner = target
            with b.init():
                b.buffer_store(sums, f32(0.0), target)
            block, row, lane = self._block(nb, s), self._row(t, inner), self._lane(inner)
            rows, lanes = inner[: self._row_axes], inner[self._row_axes :]
            group = g if width == span else g * i64(span) // i64(width)
            total = None
            for plane in range(unit.bits):
                alpha = scales[block, group, plane, lane].astype("float32")
                at = [t, nb, g, s, *rows, *([i64(plane)] if unit.bits > 1 else [])]
                term = alpha * self._sum(dots, at, lanes)
                total = term if total is None else total + term
            if steps is not None:
                total = total * steps[row, g]
            offset = scales[block, group, unit.bits, lane].astype("float32")
            value = sums[tuple(target)] + total + offset * totals[row, g]
            b.buffer_store(sums, value, target)
        return sums

    def _sum(self, dots: Buffer, at: list[Expr], lanes: list[Expr]) -> Expr:
        """float32 sum of one plane; the two halves of a paired unit are taken apart."""
        unit = self.layout.unit
        if not unit.bytewise:
            return dots[(*at, *lanes)].astype("float32")
        if not unit.paired:
            # No conversion.
            total = tirx.reinterpret("int16", dots[(*at, *lanes)]).astype("int32")
            return tirx.reinterpret("float32", total + i32(MAGIC_BITS)) - f32(MAGIC)
        half, lane = lanes
        both, odd = dots[(*at, i64(0), lane)], dots[(*at, i64(1), lane)]
        even = both - tirx.shift_left(odd, tirx.const(8, "uint16"))
        chosen = tirx.Select(half == i64(1), odd, even)
        return tirx.reinterpret("int16", chosen).astype("int32").astype("float32")

    @property
    def vectors(self) -> bool:
        return self.spec.n % self.layout.rows == 0 and not self.ragged

    def _column(self, target: list[Expr]) -> Expr:
        first = self._block_index(target[1], target[2]) * i64(self.layout.rows)
        return first + target[-1] * i64(16) if self.layout.unit.paired else first

    def _inside(self, target: list[Expr]) -> tuple[Expr, Expr]:
        first, n = self._column(target), self.spec.n
        return first < i64(n - self.lanes[-1] + 1), first < i64(n)

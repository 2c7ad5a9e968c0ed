"""``y = act(x Wᵀ + b) + residual`` by planes of bits: AND, popcount, shifts and sums.

ABQ-LLM (AAAI 2025), section 3.4: with weights and activations split into planes, Y = Σ_s Σ_t
2^(s+t) popcount(W_s & X_t). The nests are those of `apq_tvm.ops.linear.nest` and so are the packed
weights; the dot product reads planes of activations (`apq_tvm.ops.activations.planes`) instead of
int8. Signs and offsets:

- 2-bit activations are -1, 0 and 1 (bits s for negative, n for not zero). The dot product sums
  Σ_t 2^t popcount((W_t xor s) & n) = D', and Σ code x = D' - (2^q - 1) times the negatives.
- Activations of p >= 3 bits are two's complement: the top plane weighs -2^(p-1).
- 1-bit activations are -1 and +1 (bits u; columns past K count as -1). The dot product then sums
  Σ_s 2^s popcount(W_s xor u) = D', and Σ code x = (2^q - 1) P - D' with P = Σ u.
- Zero points and the symmetric offset multiply the sums of activations, as everywhere.
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
from apq_tvm.tensorize.exprs import Buffer, Expr, i32, i64
from apq_tvm.tensorize.meaning.bitserial import bitserial_dot
from apq_tvm.tensorize.meaning.scaffold import View


def bitserial_linear(
    spec: LinearSpec, layout: InterleavedLayout, blocking: Blocking, units: int = 1
) -> Any:
    """Linear layer with activations of 1 to 8 bits.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : InterleavedLayout
        Of groups of 32 or more.
    blocking : Blocking
        Of `bitserial_blocking`.
    units : int
        U, units that one instruction sums; divides those of a group.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(planes i32 [M, p, Kp/32], xs f32 [M, Ga], xsum i32 [M, Kp/gw], [minus i32 [M, Kp/gw],]
        codes, scales, [zeros], [bias], [residual], y)``, `minus` only for p = 2; blocks ``dot``,
        ``scale`` and ``store``.
    """
    assert spec.scheme is not None
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m, words = operands.m, layout.padded_k(spec.k) // UNIT_K
        planes = operands.declare("planes", (m, spec.scheme.act_bits, words), "int32")
        xs, xsum = operands.factors(layout)
        minus = None
        if spec.scheme.act_bits == 2:
            minus = operands.declare("minus", (m, layout.padded_groups(spec.k)), "int32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = _Planes(spec, layout, blocking, m)
        nest.minus = minus

        def views(block: Expr, row: Expr, span: Expr, unit: Expr) -> list[View]:
            first = unit * i64(units)
            return [View(weights["codes"], (block, first, 0)), View(planes, (row, 0, first))]

        meaning = bitserial_dot(layout.unit, spec.scheme.act_bits, units, blocking.m_tile)
        dots = nest.multiply(meaning, views)
        nest.store(y, nest.scale(dots, weights, xs, xsum), bias, residual, xs)
    return builder.get()


def bitserial_blocking(
    spec: LinearSpec, layout: InterleavedLayout, m_tile: int, streams: int, units: int
) -> Blocking:
    """Extents of the loops, with `units` units for one."""
    plain = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
    return replace(plain, units=plain.units // units)


class _Planes(LinearNest):
    """The nests of a linear layer whose dot product reads planes."""

    minus: Buffer | None = None

    def centred(
        self, dot: Expr, xsum: Expr, zero: Expr | None, offset: int, at: tuple[Expr, Expr]
    ) -> Expr:
        assert self.spec.scheme is not None
        row, group = at
        if self.minus is not None:
            most = i32((1 << self.layout.bits) - 1)
            dot = dot - self.minus[row, group] * most
        if self.spec.scheme.act_bits > 1:
            return super().centred(dot, xsum, zero, 0, at)
        k, width, q = self.spec.k, self.layout.group_width(self.spec.k), self.layout.bits
        # Columns past K, -1 here, are 0 in xsum; their codes stand for 0 (for W1: they are 1).
        padding: Expr = i32(0)
        if k % width:
            last = group == i64(k // width)
            padding = tirx.Select(last, i32(width - k % width), i32(0))
        ones = tirx.shift_right(i32(width) - padding + xsum, i32(1))
        code = i32(1 << (q - 1)) if zero is None else zero.astype("int32")
        dot = ones * i32((1 << q) - 1) - dot + padding * code
        return super().centred(dot, xsum, zero, 0, at)

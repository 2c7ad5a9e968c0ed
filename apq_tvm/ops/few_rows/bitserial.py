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

from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, InterleavedLayout
from apq_tvm.ops.linear.nest import Blocking, LinearNest, act_groups
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import i64
from apq_tvm.tensorize.meaning.bitserial import plane_bit, term
from apq_tvm.tensorize.meaning.interleaved import decode

Expr = Any  # tvm is untyped
Buffer = Any


def bitserial_linear(
    spec: LinearSpec,
    layout: InterleavedLayout,
    m_tile: int = 1,
    streams: int = 1,
    units: int = 1,
) -> Any:
    """Linear layer with activations of 1 to 8 bits.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : InterleavedLayout
        Of groups of 32 or more.
    m_tile, streams : int
        As `apq_tvm.ops.linear.nest`.
    units : int
        U, units that one instruction sums; divides those of a group.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(planes i32 [M, p, Kp/32], xs f32 [M, Ga], xsum i32 [M, Kp/gw], [minus i32 [M, Kp/gw],]
        codes, scales, [zeros], [bias], [residual], y)``, `minus` only for p = 2; blocks ``dot``,
        ``scale`` and ``store``.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    assert spec.scheme is not None
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m, groups = operands.m, act_groups(layout, spec.scheme, spec.k)
        words = layout.padded_k(spec.k) // UNIT_K
        planes = operands.declare("planes", (m, spec.scheme.act_bits, words), "int32")
        xs = operands.declare("xs", (m, groups), "float32")
        xsum = operands.declare("xsum", (m, layout.padded_groups(spec.k)), "int32")
        minus = None
        if spec.scheme.act_bits == 2:
            minus = operands.declare("minus", (m, layout.padded_groups(spec.k)), "int32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = _Planes(spec, layout, bitserial_blocking(spec, layout, m_tile, streams, units), m)
        nest.steps, nest.minus = units, minus
        dots = b.sblock_alloc_buffer(nest.dots_shape, "int32")
        sums = b.sblock_alloc_buffer(nest.sums_shape, "float32")
        nest.planes_dot(dots, planes, weights["codes"])
        nest.scale(sums, dots, weights, xs, xsum)
        nest.store(y, sums, xs, bias, residual)
    return builder.get()


def bitserial_blocking(
    spec: LinearSpec, layout: InterleavedLayout, m_tile: int, streams: int, units: int
) -> Blocking:
    """Extents of the loops, with `units` units for one."""
    plain = Blocking.of(layout, spec.n, spec.k, m_tile, streams)
    return Blocking(m_tile, streams, plain.bundles, 1, plain.spans, plain.units // units)


class _Planes(LinearNest):
    """The nests of a linear layer whose dot product reads planes."""

    steps = 1
    minus: Buffer | None = None

    def planes_dot(self, dots: Buffer, planes: Buffer, codes: Buffer) -> None:
        """Σ term per group (`apq_tvm.tensorize.meaning.bitserial.term`)."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        bl, unit, steps = self.blocking, self.unit, self.steps
        assert self.spec.scheme is not None
        p = self.spec.scheme.act_bits
        reduced = [i64(e) for e in (bl.units, 8 * steps, 4)]
        kinds = "S" * len(self.dots_shape) + "RRR"
        with b.grid(*self.dots_shape, *reduced) as loops, b.sblock("dot"):
            axes = b.axis.remap(kinds, loops)
            target, (u, j, c) = list(axes[:-3]), axes[-3:]
            t, nb, g, s, *inner, r = target
            row, block = self._row(t, inner), self._block(nb, s)
            first = (g * i64(bl.units) + u) * i64(steps)
            vector, index = (j % i64(8), first + j // i64(8)) if steps > 1 else (j, first)
            whole = slice(first, first + i64(steps)) if steps > 1 else first
            b.reads(
                codes[block, whole, 0 : unit.nbytes],
                planes[row, 0:p, first : first + i64(steps)],
            )
            b.writes(dots[tuple(target)])
            with b.init():
                b.buffer_store(dots, tirx.const(0, "int32"), target)
            code = decode(unit, lambda byte: codes[block, index, byte], vector, r * i64(4) + c)
            bits = [plane_bit(planes[row, i64(t), index], vector, c) for t in range(p)]
            value = dots[tuple(target)] + term(code, bits, unit.bits)
            b.buffer_store(dots, value, target)

    def centred(self, dot: Expr, row: Expr, group: Expr, xsum: Expr, zero: Expr | None) -> Expr:
        """Σ (code - zero) x over one group."""
        from tvm import tirx

        assert self.spec.scheme is not None
        if self.minus is not None:
            most = tirx.const((1 << self.layout.bits) - 1, "int32")
            dot = dot - self.minus[row, group] * most
        if self.spec.scheme.act_bits > 1:
            return self._centred(dot, xsum, zero, 0)
        k, width, q = self.spec.k, self.layout.group_width(self.spec.k), self.layout.bits

        def i32(value: int) -> Expr:
            return tirx.const(value, "int32")

        # Columns past K, -1 here, are 0 in xsum; their codes stand for 0 (for W1: they are 1).
        padding: Expr = i32(0)
        if k % width:
            last = group == i64(k // width)
            padding = tirx.Select(last, i32(width - k % width), i32(0))
        ones = tirx.shift_right(i32(width) - padding + xsum, i32(1))
        code = i32(1 << (q - 1)) if zero is None else zero.astype("int32")
        dot = ones * i32((1 << q) - 1) - dot + padding * code
        return self._centred(dot, xsum, zero, 0)

    def scale(
        self,
        sums: Buffer,
        dots: Buffer,
        weights: dict[str, Buffer],
        xs: Buffer | None = None,
        xsum: Buffer | None = None,
        offset: int = 0,
    ) -> None:
        """Σ_g scale Σ (code - zero) x, times xs where activations have a scale per group."""
        from tvm import tirx
        from tvm.tirx.script.builder import ir as b

        assert xs is not None and xsum is not None
        shape = [*self.sums_shape, i64(self.blocking.spans)]
        with b.grid(*shape) as loops, b.sblock("scale"):
            *target, g = b.axis.remap("S" * len(self.sums_shape) + "R", loops)
            t, nb, s, *inner, r = target
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), target)
            block, row = self._block(nb, s), self._row(t, inner)
            zero = weights["zeros"][block, g, r] if "zeros" in weights else None
            total = self.centred(dots[(t, nb, g, s, *inner, r)], row, g, xsum[row, g], zero)
            factor = weights["scales"][block, g, r].astype("float32")
            if not self.token_scale:
                factor = factor * xs[row, g]
            value = sums[tuple(target)] + factor * total.astype("float32")
            b.buffer_store(sums, value, target)

"""``y = act(x Wᵀ + b) + residual`` on packed ``W2*`` weights, as unscheduled TensorIR.

The nests of `apq_tvm.ops.linear.nest`, with rows of weights as (third of the block, lane): three
rows share a code (`apq_tvm.codegen.layouts.balance`).
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.codegen.layouts import BalanceLayout
from apq_tvm.formats.balance import CENTRE, TRIPLE
from apq_tvm.ops.linear.nest import Blocking, LinearNest
from apq_tvm.ops.linear.spec import LinearSpec, Operands
from apq_tvm.tensorize.exprs import Expr, i32, i64
from apq_tvm.tensorize.meaning.balance import balance_dot
from apq_tvm.tensorize.meaning.interleaved import UNIT_K
from apq_tvm.tensorize.meaning.scaffold import View


def balance_linear(spec: LinearSpec, layout: BalanceLayout, blocking: Blocking) -> Any:
    """Linear layer with integer activations and five-level weights.

    ``y[m, n] = act(Σ_g scale[n, g] xs[m, g] (Σ_k digit[n, k] xq[m, k] - 2 xsum[m, g]) + b[n]) +
    residual[m, n]``; a scale of the whole token is applied after the sum.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : BalanceLayout
    blocking : Blocking

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [bias], [residual],
        y)``, blocks ``dot``, ``scale`` and ``store``.
    """
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        xq, xs, xsum = operands.codes(layout)
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = _Nest(spec, layout, blocking, operands.m, (TRIPLE, layout.lanes))

        def views(block: Expr, row: Expr, span: Expr, unit: Expr) -> list[View]:
            x = View(xq, (row, unit * i64(UNIT_K)))
            return [View(weights["codes"], (block, unit, 0)), x]

        dots = nest.multiply(balance_dot(layout.lanes, blocking.m_tile), views)
        nest.store(y, nest.scale(dots, weights, xs, xsum), bias, residual, xs)
    return builder.get()


class _Nest(LinearNest):
    def centred(
        self, dot: Expr, xsum: Expr, zero: Expr | None, offset: int, at: tuple[Expr, Expr]
    ) -> Expr:
        return dot - xsum * i32(CENTRE)

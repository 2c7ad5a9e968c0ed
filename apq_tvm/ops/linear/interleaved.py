"""``y = act(x Wᵀ + b) + residual`` on packed integer weights, as unscheduled TensorIR.

Three plain loop nests (`apq_tvm.ops.linear.nest`): dot products per group, their sum with the
groups' scales, and the store with its epilogue. The weights are read where `InterleavedLayout`
puts them.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import UNIT_K, FloatLayout, InterleavedLayout
from apq_tvm.formats.integer import ROW_SUMS
from apq_tvm.ops.linear.nest import Blocking, LinearNest
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of, store_inside
from apq_tvm.tensorize.exprs import Expr, i64
from apq_tvm.tensorize.meaning.packed_dot import UnitDot
from apq_tvm.tensorize.meaning.scaffold import View


def packed_linear(
    spec: LinearSpec, layout: InterleavedLayout, blocking: Blocking, dot: UnitDot
) -> Any:
    """Linear layer with packed integer weights.

    With int8 activations ``y[m, n] = act(Σ_g scale[n, g] xs[m, g] (Σ_k code[n, k] xq[m, k] -
    zero[n, g] xsum[m, g]) + b[n]) + residual[m, n]``; a scale of the whole token is applied after
    the sum, and asymmetric activations add ``centre[m] row_sums[n]``. With float activations codes
    become floats one unit at a time: ``y[m, n] = act(Σ_g scale[n, g] Σ_k (code[n, k] - zero[n, g])
    x[m, k] + b[n]) + residual[m, n]``.

    Parameters
    ----------
    spec : LinearSpec
    layout : InterleavedLayout
    blocking : Blocking
        Of the layout's row blocks and K.
    dot : UnitDot
        Of the layout's units and the tile's rows. What it takes off codes is taken off zero points.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [zeros], [bias],
        [residual], y)``, without xsum for unsigned activations, or with ``x f32 [M, K]`` for the
        first three; blocks ``dot``, ``scale``
        and ``store``, and ``pad`` (a copy of x with zeros up to whole units) if K needs it.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        m, xs, xsum = operands.m, None, None
        if dot.x_dtype != "float32":
            x, xs, xsum = operands.codes(layout, summed=dot.x_dtype == "int8")
        else:
            x = operands.declare("x", (m, spec.k), "float32")
        weights = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        nest = LinearNest(spec, layout, blocking, m)
        if xs is None and layout.padded_k(spec.k) != spec.k:
            x = nest.padded(x)

        def views(block: Expr, row: Expr, span: Expr, unit: Expr) -> list[View]:
            read = [View(weights["codes"], (block, unit, 0)), View(x, (row, unit * i64(UNIT_K)))]
            if dot.zeros:
                group = span * i64(blocking.per_unit) if blocking.per_unit > 1 else span
                read.append(View(weights["zeros"], (block, group, i64(0))))
            return read

        dots = nest.multiply(dot.meaning, views)
        sums = nest.scale(dots, weights, xs, xsum, dot.offset)
        centre = (xs, 1, weights[ROW_SUMS]) if spec.asymmetric and xs is not None else None
        nest.store(y, sums, bias, residual, xs, centre)
    return builder.get()


def dense_linear(spec: LinearSpec, layout: FloatLayout) -> Any:
    """Linear layer with float32 weights, the plainest form.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], weight f32 [NB, K, R], [bias], [residual], y)``, blocks ``dot`` and
        ``store``, both over (row of x, block of R rows, lane).
    """
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            operands = Operands(spec)
            x = operands.declare("x", (operands.m, spec.k), "float32")
            weight = operands.weights(layout)["weight"]
            bias, residual, y = operands.epilogue()
            shape = [operands.m, i64(-(-spec.n // layout.rows)), i64(layout.rows)]
            sums = b.sblock_alloc_buffer(shape, "float32")
            with b.grid(*shape, i64(spec.k)) as loops, b.sblock("dot"):
                i, nb, r, k = b.axis.remap("SSSR", loops)
                with b.init():
                    b.buffer_store(sums, tirx.const(0.0, "float32"), [i, nb, r])
                b.buffer_store(sums, sums[i, nb, r] + x[i, k] * weight[nb, k, r], [i, nb, r])
            with b.grid(*shape) as loops, b.sblock("store"):
                i, nb, r = b.axis.remap("SSS", loops)
                col = nb * i64(layout.rows) + r
                value = epilogue_of(spec, sums[i, nb, r], bias, residual, i, col)
                store_inside(y, value, i, col, col < i64(spec.n), spec.n % layout.rows == 0)
    return builder.get()

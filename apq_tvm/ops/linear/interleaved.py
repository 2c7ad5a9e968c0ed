"""``y = act(x Wᵀ + b) + residual`` on packed integer weights, as unscheduled TensorIR.

Three plain loop nests (`apq_tvm.ops.linear.nest`): dot products per group, their sum with the
groups' scales, and the store with its epilogue. The weights are read where `InterleavedLayout`
puts them.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import FloatLayout, InterleavedLayout
from apq_tvm.ops.linear.nest import Blocking, LinearNest, act_groups
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of, store_inside
from apq_tvm.tensorize.exprs import i64


def integer_linear(
    spec: LinearSpec, layout: InterleavedLayout, blocking: Blocking, signed: bool = False
) -> Any:
    """Linear layer with int8 activations.

    ``y[m, n] = act(Σ_g scale[n, g] xs[m, g] (Σ_k code[n, k] xq[m, k] - zero[n, g] xsum[m, g])
    + b[n]) + residual[m, n]``; a scale of the whole token is applied after the sum.

    Parameters
    ----------
    spec : LinearSpec
        With integer activations.
    layout : InterleavedLayout
    blocking : Blocking
        Of the layout's row blocks and K.
    signed : bool
        True to take 128 off 8-bit codes inside the dot product (and off the zero point), for
        instructions whose unsigned operand cannot hold 255 without saturating.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(xq i8 [M, Kp], xs f32 [M, Ga], xsum i32 [M, Kp/gw], codes, scales, [zeros], [bias],
        [residual], y)``, blocks ``dot``, ``scale`` and ``store``.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    assert spec.scheme is not None
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            operands = Operands(spec)
            m, groups = operands.m, act_groups(layout, spec.scheme, spec.k)
            xq = operands.declare("xq", (m, layout.padded_k(spec.k)), "int8")
            xs = operands.declare("xs", (m, groups), "float32")
            xsum = operands.declare("xsum", (m, layout.padded_groups(spec.k)), "int32")
            weights = operands.weights(layout)
            bias, residual, y = operands.epilogue()
            nest = LinearNest(spec, layout, blocking, m)
            dots = b.sblock_alloc_buffer(nest.dots_shape, "int32")
            sums = b.sblock_alloc_buffer(nest.sums_shape, "float32")
            nest.integer_dot(dots, xq, weights["codes"], 128 if signed else 0)
            nest.scale(sums, dots, weights, xs, xsum, 128 if signed else 0)
            nest.store(y, sums, xs, bias, residual)
    return builder.get()


def float_linear(spec: LinearSpec, layout: InterleavedLayout, blocking: Blocking) -> Any:
    """Linear layer with float activations: codes become floats one unit at a time.

    ``y[m, n] = act(Σ_g scale[n, g] Σ_k (code[n, k] - zero[n, g]) x[m, k] + b[n]) + residual[m, n]``

    Parameters are those of `integer_linear`.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], codes, scales, [zeros], [bias], [residual], y)``, blocks ``dot``, ``scale``
        and ``store``, and ``pad`` (a copy of x with zeros up to whole units) if K needs it.
    """
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            operands = Operands(spec)
            x = operands.declare("x", (operands.m, spec.k), "float32")
            weights = operands.weights(layout)
            bias, residual, y = operands.epilogue()
            nest = LinearNest(spec, layout, blocking, operands.m)
            if layout.padded_k(spec.k) != spec.k:
                x = nest.padded(x)
            dots = b.sblock_alloc_buffer(nest.dots_shape, "float32")
            sums = b.sblock_alloc_buffer(nest.sums_shape, "float32")
            nest.float_dot(dots, x, weights["codes"], weights.get("zeros"))
            nest.scale(sums, dots, weights)
            nest.store(y, sums, None, bias, residual)
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

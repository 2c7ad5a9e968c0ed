"""``y = act(x Wᵀ + b) + residual`` for weights in any layout: decode to float32, then multiply.

The plainest kernel there is, right for every format on every target. Activations stay float32, also
where the scheme has integer ones: the result is then closer to the float model than asked for.
"""

from __future__ import annotations

from typing import Any

from apq_tvm.codegen.layouts import WeightLayout
from apq_tvm.codegen.layouts.layout import SparseLayout
from apq_tvm.ops.blocks import put
from apq_tvm.ops.linear.spec import LinearSpec, Operands, epilogue_of, store_inside
from apq_tvm.tensorize.exprs import i64


def decode_linear(spec: LinearSpec, layout: WeightLayout, bits: int = 0) -> Any:
    """Linear layer with float32 activations and any weights.

    Parameters
    ----------
    spec : LinearSpec
    layout : WeightLayout
    bits : int
        Width, where the scheme leaves a choice; 0 for the widest.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x f32 [M, K], *packed arrays, [bias], [residual], y)``, unscheduled; blocks ``decode``
        over (row block, k, lane), ``dot`` and ``store`` over (row block, row of x, lane), and so
        ``outliers`` where the layout has a sparse part.
    """
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    blocks, rows = i64(layout.row_blocks(spec.n)), i64(layout.rows)
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        operands = Operands(spec)
        x = operands.declare("x", (operands.m, spec.k), "float32")
        arrays = operands.weights(layout)
        bias, residual, y = operands.epilogue()
        decoded = b.sblock_alloc_buffer([blocks, i64(spec.k), rows], "float32")
        sums = b.sblock_alloc_buffer([blocks, operands.m, rows], "float32")
        with b.grid(blocks, i64(spec.k), rows) as loops, b.sblock("decode"):
            nb, k, r = b.axis.remap("SSS", loops)
            put(decoded, [nb, k, r], layout.weight(arrays, nb, r, k, bits))
        with b.grid(blocks, operands.m, rows, i64(spec.k)) as loops, b.sblock("dot"):
            nb, m, r, k = b.axis.remap("SSSR", loops)
            with b.init():
                b.buffer_store(sums, tirx.const(0.0, "float32"), [nb, m, r])
            b.buffer_store(sums, sums[nb, m, r] + x[m, k] * decoded[nb, k, r], [nb, m, r])
        csr = layout.sparse(arrays) if isinstance(layout, SparseLayout) else None
        extra = None
        if csr is not None:
            start, columns, values = csr
            extra = b.sblock_alloc_buffer([blocks, operands.m, rows], "float32")
            with b.grid(blocks, operands.m, rows) as loops, b.sblock("outliers"):
                nb, m, r = b.axis.remap("SSS", loops)
                put(extra, [nb, m, r], tirx.const(0.0, "float32"))
                begin = start[nb * rows + r].astype("int64")
                with b.serial(0, start[nb * rows + r + 1].astype("int64") - begin) as p:
                    value = values[begin + p].astype("float32")
                    term = value * x[m, columns[begin + p].astype("int64")]
                    b.buffer_store(extra, extra[nb, m, r] + term, [nb, m, r])
        with b.grid(blocks, operands.m, rows) as loops, b.sblock("store"):
            nb, m, r = b.axis.remap("SSS", loops)
            col = nb * rows + r
            total = sums[nb, m, r] if extra is None else sums[nb, m, r] + extra[nb, m, r]
            value = epilogue_of(spec, total, bias, residual, m, col)
            store_inside(y, value, m, col, col < i64(spec.n), spec.n % layout.rows == 0)
    return builder.get()

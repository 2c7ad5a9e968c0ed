"""CumSum and CumProd: running along one axis. TVM 0.27 lowers them to packed calls."""

from __future__ import annotations

from typing import Any


def running(
    dtype: str, *, exclusive: bool = False, reverse: bool = False, product: bool = False
) -> Any:
    """Running sums or products along the middle axis of [outer, n, inner], all sizes dynamic.

    Parameters
    ----------
    dtype : str
        Of input and output.
    exclusive : bool
        The one at i leaves out element i.
    reverse : bool
        They run from the end.
    product : bool
        Products, not sums.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x, y)``, both [outer, n, inner]; attr ``apq.op`` = "cumsum".
    """
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as b

    outer, n, inner = shape = [tirx.Var(name, "int64") for name in ("outer", "n", "inner")]
    with IRBuilder() as builder:
        with b.prim_func(s_tir=True):
            b.func_name("cumsum")
            b.func_attr({"apq.op": "cumsum", "op_pattern": 8, "tirx.noalias": True})
            x = b.match_buffer(b.arg("x", b.handle()), shape, dtype)
            y = b.match_buffer(b.arg("y", b.handle()), shape, dtype)
            with b.grid(outer, n, inner) as loops, b.sblock("scan"):
                o, step, i = b.axis.remap("SRS", loops)
                at, before = (n - 1 - step, n - step) if reverse else (step, step - 1)
                first = tirx.const(int(product), dtype) if exclusive else x[o, at, i]
                added = x[o, before if exclusive else at, i]
                # if_then_else, not Select: the element before the first does not exist
                later = y[o, before, i] * added if product else y[o, before, i] + added
                b.buffer_store(y, tirx.if_then_else(step > 0, later, first), [o, at, i])
    return builder.get()

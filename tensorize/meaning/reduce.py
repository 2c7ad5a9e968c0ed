"""The meaning of a horizontal reduction: ``Y[0] = op(Y[0], X[0], ..., X[lanes - 1])``."""

from __future__ import annotations

from typing import Any

Expr = Any  # tvm is untyped
Buffer = Any


def combine(operation: str, a: Expr, b: Expr) -> Expr:
    """The larger of two values for ``max``, their sum for ``add``."""
    from tvm import tirx

    return tirx.max(a, b) if operation == "max" else a + b


def reduce_loop(
    name: str, operation: str, source: Buffer, target: Buffer, start: bool = True
) -> None:
    """The loop over all of `source`, block `name`; it starts from 0 or from what is there."""
    from tvm import tirx
    from tvm.tirx.script.builder import ir as b

    lanes = source.shape[0]
    with b.serial(0, lanes) as e0, b.sblock(name):
        e = b.axis.reduce(lanes, e0)
        b.reads(*([] if start else [target[0]]), source[e])
        b.writes(target[0])
        if start:
            with b.init():
                b.buffer_store(target, tirx.const(0, target.dtype), [0])
        b.buffer_store(target, combine(operation, target[0], source[e]), [0])

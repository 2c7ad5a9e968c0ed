"""Horizontal reductions of one vector, for any target: LLVM picks the shuffles.

``Y[0] = op(Y[0], X[0], ..., X[lanes - 1])``; llvm.vector.reduce.* of the LLVM Language Reference.
float32 vectors are added by halves, so the order of the sum is not that of the plain loop.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import Buffer, PrimFunc, llvm, member
from apq_tvm.tensorize.meaning.rounding import combine, reduce_loop
from apq_tvm.tensorize.registry import register

_REDUCTIONS = {"max": "llvm.vector.reduce.smax", "add": "llvm.vector.reduce.add"}


def reduce_intrinsic(operation: str, lanes: int, dtype: str = "int32") -> str:
    """Register (once) and name ``apq_reduce{operation}_1x1x{lanes}_s32s32`` (or ``_f32f32``).

    Parameters
    ----------
    operation : {"max", "add"}
    lanes : int
    dtype : {"int32", "float32"}
        float32 is for sums, of a power of two of lanes.
    """
    short = "s32" if dtype == "int32" else "f32"
    return register(
        f"apq_reduce{operation}_1x1x{lanes}_{short}{short}",
        lambda: _reduce(operation, lanes, dtype),
    )


def _halves(vector: Any, lanes: int) -> Any:
    """The sum of a vector of a power of two of lanes."""
    while lanes > 1:
        lanes //= 2
        low, high = (
            tirx.Shuffle([vector], [tirx.const(start + i, "int32") for i in range(lanes)])
            for start in (0, lanes)
        )
        vector = low + high
    return vector


def _reduce(operation: str, lanes: int, dtype: str) -> tuple[PrimFunc, PrimFunc]:
    def plain(x: Buffer, y: Buffer) -> None:
        reduce_loop("reduce", operation, lanes, lambda e: x[e], y[0], start=False)

    def implement(x: Buffer, y: Buffer) -> None:
        vector = x.vload([0], f"{dtype}x{lanes}")
        if dtype == "float32":
            reduced = _halves(vector, lanes)
        else:
            reduced = llvm("int32", _REDUCTIONS[operation], vector)
        b.buffer_store(y, combine(operation, y[0], reduced), [0])

    operands = ("x", (lanes,), dtype, 64), ("y", (1,), dtype, 4)
    return member(operands, plain, True), member(operands, implement, True)

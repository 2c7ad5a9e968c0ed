"""Horizontal reductions of one vector, for any target: LLVM picks the shuffles.

``Y[0] = op(Y[0], X[0], ..., X[lanes - 1])``; llvm.vector.reduce.* of the LLVM Language Reference.
float32 vectors are added by halves, so the order of the sum is not that of the plain loop.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.exprs import llvm
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
        lambda: (
            _reduce(operation, lanes, dtype, False),
            _reduce(operation, lanes, dtype, True),
        ),
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


def _reduce(operation: str, lanes: int, dtype: str, instruction: bool) -> Any:
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("reduce")
        x = b.match_buffer(b.arg("x", b.handle()), (lanes,), dtype, align=64, offset_factor=1)
        y = b.match_buffer(b.arg("y", b.handle()), (1,), dtype, align=4, offset_factor=1)
        with b.sblock("root"):
            b.reads(y[0:1], x[0:lanes])
            b.writes(y[0:1])
            if instruction:
                vector = x.vload([0], f"{dtype}x{lanes}")
                if dtype == "float32":
                    reduced = _halves(vector, lanes)
                else:
                    reduced = llvm("int32", _REDUCTIONS[operation], vector)
                b.buffer_store(y, combine(operation, y[0], reduced), [0])
            else:
                reduce_loop("reduce", operation, lanes, lambda e: x[e], y[0], start=False)
    return builder.get()

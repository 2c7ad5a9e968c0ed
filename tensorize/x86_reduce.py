"""Horizontal reductions of one int32 vector, for any target: LLVM picks the shuffles.

``Y[0] = op(Y[0], X[0], ..., X[lanes - 1])``; llvm.vector.reduce.* of the LLVM Language Reference.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as b

from apq_tvm.tensorize.registry import register

_OPERATIONS = {
    "max": ("llvm.vector.reduce.smax", tirx.max),
    "add": ("llvm.vector.reduce.add", lambda x, y: x + y),
}


def reduce_intrinsic(operation: str, lanes: int) -> str:
    """Register (once) and name ``apq_reduce{operation}_1x1x{lanes}_s32s32``.

    Parameters
    ----------
    operation : {"max", "add"}
    lanes : int
    """
    return register(
        f"apq_reduce{operation}_1x1x{lanes}_s32s32",
        lambda: (_reduce(operation, lanes, False), _reduce(operation, lanes, True)),
    )


def _reduce(operation: str, lanes: int, instruction: bool) -> Any:
    name, combine = _OPERATIONS[operation]
    with IRBuilder() as builder, b.prim_func(s_tir=True):
        b.func_name("reduce")
        x = b.match_buffer(b.arg("x", b.handle()), (lanes,), "int32", align=64, offset_factor=1)
        y = b.match_buffer(b.arg("y", b.handle()), (1,), "int32", align=64, offset_factor=1)
        with b.sblock("root"):
            b.reads(y[0:1], x[0:lanes])
            b.writes(y[0:1])
            if instruction:
                vector = x.vload([0], f"int32x{lanes}")
                b.buffer_store(
                    y, combine(y[0], tirx.call_llvm_pure_intrin("int32", name, vector)), [0]
                )
            else:
                with b.serial(0, lanes) as i, b.sblock("reduce"):
                    vi = b.axis.reduce(lanes, i)
                    b.reads(y[0], x[vi])
                    b.writes(y[0])
                    b.buffer_store(y, combine(y[0], x[vi]), [0])
    return builder.get()

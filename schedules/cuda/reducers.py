"""Reductions that begin with an infinity, made known to TVM.

Threads meet by a reducer that TVM finds by its operator and by what the reduction begins with. The
largest of floats begins with the least finite number there; ONNX's ReduceMax of nothing, and of
rows of minus infinity, is minus infinity.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx  # noqa: F401  # s_tir registers what is called below


@cache
def know_infinities() -> None:
    """Register ``max`` from minus infinity and ``min`` from infinity."""
    _register(tirx.max, float("-inf"))
    _register(tirx.min, float("inf"))


def _register(combine: Callable[[Any, Any], Any], start: float) -> None:
    functions = (
        tvm_ffi.convert(lambda x, y: [combine(x[0], y[0])]),
        tvm_ffi.convert(lambda values: [tirx.const(start, values[0].ty)]),
    )
    for function in functions:
        # TVM's registry lives until the process ends, when Python is no more: both are never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
    tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")(1, *functions)

"""Calls of our own device functions from TensorIR.

Their sources, ``*.cuh`` beside this file, have two bodies each: PTX under ``__CUDACC__``, and plain
C++ that is its meaning and that the simulator runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from apq_tvm.tensorize.exprs import Expr

PRODUCTS = ("reads", "quinary", "mma_s8", "mma_b1")
"""Headers of what products call."""


@cache
def source(name: str) -> str:
    """The text of ``{name}.cuh``."""
    return (Path(__file__).resolve().parent / f"{name}.cuh").read_text(encoding="utf-8")


def call(function: str, *args: Expr, dtype: str = "void") -> Any:
    """A call of a function of products, which gives a `dtype`; a module holds each source once."""
    from tvm.script import tirx as T

    header = next(name for name in PRODUCTS if f" {function}(" in source(name))
    return T.cuda.func_call(function, *args, source_code=source(header), return_type=dtype)


def team_call(function: str, dtype: str, *args: Expr) -> Any:
    """What a function of ``team.cuh``, ``warp.cuh`` or ``halves.cuh`` gives, of type `dtype`."""
    from tvm.script import tirx as T

    beginnings = {"apq_warp_": "warp", "apq_read_halves": "halves"}
    names = (name for begin, name in beginnings.items() if function.startswith(begin))
    header = next(names, "team")
    return T.cuda.func_call(function, *args, source_code=source(header), return_type=dtype)

"""Elementwise functions that no linear layer took in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te

from apq_tvm.ops import math
from apq_tvm.ops.graph.shapes import Dim, Symbols


def gelu(shape: Sequence[Dim], approximate: str = "none") -> Any:
    """ONNX Gelu (opset 20): x/2 (1 + erf(x / sqrt 2)), or its tanh approximation.

    Parameters
    ----------
    shape : sequence of int or str
        Strings are dynamic dimensions.
    approximate : {"none", "tanh"}

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x float32, y float32)``, unscheduled, attr ``apq.op`` = "elementwise".
    """
    function = math.gelu_tanh if approximate == "tanh" else math.gelu
    x = te.placeholder(Symbols().shape(shape), "float32", "x")
    y = te.compute(x.shape, lambda *i: function(x(*i)), "y")
    func = te.create_prim_func([x, y])
    return func.with_attrs({"apq.op": "elementwise", "op_pattern": 8})


def activation(shape: Sequence[Dim], name: str) -> Any:
    """An activation of `apq_tvm.ops.math.ACTIVATIONS` by name.

    Parameters
    ----------
    shape : sequence of int or str
        Strings are dynamic dimensions.
    name : str

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x float32, y float32)``, unscheduled, attr ``apq.op`` = "elementwise".
    """
    x = te.placeholder(Symbols().shape(shape), "float32", "x")
    y = te.compute(x.shape, lambda *i: math.activation(name, x(*i)), "y")
    func = te.create_prim_func([x, y])
    return func.with_attrs({"apq.op": "elementwise", "op_pattern": 8})

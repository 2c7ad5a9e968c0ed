"""Elementwise nodes where TVM's importer computes something else than ONNX, or stops the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, tirx

from apq_tvm.lower.relax_import import Convert
from apq_tvm.onnx_import.graph import np_dtype
from apq_tvm.ops.graph.arithmetic import broadcast, divide, remainder, shift, to_integer
from apq_tvm.types import Node


def _elementwise(bb: relax.BlockBuilder, fn: Callable[..., Any], *inputs: Any) -> Any:
    def compute(*tensors: Any) -> Any:
        return broadcast(fn, *tensors)

    return bb.emit_te(compute, *inputs, primfunc_name_hint="elementwise")


def _dtype(value: Any) -> str:
    return str(value.ty.dtype)


def _integral(value: Any) -> bool:
    return _dtype(value).startswith(("int", "uint"))


def convert_div(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Div``."""
    if not _integral(inputs[0]):
        return relax.op.divide(*inputs)
    return _elementwise(bb, divide, *inputs)


def convert_mod(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Mod``."""
    fmod = bool(node.attrs.get("fmod", 0))
    if _integral(inputs[0]):
        return _elementwise(bb, partial(remainder, of_dividend=fmod), *inputs)
    return relax.op.mod(*inputs) if fmod else relax.op.floor_mod(*inputs)


def convert_shift(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``BitShift``."""
    return _elementwise(bb, partial(shift, left=node.attrs["direction"] == "LEFT"), *inputs)


def convert_cast(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Cast`` and ``CastLike``."""
    if node.op == "CastLike":
        to = _dtype(inputs[1])
    else:
        to = np_dtype(node.attrs["to"])
    (x, source) = inputs[0], _dtype(inputs[0])
    if source == to:
        return x
    if to == "bool":  # TVM would convert to an integer first
        zero = tirx.const(False if source == "bool" else 0, source)
        return _elementwise(bb, lambda v: v != zero, x)
    if source.startswith("float") and np.dtype(to).kind in "iu":
        return _elementwise(bb, lambda v: to_integer(v, to), x)
    return relax.op.astype(x, to)


def convert_bit_cast(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``BitCast`` between types of one size."""
    to = np_dtype(node.attrs["to"])
    return _elementwise(bb, lambda v: tirx.reinterpret(to, v), inputs[0])


ARITHMETIC: dict[str, Convert] = {
    "BitCast": convert_bit_cast,
    "BitShift": convert_shift,
    "Cast": convert_cast,
    "CastLike": convert_cast,
    "Div": convert_div,
    "Mod": convert_mod,
}
"""Converters by operator name."""

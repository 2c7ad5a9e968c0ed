"""Elementwise nodes where TVM's importer computes something else, or stops the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import copysign
from typing import Any

import numpy as np
from tvm import ir, relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import QuantizeLinear

from apq_tvm.lower.fusion import ALONE
from apq_tvm.lower.relax_import import Convert
from apq_tvm.onnx_import.graph import np_dtype
from apq_tvm.ops.graph.arithmetic import (
    broadcast,
    converted,
    divide,
    floored,
    from_bfloat16,
    integer_power,
    remainder,
    shift,
    to_bfloat16,
)
from apq_tvm.types import Node


def elementwise(
    bb: relax.BlockBuilder, fn: Callable[..., Any], *inputs: Any, alone: bool = False
) -> Any:
    """`fn` of the elements of the inputs, broadcast.

    `alone` keeps it from being fused: a reader that names its operand several times would repeat
    it, and TVM's simplifier takes exponential time over nested divisions.
    """

    def compute(*tensors: Any) -> Any:
        return broadcast(fn, *tensors)

    attrs = ALONE if alone else None
    return bb.emit_te(compute, *inputs, primfunc_name_hint="elementwise", primfunc_attrs=attrs)


def _dtype(value: Any) -> str:
    return str(value.ty.dtype)


def _integral(value: Any) -> bool:
    return _dtype(value).startswith(("int", "uint"))


def _number(value: Any) -> float | None:
    """A constant of no dimensions."""
    if not isinstance(value, ir.expr.GenericConst) or len(value.ty.shape):
        return None
    return float(value.value.numpy())


def _zero(value: Any) -> float | None:
    """A constant of no dimensions that is 0.0 or -0.0."""
    number = _number(value)
    return number if number == 0 else None


def _infinite(zero: float, dtype: str) -> Any:
    """1 / 0.0 or 1 / -0.0."""
    return tirx.infinity(dtype) if copysign(1, zero) > 0 else -tirx.infinity(dtype)


def convert_div(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Div``; TVM itself fails on a constant 0."""
    if not _integral(inputs[0]):
        if (zero := _zero(inputs[1])) is not None:
            return elementwise(bb, lambda v: v * _infinite(zero, _dtype(inputs[0])), inputs[0])
        return relax.op.divide(*inputs)
    return elementwise(bb, divide, *inputs, alone=True)


def convert_equal(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Equal``; LLVM would compare truth values of several lanes as if they were floats."""
    if _dtype(inputs[0]) != "bool":
        return relax.op.equal(*inputs)
    return elementwise(bb, lambda a, b: a.astype("uint8") == b.astype("uint8"), *inputs)


def convert_not(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Not``; of ``not a < b`` TVM makes ``b <= a``, which is another answer where one is NaN."""
    return elementwise(bb, lambda v: v.astype("uint8") == tirx.const(0, "uint8"), *inputs)


def convert_pow(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Pow``, whose operands may have different types; the result has the first one's."""
    base, exponent = (_dtype(value) for value in inputs)
    if _integral(inputs[0]) and _integral(inputs[1]):
        return elementwise(bb, integer_power, *inputs, alone=True)
    if base == exponent:
        if (whole := _number(inputs[1])) in (3.0, 4.0):  # libm's pow takes 40 times as long
            square = bb.emit(relax.op.multiply(inputs[0], inputs[0]))
            return relax.op.multiply(square, inputs[0] if whole == 3.0 else square)
        return relax.op.power(*inputs)
    real = "float64" if "float64" in (base, exponent) or base in ("int64", "uint64") else "float32"
    wide = [bb.emit(relax.op.astype(value, real)) for value in inputs]
    result = bb.emit(relax.op.power(*wide))
    if _integral(inputs[0]):
        return elementwise(bb, lambda v: converted(v, base), result)
    return relax.op.astype(result, base)


def convert_mod(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Mod``."""
    fmod = bool(node.attrs.get("fmod", 0))
    if _integral(inputs[0]):
        return elementwise(bb, partial(remainder, of_dividend=fmod), *inputs, alone=True)
    rest = bb.emit(relax.op.mod(*inputs))  # TVM's floor_mod gives NaN beside infinities
    return rest if fmod else elementwise(bb, floored, rest, inputs[1])


def convert_sub(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Sub``; a square that is subtracted is rounded before.

    LLVM and NVRTC would round it and the difference at once, as hardware can, and a variance
    ``E[x²] - E[x]²`` of one element be a little more or less than 0, of which the root is NaN.
    """
    x, y = inputs
    base = None if _integral(x) else _squared(bb, y)
    if base is not None:
        y = elementwise(bb, lambda v: v * v, base, alone=True)
    return relax.op.subtract(x, y)


def convert_product(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.Product``; in a function with a sum LLVM and NVRTC would round both at once."""
    return elementwise(bb, lambda a, b: a * b, *inputs, alone=True)


def _squared(bb: relax.BlockBuilder, value: Any) -> Any:
    """What `value` is the square of, None if it is none."""
    made = bb.lookup_binding(value) if isinstance(value, relax.Var) else value
    if not isinstance(made, relax.Call) or len(made.args) != 2:
        return None
    base, by = made.args
    if made.op == ir.Op.get("relax.multiply"):
        return base if base.same_as(by) else None
    is_power = made.op == ir.Op.get("relax.power") and isinstance(by, ir.expr.GenericConst)
    return base if is_power and (by.value.numpy() == 2).all() else None


def convert_quantize(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``QuantizeLinear``; of NaN the least code, as ONNX Runtime has it on x86-64: TVM's own would
    be the greatest."""
    x, *grid = inputs
    if not _integral(x):
        least = tirx.min_value(_dtype(x))
        x = elementwise(bb, lambda v: tirx.max(v, least), x)
    return QuantizeLinear._impl_v21(bb, [x, *grid], node.attrs, {})


def convert_shift(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``BitShift``."""
    return elementwise(bb, partial(shift, left=node.attrs["direction"] == "LEFT"), *inputs)


def convert_cast(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Cast`` and ``CastLike``.

    Floats out of an integer type's range, which ONNX leaves open, become what they become in ONNX
    Runtime on x86-64 (`apq_tvm.ops.graph.arithmetic.converted`): of -1.0 uint8 255, of 300.0 44.
    """
    if node.op == "CastLike":
        to = _dtype(inputs[1])
    else:
        to = np_dtype(node.attrs["to"])
    (x, source) = inputs[0], _dtype(inputs[0])
    if source == to:
        return x
    if to == "bool":  # TVM would convert to an integer first
        zero = tirx.const(False if source == "bool" else 0, source)
        return elementwise(bb, lambda v: v != zero, x)
    if source.startswith("float") and np.dtype(to).kind in "iu":
        return elementwise(bb, lambda v: converted(v, to), x)
    return relax.op.astype(x, to)


def convert_bit_cast(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``BitCast`` between types of one size; a bool is a byte that is 0 or 1."""
    to = np_dtype(node.attrs["to"])
    if "bool" in (to, _dtype(inputs[0])):
        return convert_cast(bb, node, inputs)
    return elementwise(bb, lambda v: tirx.reinterpret(to, v), inputs[0])


def convert_is_inf(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``IsInf`` of both signs or one."""
    dtype = _dtype(inputs[0])
    no = tirx.const(False, "bool")

    def test(v: Any) -> Any:
        above = v == tirx.infinity(dtype) if node.attrs.get("detect_positive", 1) else no
        below = v == -tirx.infinity(dtype) if node.attrs.get("detect_negative", 1) else no
        return tirx.any(above, below)

    return elementwise(bb, test, inputs[0])


def convert_from_bfloat16(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.FromBfloat16``."""
    return elementwise(bb, from_bfloat16, inputs[0])


def convert_to_bfloat16(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``apq.ToBfloat16``."""
    return elementwise(bb, to_bfloat16, inputs[0])


def convert_sign(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Sign``; TVM writes -1 beside unsigned integers too, which it cannot."""
    dtype = _dtype(inputs[0])
    if not dtype.startswith("uint"):
        return relax.op.sign(inputs[0])
    return elementwise(bb, lambda v: tirx.min(v, tirx.const(1, dtype)), inputs[0])


def convert_shrink(bb: relax.BlockBuilder, node: Node, inputs: Sequence[Any]) -> Any:
    """``Shrink``; of integers in float32, as ONNX Runtime has it: TVM compares unsigned ones with
    -lambd, which they cannot be."""
    dtype = _dtype(inputs[0])
    bias, lambd = (float(node.attrs.get(k, v)) for k, v in (("bias", 0.0), ("lambd", 0.5)))
    real = "float32" if _integral(inputs[0]) else dtype

    def shrunk(v: Any) -> Any:
        def number(value: float) -> Any:
            return tirx.const(value, real)

        x = v.astype(real)
        above = tirx.Select(x > number(lambd), x - number(bias), number(0.0))
        y = tirx.Select(x < number(-lambd), x + number(bias), above)
        return converted(y, dtype) if dtype != real else y

    return elementwise(bb, shrunk, inputs[0])


ARITHMETIC: dict[str, Convert] = {
    "BitCast": convert_bit_cast,
    "BitShift": convert_shift,
    "Cast": convert_cast,
    "CastLike": convert_cast,
    "Div": convert_div,
    "Equal": convert_equal,
    "IsInf": convert_is_inf,
    "Mod": convert_mod,
    "Not": convert_not,
    "Pow": convert_pow,
    "QuantizeLinear": convert_quantize,
    "Shrink": convert_shrink,
    "Sign": convert_sign,
    "Sub": convert_sub,
    "apq.Product": convert_product,
    "apq.FromBfloat16": convert_from_bfloat16,
    "apq.ToBfloat16": convert_to_bfloat16,
}
"""Converters by operator name."""

"""softmax(x * scale + mask) over the last axis: the probabilities of attention.

The mask is read where it is: a mask ``[B, 1, 1, S]`` or ``[1, 1, S, S]`` is never copied out to the
shape of ``x``. ONNX Softmax (opset 13) is ``scale=1`` without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import te, tirx

from apq_tvm.errors import NotApplicable
from apq_tvm.ops.graph.shapes import Dim, Symbols
from apq_tvm.tensorize.exprs import MAGIC

# Adding it rounds to an integer, which the low mantissa bits then hold, with an exponent's bias.
_BIASED = MAGIC + 127.0
_LOG2E = 1.4426950408889634
LOWEST = -3.4028234663852886e38
"""Of finite float32."""

_LN2 = 0.6931471805599453
# e^r = 1 + r + r^2 * poly(r), |r| <= ln(2) / 2: own weighted least-squares fit, error 1.5e-7
_EXP = (0.4999922811985016, 0.16667115688323975, 0.04189055413007736, 0.00831248052418232)


def exp_of_nonpositive(x: Any) -> Any:
    """e^x for float32 x <= 0, one or a vector, in 13 instructions; NaN goes through.

    The relative error is at most 2e-7 for x > -1 and grows to 3e-6 at -87, where results flush to
    0: ln 2 is taken as one float32, because a probability that small cannot show it.
    """
    kind = str(x.ty)
    lanes = int(kind.partition("x")[2] or 1)

    def number(value: float, dtype: str = "float32") -> Any:
        one = tirx.const(value, dtype)
        return one if lanes == 1 else tirx.Broadcast(one, lanes)

    v, a, r = (tirx.Var(name, kind) for name in ("v", "a", "r"))
    poly = number(_EXP[-1])
    for c in reversed(_EXP[:-1]):
        poly = poly * r + number(c)
    poly = (poly * r + number(1.0)) * r + number(1.0)
    # The low bits of `a` are n + 127: in the exponent field they are 2^n, or 0 for n = -127.
    bits = tirx.reinterpret(kind.replace("float", "int"), a)
    power = tirx.reinterpret(kind, tirx.shift_left(bits, number(23, "int32")))
    reduced = v - (a - number(_BIASED)) * number(_LN2)
    clamped = tirx.Select(x < number(-88.02969), number(-88.02969), x)
    scaled = tirx.Let(r, reduced, poly * power)
    return tirx.Let(v, clamped, tirx.Let(a, v * number(_LOG2E) + number(_BIASED), scaled))


def broadcast_index(dims: Sequence[Dim], mask: Sequence[Dim], indices: Sequence[Any]) -> list[Any]:
    """Where an operand of shape `mask` is read for one element of a result of shape `dims`.

    Raises
    ------
    NotApplicable
        The shapes do not broadcast (a named dimension broadcasts only to itself).
    """
    if len(mask) > len(dims):
        raise NotApplicable(f"mask {tuple(mask)} has more axes than {tuple(dims)}")
    skip = len(dims) - len(mask)
    out = []
    for d, m, i in zip(dims[skip:], mask, indices[skip:], strict=True):
        if m != 1 and m != d:
            raise NotApplicable(f"mask {tuple(mask)} does not broadcast to {tuple(dims)}")
        out.append(tirx.const(0, "int64") if m == 1 else i)
    return out


def softmax(
    shape: Sequence[Dim],
    mask: Sequence[Dim] | None = None,
    scale: float = 1.0,
    zero_masked: bool = False,
) -> Any:
    """softmax(x * scale + mask) over the last axis.

    Parameters
    ----------
    shape : sequence of int or str
        Of ``x`` and the result, at least one axis; strings are dynamic dimensions.
    mask : sequence of int or str, optional
        Shape of the mask; broadcasts to `shape` as in ONNX.
    scale : float
        Multiplies ``x`` before the mask is added.
    zero_masked : bool
        A row whose entries are all -inf is 0 instead of NaN.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``(x float32, [mask float32], y float32)``, unscheduled, attr ``apq.op`` = "softmax". A row
        whose entries are all -inf is NaN, as in ONNX Runtime.

    Raises
    ------
    NotApplicable
        The mask does not broadcast to `shape`.
    """
    symbols = Symbols()
    extents = symbols.shape(shape)
    rows = extents[:-1]
    x = te.placeholder(extents, "float32", "x")
    args = [x]
    if mask is not None:
        broadcast_index(shape, mask, [0] * len(shape))
        args.append(te.placeholder(symbols.shape(mask), "float32", "mask"))

    def score(*indices: Any) -> Any:
        value = x(*indices)
        if scale != 1.0:
            value = value * tirx.const(scale, "float32")
        if mask is not None:
            value = value + args[1](*broadcast_index(shape, mask, indices))
        return value

    j = te.reduce_axis((0, extents[-1]), "j")
    largest = te.compute(rows, lambda *r: te.max(score(*r, j), axis=j), "largest")

    def above(*row: Any) -> Any:
        """What to subtract: the lowest float instead of -inf makes exponentials 0, not NaN."""
        if not zero_masked:
            return largest(*row)
        return tirx.max(largest(*row), tirx.const(LOWEST, "float32"))

    e = te.compute(extents, lambda *i: exp_of_nonpositive(score(*i) - above(*i[:-1])), "e")
    k = te.reduce_axis((0, extents[-1]), "k")
    total = te.compute(rows, lambda *r: te.sum(e(*r, k), axis=k), "total")

    def sums(*row: Any) -> Any:
        """The sum is at least 1 (the largest entry) unless the whole row is masked."""
        if not zero_masked:
            return total(*row)
        return tirx.max(total(*row), tirx.const(1e-30, "float32"))

    inverse = te.compute(rows, lambda *r: tirx.const(1.0, "float32") / sums(*r), "inverse")
    y = te.compute(extents, lambda *i: e(*i) * inverse(*i[:-1]), "y")
    func = te.create_prim_func([*args, y])
    return func.with_attrs({"apq.op": "softmax", "op_pattern": 8})

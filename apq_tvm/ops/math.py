"""Elementary functions as float32 TIR expressions that vectorize on every target.

A call to libm's ``expf`` or ``erff`` inside a loop stays scalar and costs 20 to 60 cycles a value.
These are polynomials and rational functions over plain arithmetic, so that LLVM keeps the whole
loop in vector registers. Every function takes and returns a float32 ``PrimExpr``; NaN goes
through, and infinities give the limit. ``activation(name, x)`` is what fused epilogues call.

Coefficients are our own minimax fits (weighted least squares on Chebyshev nodes, Lawson's
re-weighting); the largest error against libm, measured in float32 arithmetic, stands in each
docstring and is checked by ``tests/tir/graph/test_math.py``. Range reduction of ``exp`` after Cody
and Waite, *Software Manual for the Elementary Functions* (1980), chapter 6.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, f32

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 10 bits, so that n * _LN2_HIGH is exact for |n| < 2^14
_LN2_LOW = -2.1219444005469057e-4
# exp(r) = 1 + r + r^2 * poly(r), |r| <= ln(2) / 2
_EXP = (
    0.4999999403953552,
    0.1666651964187622,
    0.04166839271783829,
    0.008368780836462975,
    0.001381446490995586,
)
# erf(x) = x * P(x^2) / Q(x^2), |x| <= 4
_ERF_P = (
    1.1283791065216064,
    0.19353580474853516,
    0.053100235760211945,
    0.003882862627506256,
    0.00028454166022129357,
    1.986686129384907e-06,
)
_ERF_Q = (
    1.0,
    0.5048491954803467,
    0.11534591764211655,
    0.01520630531013012,
    0.0011854287004098296,
    3.741788896149956e-05,
)
# tanh(x) = x * P(x^2) / Q(x^2), |x| <= 9.02
_TANH_P = (
    1.0,
    0.13379672169685364,
    0.003493980271741748,
    2.0582572687999345e-05,
    1.3317809965940341e-08,
)
_TANH_Q = (
    1.0,
    0.4671298861503601,
    0.02587086893618107,
    0.00032830031705088913,
    7.761502160974487e-07,
)


def _bind(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``let v = value in body(v)``, so that a value used many times is not copied as often."""
    if isinstance(value, tirx.Var | tirx.FloatImm):
        return body(value)
    var = tirx.Var("v", "float32")
    return tirx.Let(var, value, body(var))


def _clamp(x: Expr, low: float, high: float) -> Expr:
    # Select, not max/min: every comparison with NaN is false, so NaN goes through.
    def below(v: Expr) -> Expr:
        upper = tirx.Select(v > f32(high), f32(high), v)
        return _bind(upper, lambda u: tirx.Select(u < f32(low), f32(low), u))

    return _bind(x, below)


def _polynomial(coefficients: tuple[float, ...], x: Expr) -> Expr:
    result = f32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + f32(c)
    return result


def _odd_rational(p: tuple[float, ...], q: tuple[float, ...], limit: float, x: Expr) -> Expr:
    """x * P(x^2) / Q(x^2) with x clamped to ±limit and the result to ±1."""

    def of_square(v: Expr, t: Expr) -> Expr:
        return _clamp(v * _polynomial(p, t) / _polynomial(q, t), -1.0, 1.0)

    return _bind(_clamp(x, -limit, limit), lambda v: _bind(v * v, lambda t: of_square(v, t)))


def exp(x: Expr) -> Expr:
    """e^x, relative error at most 2e-7; overflows to inf, below 1e-38 it may be flushed to 0."""

    def scaled(n: Expr, r: Expr) -> Expr:
        value = _polynomial(_EXP, r) * r * r + r + f32(1.0)
        # Two factors: 2^n alone does not fit a float32 exponent for n = 128 or n < -126.
        whole = n.astype("int32")
        half = tirx.shift_right(whole, tirx.const(1, "int32"))
        return value * _power_of_two(half) * _power_of_two(whole - half)

    def reduced(v: Expr) -> Expr:
        n = tirx.floor(v * f32(_LOG2E) + f32(0.5))
        return _bind(
            n,
            lambda n: _bind(v - n * f32(_LN2_HIGH) - n * f32(_LN2_LOW), lambda r: scaled(n, r)),
        )

    return _bind(_clamp(x, -104.0, 89.0), reduced)


def _power_of_two(n: Expr) -> Expr:
    """2^n for an int32 n in [-126, 127], by building the exponent field."""
    bits = tirx.shift_left(n + tirx.const(127, "int32"), tirx.const(23, "int32"))
    return tirx.reinterpret("float32", bits)


def erf(x: Expr) -> Expr:
    """Error function, absolute and relative error at most 5e-7."""
    return _odd_rational(_ERF_P, _ERF_Q, 4.0, x)


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent, absolute and relative error at most 5e-7."""
    return _odd_rational(_TANH_P, _TANH_Q, 9.02, x)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x), relative error at most 5e-7."""
    return f32(1.0) / (f32(1.0) + exp(-x))


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return _bind(x, lambda v: tirx.Select(v < f32(0.0), f32(0.0), v))


def gelu(x: Expr) -> Expr:
    """x/2 (1 + erf(x / sqrt 2)): ONNX Gelu, approximate="none"; error at most 1e-6 max(1, |x|)."""
    return _bind(x, lambda v: f32(0.5) * v * (f32(1.0) + erf(v * f32(0.7071067811865476))))


def gelu_tanh(x: Expr) -> Expr:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): ONNX Gelu with approximate="tanh"."""

    def body(v: Expr) -> Expr:
        inner = f32(0.7978845608028654) * (v + f32(0.044715) * v * v * v)
        return f32(0.5) * v * (f32(1.0) + tanh(inner))

    return _bind(x, body)


def silu(x: Expr) -> Expr:
    """x * sigmoid(x)."""
    return _bind(x, lambda v: v / (f32(1.0) + exp(-v)))


def relu6(x: Expr) -> Expr:
    """min(max(x, 0), 6)."""
    return _clamp(x, 0.0, 6.0)


def hardsigmoid(x: Expr) -> Expr:
    """min(max(x / 6 + 1/2, 0), 1): torch's Hardsigmoid, ONNX HardSigmoid with alpha = 1/6."""
    return _clamp(x * f32(1 / 6) + f32(0.5), 0.0, 1.0)


def hardswish(x: Expr) -> Expr:
    """x * hardsigmoid(x): ONNX HardSwish (opset 14)."""
    return _bind(x, lambda v: v * hardsigmoid(v))


ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "": lambda x: x,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "silu": silu,
    "relu6": relu6,
    "hardsigmoid": hardsigmoid,
    "hardswish": hardswish,
}


def activation(name: str, x: Expr) -> Expr:
    """Apply an activation of ``apq.Linear`` by name, a key of `ACTIVATIONS` (``""`` is none)."""
    return ACTIVATIONS[name](x)

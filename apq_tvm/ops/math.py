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

import functools
import math as libm
from collections.abc import Callable

from tvm import tirx

from apq_tvm.tensorize.exprs import Expr, f32

_INF, _NAN, _QUARTER = libm.inf, libm.nan, libm.pi / 2
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
# sigmoid(x) = 1/2 + x * P(x^2) / Q(x^2), |x| <= 18, as ONNX Runtime has it
_SIGMOID_P = (
    2.48287947061529e-01,
    8.51377133304701e-03,
    6.08574864600143e-05,
    1.15627324459942e-07,
    4.37031012579801e-11,
)
_SIGMOID_Q = (
    9.93151921023180e-01,
    1.16817656904453e-01,
    1.70198817374094e-03,
    6.29106785017040e-06,
    5.76102136993427e-09,
    6.10247389755681e-13,
)
# tanh(x) = x * P(x^2) / Q(x^2), |x| <= 9, likewise
_TANH_RATIO_P = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_TANH_RATIO_Q = (
    4.89352518554385e-03,
    2.26843463243900e-03,
    1.18534705686654e-04,
    1.19825839466702e-06,
)
# log(1 + r) = r - r^2 / 2 + r^3 * poly(r), sqrt(1/2) - 1 <= r < sqrt(2) - 1
_LOG = (
    0.33333331709694713,
    -0.25000821056247624,
    0.20001226667326497,
    -0.1662335647821947,
    0.14201762470655255,
    -0.1316019506810401,
    0.12761550336744418,
    -0.07634429835995143,
)
# sin(r) = r + r^3 * poly(r^2), |r| <= pi / 2
_SIN = (
    -0.16666660457323687,
    0.008333088019208025,
    -0.00019811100711117097,
    2.608903688051771e-06,
)
# atan(x) = x * P(x^2) / Q(x^2), |x| <= 1
_ATAN_P = (0.9999999797553581, 0.8983950935504805, 0.13761230436694216)
_ATAN_Q = (1.0, 1.2317263772416098, 0.34822108348127934, 0.012377698370032539)


def _bind(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``let v = value in body(v)``, so that a value used many times is not copied as often."""
    if isinstance(value, tirx.Var | tirx.FloatImm):
        return body(value)
    var = tirx.Var("v", str(value.ty))
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


def _odd_rational(
    p: tuple[float, ...], q: tuple[float, ...], limit: float, x: Expr, bounded: bool = True
) -> Expr:
    """x * P(x^2) / Q(x^2) with x clamped to ±limit and, where `bounded`, the result to ±1."""

    def of_square(v: Expr, t: Expr) -> Expr:
        y = v * _polynomial(p, t) / _polynomial(q, t)
        return _clamp(y, -1.0, 1.0) if bounded else y

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


def log(x: Expr) -> Expr:
    """Natural logarithm, error at most 1e-7 + 1e-7 times it; NaN below 0."""

    def reduced(v: Expr, shift: Expr) -> Expr:
        pattern = tirx.reinterpret("int32", v)
        least = tirx.const(0x3F3504F3, "int32")  # of sqrt(1/2)
        return _bind(
            tirx.shift_right(pattern - least, tirx.const(23, "int32")),
            lambda e: _bind(
                tirx.reinterpret("float32", pattern - tirx.shift_left(e, tirx.const(23, "int32")))
                - f32(1.0),
                lambda r: summed(r, e.astype("float32") - shift),
            ),
        )

    def summed(r: Expr, e: Expr) -> Expr:
        tail = r * r * (r * _polynomial(_LOG, r) - f32(0.5)) + e * f32(_LN2_LOW)
        return tail + r + e * f32(_LN2_HIGH)

    def body(v: Expr) -> Expr:
        small = v < f32(2.0**-126)
        scaled = tirx.Select(small, v * f32(2.0**23), v)
        shift = tirx.Select(small, f32(23.0), f32(0.0))
        value = _bind(scaled, lambda u: _bind(shift, lambda s: reduced(u, s)))
        positive = tirx.Select(v < f32(_INF), value, v)
        other = tirx.Select(tirx.EQ(v, f32(0.0)), f32(-_INF), f32(_NAN))
        return tirx.Select(v > f32(0.0), positive, other)

    return _bind(x, body)


def sin(x: Expr) -> Expr:
    """Sine, error at most 3e-7 where |x| <= 2^28, behind that something in [-1, 1]."""
    return _half_turns(x, 0.0)


def cos(x: Expr) -> Expr:
    """Cosine, as `sin`."""
    return -_half_turns(x, 0.5)


def _half_turns(x: Expr, shift: float) -> Expr:
    """(-1)^n sin(r), x = (n + shift) pi + r and |r| <= pi/2: r is found in float64."""
    wide = functools.partial(tirx.const, dtype="float64")

    def body(v: Expr, n: Expr) -> Expr:
        r = _clamp((v - (n + wide(shift)) * wide(libm.pi)).astype("float32"), -_QUARTER, _QUARTER)
        odd = n - wide(2.0) * tirx.floor(n * wide(0.5))
        sign = (wide(1.0) - wide(2.0) * odd).astype("float32")
        return _bind(r, lambda r: sign * (r * (r * r) * _polynomial(_SIN, r * r) + r))

    return _bind(
        x.astype("float64"),
        lambda v: _bind(
            tirx.floor(v * wide(1.0 / libm.pi) + wide(0.5 - shift)), lambda n: body(v, n)
        ),
    )


def atan(x: Expr) -> Expr:
    """Arc tangent, error at most 2e-7."""

    def body(v: Expr) -> Expr:
        size = tirx.Select(v < f32(0.0), -v, v)
        inner = tirx.Select(size > f32(1.0), f32(1.0) / size, size)
        value = _bind(
            _bind(inner, _atan_of_one),
            lambda y: tirx.Select(size > f32(1.0), f32(_QUARTER) - y, y),
        )
        return _bind(value, lambda y: tirx.Select(v < f32(0.0), -y, y))

    return _bind(x, body)


def _atan_of_one(x: Expr) -> Expr:
    """Arc tangent of |x| <= 1."""

    def of_square(t: Expr) -> Expr:
        return x * _polynomial(_ATAN_P, t) / _polynomial(_ATAN_Q, t)

    return _bind(x * x, of_square)


def asin(x: Expr) -> Expr:
    """Arc sine, error at most 3e-7; NaN outside [-1, 1]."""

    def body(v: Expr) -> Expr:
        other = tirx.sqrt((f32(1.0) - v) * (f32(1.0) + v))
        return f32(2.0) * _bind(v / (f32(1.0) + other), _atan_of_one)

    return _bind(x, body)


def acos(x: Expr) -> Expr:
    """Arc cosine, error at most 4e-7; NaN outside [-1, 1]."""

    def body(v: Expr) -> Expr:
        return f32(2.0) * atan(tirx.sqrt((f32(1.0) - v) / (f32(1.0) + v)))

    return _bind(x, body)


def erf(x: Expr) -> Expr:
    """Error function, absolute and relative error at most 5e-7."""
    return _odd_rational(_ERF_P, _ERF_Q, 4.0, x)


def tanh(x: Expr) -> Expr:
    """Hyperbolic tangent, absolute and relative error at most 5e-7."""
    return _odd_rational(_TANH_P, _TANH_Q, 9.02, x)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^-x), relative error at most 5e-7."""
    return f32(1.0) / (f32(1.0) + exp(-x))


def sigmoid_ratio(x: Expr) -> Expr:
    """1 / (1 + e^-x), absolute error at most 2e-7: ONNX Runtime's, bit for bit.

    Where a file rounds to integers what comes of it, one last place more is another integer. The
    coefficients are those of MLAS (``MlasComputeLogistic``), after Eigen's; each step of the
    polynomials is one fused multiply-add, which processors without it round twice.
    """
    ratio = functools.partial(_odd_rational, _SIGMOID_P, _SIGMOID_Q, 18.0, bounded=False)
    return _bind(x, lambda v: _clamp(ratio(v) + f32(0.5), 0.0, 1.0))


def tanh_ratio(x: Expr) -> Expr:
    """Hyperbolic tangent, absolute error at most 2e-7: ONNX Runtime's (``MlasComputeTanh``)."""
    return _odd_rational(_TANH_RATIO_P, _TANH_RATIO_Q, 9.0, x, bounded=False)


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return _bind(x, lambda v: tirx.Select(v < f32(0.0), f32(0.0), v))


def gelu(x: Expr) -> Expr:
    """x/2 (1 + erf(x / sqrt 2)): ONNX Gelu, approximate="none"; error at most 1e-6 max(1, |x|).

    `erf` with the root in its coefficients, and nothing that only its own ends need.
    """
    p = tuple(c * libm.sqrt(0.5) / 2**i for i, c in enumerate(_ERF_P))
    q = tuple(c / 2**i for i, c in enumerate(_ERF_Q))

    def body(v: Expr) -> Expr:
        erf_of = _odd_rational(p, q, 4.0 * libm.sqrt(2.0), v, bounded=False)
        return _bind(f32(0.5) * v, lambda half: half * erf_of + half)

    return _bind(x, body)


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
    "sigmoid_ratio": sigmoid_ratio,
    "tanh_ratio": tanh_ratio,
    "silu": silu,
    "relu6": relu6,
    "hardsigmoid": hardsigmoid,
    "hardswish": hardswish,
}


def activation(name: str, x: Expr) -> Expr:
    """Apply an activation of ``apq.Linear`` by name, a key of `ACTIVATIONS` (``""`` is none)."""
    return ACTIVATIONS[name](x)

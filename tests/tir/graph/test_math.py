"""apq_tvm.ops.math against libm, scalar and vectorized, at the ends of the range and on NaN."""

from __future__ import annotations

import math as libm
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from tvm.script import tirx as T  # noqa: E402

from apq_tvm.ops import math  # noqa: E402
from apq_tvm.ops.linear.spec import ACTIVATIONS as EPILOGUES  # noqa: E402

N = 1 << 14


def _ref(f: Any) -> Any:
    return np.vectorize(f, otypes=[np.float64])


def _sigmoid(v: float) -> float:
    return 1 / (1 + libm.exp(-v)) if v > -700 else 0.0


REFERENCE = {
    "exp": np.exp,
    "erf": _ref(libm.erf),
    "tanh": np.tanh,
    "sigmoid": _ref(_sigmoid),
    "relu": lambda v: np.maximum(v, 0),
    "gelu": _ref(lambda v: 0.5 * v * (1 + libm.erf(v / libm.sqrt(2)))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(libm.sqrt(2 / libm.pi) * (v + 0.044715 * v**3))),
    "silu": _ref(lambda v: v * _sigmoid(v)),
}
NARROW = {
    "log": np.log,
    "sin": np.sin,
    "cos": np.cos,
    "atan": np.arctan,
    "asin": np.arcsin,
    "acos": np.arccos,
}
RELATIVE = {"exp": 2e-7, "erf": 5e-7, "tanh": 5e-7, "sigmoid": 5e-7}


def _build(name: str) -> Any:
    function = getattr(math, name)

    @T.prim_func(s_tir=True)
    def kernel(x: T.handle, y: T.handle) -> None:
        a = T.match_buffer(x, (N,), "float32", align=4)
        b = T.match_buffer(y, (N,), "float32", align=4)
        for i in T.serial(N):
            with T.sblock("map"):
                v = T.axis.spatial(N, i)
                b[v] = function(a[v])

    sch = tvm.s_tir.Schedule(kernel)
    _, inner = sch.split(sch.get_loops(sch.get_sblock("map"))[0], [None, 8])
    sch.vectorize(inner)
    return tvm.compile(sch.mod, target={"kind": "llvm", "mcpu": "x86-64-v3"})


def _run(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    padded = np.zeros(N, np.float32)
    padded[: x.size] = x
    out = tvm.runtime.empty((N,), "float32")
    _build(name)(tvm.runtime.tensor(padded), out)
    return out.numpy()[: x.size]


@pytest.mark.parametrize("name", REFERENCE)
def test_error_bound(name: str) -> None:
    near = np.linspace(-12, 12, N // 2)
    far = np.linspace(-87, 88, N // 2)
    x = np.concatenate([near, far]).astype(np.float32)
    want = REFERENCE[name](x.astype(np.float64))
    error = np.abs(_run(name, x) - want)
    assert (error / np.maximum(1.0, np.abs(want))).max() <= 1e-6
    if name in RELATIVE:
        assert (error / np.maximum(np.abs(want), 1e-37)).max() <= RELATIVE[name]


@pytest.mark.parametrize(
    ("name", "low", "high", "bound"),
    [
        ("log", 1e-45, 3e38, 2e-7),
        ("log", 0.5, 2, 1e-7),
        ("sin", -2e8, 2e8, 3e-7),
        ("cos", -2e8, 2e8, 3e-7),
        ("sin", -7, 7, 2e-7),
        ("cos", -7, 7, 2e-7),
        ("atan", -1e30, 1e30, 2e-7),
        ("atan", -2, 2, 2e-7),
        ("asin", -1, 1, 3e-7),
        ("acos", -1, 1, 4e-7),
    ],
)
def test_error_within_a_range(name: str, low: float, high: float, bound: float) -> None:
    """Of the value, where it is above 1; in steps of equal size, and of equal ratio."""
    ratios = np.geomspace(max(abs(low), 1e-30) if low > 0 else high * 1e-12, high, N // 4)
    x = np.concatenate([np.linspace(low, high, N // 4), ratios, -ratios if low < 0 else ratios])
    x = np.clip(x, low, high).astype(np.float32)
    want = NARROW[name](x.astype(np.float64))
    error = np.abs(_run(name, x) - want) / np.maximum(1.0, np.abs(want))
    assert error.max() <= bound


def test_what_has_no_value() -> None:
    """Limits, and NaN where numpy has it; 0 keeps nothing but being 0."""
    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, -1, 1, -2, 2, 1e-40, 3e38, -3e38], np.float32)
    with np.errstate(all="ignore"):
        for name in ("log", "atan", "asin", "acos"):
            np.testing.assert_allclose(_run(name, x), NARROW[name](x), rtol=1e-6, atol=1e-6)
    for name in ("sin", "cos"):
        got = _run(name, x)
        assert np.isnan(got[:3]).all() and (np.abs(got[3:]) <= 1).all()


@pytest.mark.parametrize("name", REFERENCE)
def test_limits_and_nan(name: str) -> None:
    x = np.array([-np.inf, -1e30, -200, 0, 200, 1e30, np.inf, np.nan], np.float32)
    got = _run(name, x)
    assert np.isnan(got[-1])
    if name in ("exp", "relu"):
        assert got[-2] == np.inf
    if name in ("exp", "sigmoid", "relu"):
        assert got[0] == got[1] == 0
    if name in ("erf", "tanh"):
        assert got[0] == -1 and got[6] == 1
    if name in ("gelu", "gelu_tanh", "silu"):
        assert got[5] == np.float32(1e30) and got[2] == 0
    assert got[3] == REFERENCE[name](np.zeros(1))[0]


def test_activation_names_cover_the_linear_epilogues() -> None:
    assert set(math.ACTIVATIONS) == {*EPILOGUES, "sigmoid_ratio", "tanh_ratio"}

"""Refitted scales and descending codes: never worse, for any family, shape and weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import check_tensor, dequantize
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.quantizers.feedback.descend import descend
from apq_tvm.quantizers.feedback.gptq import improve
from apq_tvm.quantizers.feedback.refit import refit, row_errors
from apq_tvm.types import QuantizedTensor

SCHEMES = (
    "W1A8g32", "W2A8g32", "W3zA8g16", "W8A8", "W2*A8g32", "nl4", "cb2", "cb3g64", "bcq2g32",
    "bcq3", "W2sA8", "W3sA8", "mixed24", "mixed24o0", "mixed24r100", "anyprec2-2sA8",
)  # fmt: skip

KINDS = ("normal", "zeros", "outlier", "denormal", "equal")


def quantized(text: str, w: np.ndarray) -> QuantizedTensor:
    scheme = parse_scheme(text)
    assert scheme is not None
    return quantize_tensor(w, scheme)


def weights(n: int, k: int, kind: str, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    if kind == "outlier":
        w[n // 2, k // 3] = 1e4
    elif kind != "normal":
        w = np.full_like(w, {"zeros": 0.0, "denormal": 1e-40, "equal": 0.7}[kind])
    return w


def hessian(k: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3 * k, max(k // 3, 1))) @ rng.standard_normal((max(k // 3, 1), k))
    x += 0.2 * rng.standard_normal(x.shape)
    return np.asarray(x.T @ x / len(x) + 0.01 * np.eye(k), np.float32)


def errors(w: np.ndarray, tensor: QuantizedTensor, h: np.ndarray) -> np.ndarray:
    return row_errors(dequantize(tensor) - w, h)


@pytest.mark.parametrize("text", SCHEMES)
@settings(max_examples=6)
@given(n=st.integers(1, 34), k=st.integers(1, 90), kind=st.sampled_from(KINDS))
def test_no_step_is_worse(text: str, n: int, k: int, kind: str) -> None:
    w, h = weights(n, k, kind, n + k), hessian(k)
    tensor = quantized(text, w)
    start = errors(w, tensor, h)
    # Parameters that rows share may favour one of them.
    room = 1e-4 * start.sum() + 1e-9
    fitted = refit(w, tensor, h)
    check_tensor(fitted, "w")
    np.testing.assert_array_equal(fitted.codes, tensor.codes)
    assert errors(w, fitted, h).sum() <= start.sum() + room
    moved = descend(w, fitted, h, "w")
    check_tensor(moved, "w")
    assert (errors(w, moved, h) <= errors(w, fitted, h) + room).all()


@pytest.mark.parametrize("text", ("W3A8g32", "nl4", "bcq2g32", "W2sA8"))
def test_refit_is_least_squares(text: str) -> None:
    """With enough steps no scale can be moved for the better: the gradient is near zero."""
    w, h = weights(5, 64, "normal"), hessian(64)
    tensor = quantized(text, w)
    for _ in range(30):
        tensor = refit(w, tensor, h)
    here = errors(w, tensor, h)
    for factor in (0.98, 1.02):
        scales = tensor.scales.copy()
        scales.reshape(5, -1)[:, 0] *= np.float16(factor)
        assert (errors(w, replace(tensor, scales=scales), h) >= here * 0.999).all()


def test_centroids_follow_their_members() -> None:
    """With H the identity the best centroids are the means of the weights that have their code."""
    w = weights(6, 400, "normal")
    tensor = quantized("anyprec2-2sA32", w)
    spoilt = {key: table * np.float16(0.9) for key, table in tensor.tables.items()}
    fitted = refit(w, replace(tensor, tables=spoilt), np.eye(400, dtype=np.float32))
    table = fitted.tables["centroids2"].astype(np.float32)
    blocks = 6 // len(table)
    scale = tensor.scales.astype(np.float32)
    for row in range(len(table)):
        part = slice(row * blocks, (row + 1) * blocks)
        for code in range(4):
            mine = tensor.codes[part] == code
            weight = (scale[part] ** 2 * mine).sum()
            mean = (w[part] * scale[part] * mine).sum() / weight
            assert table[row, code] == pytest.approx(mean, rel=2e-3)


def test_descending_stops_where_no_code_can_do_better() -> None:
    """Ten sweeps later every single code is the best of all, given the others."""
    w, h = weights(3, 24, "normal"), hessian(24)
    tensor = quantized("W2A8", w)
    for _ in range(10):
        tensor = descend(w, tensor, h, "w")
    best = errors(w, tensor, h)
    for column in range(24):
        for code in range(1, 4):
            codes = tensor.codes.copy()
            codes[:, column] = code
            assert (errors(w, replace(tensor, codes=codes), h) >= best * 0.9999).all()


def test_turns_gain_on_rounding() -> None:
    w, h = weights(16, 96, "normal"), hessian(96)
    for text in ("W3A8g32", "nl4", "cb3"):
        tensor = quantized(text, w)
        assert errors(w, improve(w, tensor, h, "w"), h).sum() < 0.6 * errors(w, tensor, h).sum()

"""Error feedback at every width at once: prefixes stay, each width gains, no matrix upsets it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.errors import BadScheme
from apq_tvm.formats import check_tensor, dequantize, details, parse_scheme
from apq_tvm.formats.anyprec import alone, channels_of, choose_channels, table_name
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.quantizers.feedback.anyprec import (
    WEIGHT,
    descend_widths,
    feed_back,
    nearest_path,
    one_width,
    refit_widths,
)
from apq_tvm.quantizers.feedback.error_feedback import feedback_of
from apq_tvm.quantizers.feedback.refit import row_errors
from apq_tvm.types import QuantizedTensor, Scheme


def scheme(text: str) -> Scheme:
    parsed = parse_scheme(text)
    assert parsed is not None
    return parsed


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def correlated(k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * k, max(k // 4, 1))) @ rng.standard_normal((max(k // 4, 1), k))
    x += 0.3 * rng.standard_normal(x.shape)
    return np.asarray(x.T @ x / len(x), np.float32)


def errors(w: np.ndarray, tensor: QuantizedTensor, h: np.ndarray) -> dict[int, float]:
    return {
        bits: float(row_errors(dequantize(tensor, bits) - w, h).sum())
        for bits in tensor.scheme.widths
    }


@pytest.mark.parametrize(
    "text", ("anyprec3-8", "anyprec2-6sA8", "anyprec3-8c1A8", "anyprec4-4sA8", "anyprec2-3c8A32")
)
def test_every_width_gains(text: str) -> None:
    k = 640 if text == "anyprec3-8" else 160  # each cell of 5 bits has some weights to divide it by
    w, h = weights(24, k), correlated(k)
    start = quantize_tensor(w, scheme(text))
    fed = feed_back(w, start, feedback_of(h, "layer", act_order=True))
    check_tensor(fed, "layer")
    assert details(fed) == details(start)
    before, after = errors(w, start, h), errors(w, fed, h)
    divided = text == "anyprec3-8"  # codes of 7 and 8 bits pay for what narrow ones gain
    for i, bits in enumerate(fed.scheme.widths):
        most = 0.75 if i < 2 else 4.0 if divided and bits > 6 else 1.0
        assert after[bits] < most * before[bits], bits
    ordered = [after[bits] for bits in fed.scheme.widths]
    # Between the widths of tables, and between those that divide their cells.
    for part in (ordered[:3], ordered[3:]) if divided else (ordered,):
        assert part == sorted(part, reverse=True)


@settings(max_examples=20)
@given(
    st.integers(1, 12),
    st.integers(1, 50),
    st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted),
    st.sampled_from(("", "c1", "c4", "c1A32")),
    st.sampled_from(("normal", "zeros", "outlier", "denormal", "equal")),
)
def test_any_matrix(n: int, k: int, widths: list[int], rest: str, kind: str) -> None:
    w = weights(n, k, n * k)
    if kind == "outlier":
        w[0, 0] = 1e4
    elif kind != "normal":
        w = np.full_like(w, {"zeros": 0.0, "denormal": 1e-40, "equal": 0.7}[kind])
    tensor = quantize_tensor(w, scheme(f"anyprec{widths[0]}-{widths[1]}{rest}"))
    fed = feed_back(w, tensor, feedback_of(correlated(k), "layer"))
    check_tensor(fed, "layer")
    np.testing.assert_array_equal(fed.scales, tensor.scales)
    # Every width is what its prefix of the codes and its own table say.
    for bits in fed.scheme.widths:
        np.testing.assert_array_equal(dequantize(one_width(fed, bits)), dequantize(fed, bits))


def test_steps_after_the_walk_are_never_worse() -> None:
    w, h = weights(16, 96), correlated(96)
    start = quantize_tensor(w, scheme("anyprec2-4sA8"))
    fitted = refit_widths(w, start, h)
    moved = descend_widths(w, fitted, h)

    def total(tensor: QuantizedTensor) -> float:
        return sum(e * WEIGHT**i for i, e in enumerate(errors(w, tensor, h).values()))

    assert all(errors(w, fitted, h)[b] <= e * 1.0001 for b, e in errors(w, start, h).items())
    assert total(moved) < total(fitted) < total(start)


def test_paths_are_the_best_of_all() -> None:
    """Tried by hand: no path through the tree of codes is nearer to the targets of all widths."""
    tensor = quantize_tensor(weights(7, 60), scheme("anyprec1-3c1A8"))
    targets = np.random.default_rng(3).standard_normal((3, 7)).astype(np.float32)
    codes, values = nearest_path(tensor)(0, targets.reshape(-1))
    costs = np.zeros((8, 7))
    for code in range(8):
        same = replace(tensor, codes=np.full_like(tensor.codes, code))
        for i, bits in enumerate(tensor.scheme.widths):
            costs[code] += WEIGHT**i * (dequantize(same, bits)[:, 0] - targets[i]) ** 2
    np.testing.assert_allclose(costs[codes, np.arange(7)], costs.min(axis=0), rtol=1e-4)
    decoded = replace(tensor, codes=np.repeat(codes[:, None], 60, axis=1))
    for i, bits in enumerate(tensor.scheme.widths):
        np.testing.assert_allclose(
            values.reshape(3, 7)[i], dequantize(decoded, bits)[:, 0], rtol=1e-6
        )


@pytest.mark.parametrize("n", (1, 3, 24, 33))
@pytest.mark.parametrize("channels", (1, 2, 8, 64))
def test_spelled_channels_share_tables(n: int, channels: int) -> None:
    kind = scheme(f"anyprec2-3c{channels}A8")
    assert str(kind) == f"anyprec2-3c{channels}A8"
    tensor = quantize_tensor(weights(n, 40), kind)
    assert choose_channels(n, 40, kind) == channels_of(tensor)
    assert len(tensor.tables[table_name(2)]) == -(-n // channels)
    assert str(alone(kind, 2)) == f"anyprec2-2c{channels}A8"
    assert str(alone(scheme("anyprec3-8sA4"), 5)) == "anyprec5-5sA4"


def test_groups_of_activations_are_not_those_of_weights() -> None:
    """Nothing that chooses codes or centroids reads them."""
    w, h = weights(8, 80), correlated(80)
    fed = [
        feed_back(w, quantize_tensor(w, scheme(word)), feedback_of(h, "layer", act_order=True))
        for word in ("anyprec2-4sA8", "anyprec2-4s")
    ]
    for bits in fed[0].scheme.widths:
        np.testing.assert_array_equal(*(dequantize(tensor, bits) for tensor in fed))


def test_other_sharing_than_spelled_is_refused() -> None:
    tensor = quantize_tensor(weights(16, 40), scheme("anyprec2-3c4A8"))
    with pytest.raises(BadScheme, match=r"layer: 4 tables .* anyprec2-3c1A8"):
        check_tensor(replace(tensor, scheme=scheme("anyprec2-3c1A8")), "layer")
    for text in ("anyprec2-3c3A8", "anyprec2-3c0A8", "anyprec2-3c32768A8"):
        with pytest.raises(BadScheme, match="powers of 2"):
            parse_scheme(text)

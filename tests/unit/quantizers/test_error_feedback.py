"""Error feedback: better than rounding where inputs are correlated, the same where they are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.errors import BadInput, BadScheme
from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import FAMILIES, check_tensor, dequantize
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.quantizers.families import rtn
from apq_tvm.quantizers.feedback.error_feedback import MAX_DAMPING, feedback_of, output_error, walk
from apq_tvm.quantizers.feedback.gptq import feedback_codes, layer_feedback, quantize_fed_back
from apq_tvm.types import LayerStats, QuantizedTensor, Scheme

ONES = np.ones(48, np.float32)


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def correlated(k: int, seed: int = 0) -> np.ndarray:
    """H of inputs that lie near a subspace of a quarter of their dimensions."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * k, max(k // 4, 1))) @ rng.standard_normal((max(k // 4, 1), k))
    x += 0.3 * rng.standard_normal(x.shape)
    return np.asarray(x.T @ x / len(x), np.float32)


def scheme_of(text: str) -> Scheme:
    scheme = parse_scheme(text)
    assert scheme is not None
    return scheme


def fed_back(
    w: np.ndarray, scheme: Scheme, h: np.ndarray, act_order: bool = True
) -> QuantizedTensor:
    feedback = feedback_of(h, "layer", act_order=act_order)
    square = np.ascontiguousarray(h.diagonal())
    stats = LayerStats(square, np.zeros_like(square), np.sqrt(square), 1, h)
    return quantize_fed_back(w, scheme, "layer", stats, feedback)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("text", ["W1A8g32", "W2A8g32", "W3A8", "W4zA8g16", "W4A8g32", "W8A8"])
def test_feedback_beats_rounding_on_correlated_inputs(text: str, act_order: bool) -> None:
    w, h, scheme = weights(32, 128), correlated(128), scheme_of(text)
    plain = output_error(w - dequantize(quantize_tensor(w, scheme)), h, ONES)
    fed = fed_back(w, scheme, h, act_order)
    check_tensor(fed, "layer")
    assert output_error(w - dequantize(fed), h, ONES) < 0.6 * plain


@settings(max_examples=25)
@given(
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([16, 32, 64, -1]),
    st.sampled_from(["normal", "zeros", "outlier", "denormal", "equal"]),
)
def test_without_correlation_feedback_is_rounding(
    n: int, k: int, bits: int, zero: bool, group: int, kind: str
) -> None:
    w = weights(n, k, seed=n * k)
    if kind == "outlier":
        w[0, 0] = 1e4
    elif kind != "normal":
        w = np.full_like(w, {"zeros": 0.0, "denormal": 1e-40, "equal": 0.7}[kind])
    scheme = Scheme(bits, zero, group_size=group)
    start = rtn.quantize_tensor(w, scheme)  # the registry's would also keep the sums of rows
    fed = feedback_codes(w, start, feedback_of(np.eye(k, dtype=np.float32), "layer"), "layer")
    check_tensor(fed, "layer")
    np.testing.assert_allclose(
        np.abs(dequantize(fed) - w), np.abs(dequantize(start) - w), rtol=1e-4, atol=1e-7
    )


def test_columns_make_good_the_error_of_one_column() -> None:
    """By hand for K=2: after column 0 lost e, column 1 gains e * H01 / H11."""
    h = np.array([[2.0, 1.0], [1.0, 4.0]], np.float32)
    seen: list[np.ndarray] = []

    def halve(now: np.ndarray, columns: np.ndarray) -> np.ndarray:
        seen.append(now.copy())
        return now / 2

    walk(np.array([[1.0, 1.0]], np.float32), feedback_of(h, "layer", damping=0.0), halve)
    np.testing.assert_allclose(seen[0], [[1.0]])
    np.testing.assert_allclose(seen[1], [[1.0 + 0.5 * 1.0 / 4.0]], rtol=1e-6)


def test_columns_in_steps_leave_the_least_squares_rest() -> None:
    """Two columns at once: the rest moves by Δ H_ab / H_bb, the best answer to what they lost."""
    h, w = correlated(6), weights(3, 6)
    seen: list[np.ndarray] = []

    def zero_first(now: np.ndarray, columns: np.ndarray) -> np.ndarray:
        seen.append(now.copy())
        return np.zeros_like(now) if columns[0] == 0 else now

    walk(w, feedback_of(h, "layer", damping=0.0), zero_first, step=2)
    best = w[:, 2:] + w[:, :2] @ h[:2, 2:] @ np.linalg.inv(h[2:, 2:])
    np.testing.assert_allclose(seen[1], best[:, :2], rtol=2e-3, atol=2e-3)


def test_groups_are_entered_with_their_present_value() -> None:
    h, w = correlated(40), weights(4, 40)
    entered: list[tuple[int, int]] = []

    def enter(now: np.ndarray, columns: np.ndarray) -> None:
        entered.append((int(columns[0]), len(columns)))
        assert now.shape == (4, len(columns))

    walk(w, feedback_of(h, "layer"), lambda now, _: now, group=16, enter_group=enter)
    assert entered == [(0, 16), (16, 16), (32, 8)]


def test_exact_columns_are_left_alone() -> None:
    w = weights(5, 20)
    np.testing.assert_array_equal(walk(w, feedback_of(correlated(20), "l"), lambda now, _: now), w)


def test_singular_h_is_damped_and_reported() -> None:
    x = weights(4, 64)  # 4 samples for 64 channels
    feedback = feedback_of(x.T @ x / 4, "layer", damping=0.0)
    assert 0 < feedback.damping <= MAX_DAMPING
    assert "damped" in replace(feedback, damping=0.1).note()
    h = correlated(16)
    h[3], h[:, 3] = 0, 0
    assert feedback_of(h, "layer").note() == "1 input channels are 0 in every sample"


@pytest.mark.parametrize(
    ("h", "words"),
    [
        (np.zeros((4, 4), np.float32), "0 in every calibration sample"),
        (np.full((4, 4), np.nan, np.float32), "NaN or infinity"),
        (-np.eye(4, dtype=np.float32), "negative diagonal"),
        (np.ones((4, 3), np.float32), "shape"),
        (np.array([[1, -9], [-9, 1]], np.float32), "singular even with"),
    ],
)
def test_bad_h_is_named(h: np.ndarray, words: str) -> None:
    with pytest.raises(BadInput, match=f"'enc.fc'.*{words}"):
        feedback_of(h, "enc.fc")


def test_feedback_needs_h_of_the_layer() -> None:
    stats = LayerStats(ONES, ONES, ONES, 100)
    with pytest.raises(BadInput, match="--hessian"):
        layer_feedback(stats, 48, "fc")
    with pytest.raises(BadInput, match="another model"):
        layer_feedback(replace(stats, hessian=correlated(16)), 48, "fc")


SCHEMES = [f.examples[0] for f in FAMILIES if f.name in ("balance", "bcq", "cb", "nl", "super")]


@pytest.mark.parametrize("text", [*SCHEMES, "W2*A8g32", "cb3g64", "bcq2g32"])
def test_feedback_improves_other_families(text: str) -> None:
    w, h, scheme = weights(16, 128), correlated(128), scheme_of(text)
    start = quantize_tensor(w, scheme)
    walked = feedback_codes(w, start, feedback_of(h, "layer"), "layer")
    np.testing.assert_array_equal(walked.scales, start.scales)
    fed = fed_back(w, scheme, h)
    check_tensor(fed, "layer")
    before, after, last = (output_error(w - dequantize(t), h, ONES) for t in (start, walked, fed))
    assert after < 0.7 * before
    assert last < 0.9 * after


def test_feedback_refuses_codes_of_several_widths() -> None:
    several = quantize_tensor(weights(4, 32), scheme_of("anyprec2-4"))
    with pytest.raises(BadScheme, match="one width"):
        feedback_codes(weights(4, 32), several, feedback_of(correlated(32), "l"), "layer")

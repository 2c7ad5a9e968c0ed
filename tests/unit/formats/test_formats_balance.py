"""``W2*``: spelling, quality, exact packing at any length, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import BalanceLayout, default_layout, weight_layout
from apq_tvm.errors import BadScheme, PackError, UnsupportedModel
from apq_tvm.formats import bits_per_weight, dequantize, nbytes, parse_scheme
from apq_tvm.formats.balance import CENTRE, GROUPS, balance_scheme
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import LayerStats, QuantizedTensor, Scheme

ADVERSARIAL = {
    "zeros": lambda w: w * 0,
    "equal": lambda w: np.full_like(w, 0.3),
    "outlier": lambda w: np.where(np.arange(w.size).reshape(w.shape) == 5, 3e4, w * 1e-3),
    "denormal": lambda w: w * np.float32(1e-40),
    "tiny": lambda w: w * np.float32(1e-20),
    "large": lambda w: w * np.float32(2e4),
    "normal": lambda w: w,
}


def scheme_of(text: str) -> Scheme:
    scheme = parse_scheme(text)
    assert scheme is not None
    return scheme


def random_tensor(n: int, k: int, group: int, seed: int) -> QuantizedTensor:
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-k // group)
    scales = rng.uniform(0, 2, (n, groups)).astype(np.float16)
    codes = rng.integers(0, 5, (n, k), dtype=np.uint8)
    return QuantizedTensor(codes, scales, None, balance_scheme(8, group))


@pytest.mark.parametrize("text", ["W2*A8", "W2*A8g128", "W2*A8g32", "W2*A8tg64", "W2*A16g128"])
def test_spelling_round_trips(text: str) -> None:
    scheme = scheme_of(text.lower())
    assert str(scheme) == text and scheme.family == "balance"
    assert scheme_of(str(scheme)) == scheme


@pytest.mark.parametrize(
    "text,reason", [("W2*A9", "9 bits"), ("W2*A8g16", "groups of 16"), ("W2*", "W2\\*A8g128")]
)
def test_bad_spelling_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadScheme, match=reason):
        parse_scheme(text)


def error_bound(absmax: np.ndarray) -> np.ndarray:
    """Largest |w - decoded| of groups rounded from their maximum.

    Half a step, and twice the rounding of the float16 scale.
    """
    step = absmax / np.float32(CENTRE)
    return np.asarray(step / 2 + 4 * np.maximum(step * 2.0**-11, 2.0**-24), np.float32)


@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.integers(1, 300),
    st.sampled_from(GROUPS),
    st.sampled_from((4, 8, 16)),
    st.integers(0, 2**31),
)
def test_packing_is_exact_at_any_length(n: int, k: int, group: int, lanes: int, seed: int) -> None:
    tensor = random_tensor(n, k, group, seed)
    layout = default_layout(tensor.scheme, (), lanes)
    assert isinstance(layout, BalanceLayout)
    packed = layout.pack(tensor)
    again = weight_layout(layout.name, tensor.scheme).unpack(packed, n, k, tensor.scheme)
    np.testing.assert_array_equal(again.codes, tensor.codes)
    np.testing.assert_array_equal(again.scales, tensor.scales)
    # 7 bits for every three weights, padding included.
    padded = layout.row_blocks(n) * layout.rows * layout.padded_k(k)
    assert packed.arrays["codes"].nbytes * 8 * 3 == padded * 7


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 200),
    st.sampled_from(GROUPS),
    st.sampled_from(sorted(ADVERSARIAL)),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_error_is_bounded(n: int, k: int, group: int, kind: str, search: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = ADVERSARIAL[kind](rng.standard_normal((n, k)).astype(np.float32)).astype(np.float32)
    scheme = balance_scheme(8, group)
    tensor = quantize_tensor(w, scheme, search=search)
    error = np.abs(dequantize(tensor) - w).astype(np.float64)
    width = k if group == -1 else group
    for start in range(0, k, width):
        part = slice(start, start + width)
        bound = error_bound(np.abs(w[:, part]).max(-1)).astype(np.float64)
        if search:  # least squares: the group's whole error is no more than plain rounding's
            plain = dequantize(quantize_tensor(w, scheme, search=False))[:, part]
            most = ((plain - w[:, part]).astype(np.float64) ** 2).sum(-1)
            assert ((error[:, part] ** 2).sum(-1) <= most * (1 + 1e-5) + 1e-80).all()
        else:
            assert (error[:, part].max(-1) <= bound).all()


def relative_error(w: np.ndarray, text: str, search: bool = True) -> tuple[float, float]:
    tensor = quantize_tensor(w, scheme_of(text), search=search)
    error = ((dequantize(tensor) - w) ** 2).mean() / (w**2).mean()
    return float(error), bits_per_weight(tensor)


@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_better_than_two_bits_at_no_more_bits(kind: str) -> None:
    """Balanced levels at 2.46 bits against four levels at 2.51, both searched, and plain RTN."""
    rng = np.random.default_rng(0)
    w = getattr(rng, kind)(size=(128, 1024)).astype(np.float32)
    mine, bits = relative_error(w, "W2*A8g128")
    searched, more = relative_error(w, "W2A8g32")
    plain, _ = relative_error(w, "W2A8g32", search=False)
    assert bits < 2.47 < more
    assert mine < searched / 1.05 and mine < plain / 1.25
    if kind == "normal":
        assert mine < searched / 1.3 and mine < plain / 1.6


def test_search_beats_rounding_and_weighs_channels_that_matter() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((32, 256)).astype(np.float32)
    scheme = balance_scheme(8, 128)
    energy = np.where(np.arange(256) % 8 == 0, 100.0, 1.0).astype(np.float32)
    stats = LayerStats(energy, energy * 0, energy, 1)

    def weighed(tensor: QuantizedTensor) -> float:
        return float((energy * (dequantize(tensor) - w) ** 2).sum())

    plain, searched = (quantize_tensor(w, scheme, search=s) for s in (False, True))
    calibrated = quantize_tensor(w, scheme, stats=stats)
    assert weighed(calibrated) < 0.9 * weighed(searched) < 0.9 * weighed(plain)


def test_nan_infinity_and_overflow_are_refused_by_name() -> None:
    w = np.ones((2, 40), np.float32)
    for value in (np.nan, np.inf):
        spoiled = np.where(w == 1, value, w).astype(np.float32)
        with pytest.raises(UnsupportedModel, match=r"layer\.7"):
            quantize_tensor(spoiled, balance_scheme(), "layer.7")
    with pytest.raises(BadScheme, match=r"layer\.7.*float16"):
        quantize_tensor(w * np.float32(1e6), balance_scheme(), "layer.7")


def test_tensors_that_do_not_fit_are_refused() -> None:
    tensor = random_tensor(4, 40, 32, 0)
    layout = BalanceLayout(8, 32)
    bad = replace(tensor, codes=tensor.codes + 5)
    with pytest.raises(BadScheme, match="exceeds 4"):
        dequantize(bad)
    with pytest.raises(PackError, match=r"blk\.0.*exceeds 4"):
        layout.pack(bad, "blk.0")
    with pytest.raises(PackError, match="cannot hold"):
        BalanceLayout(8, 64).pack(tensor)
    with pytest.raises(PackError, match="12, 24 or 48"):
        BalanceLayout(5)
    with pytest.raises(PackError, match="W2Br24k4 cannot hold W4A8"):
        weight_layout("W2Br24k4", scheme_of("W4A8"))
    packed = layout.pack(tensor)
    with pytest.raises(PackError, match="codes is"):
        layout.unpack(packed, 90, 40, tensor.scheme)
    spoiled = replace(packed, arrays={**packed.arrays, "codes": packed.arrays["codes"] | 0x7F})
    with pytest.raises(PackError, match="exceeds 124"):
        layout.unpack(spoiled, 4, 40, tensor.scheme)


def test_bytes_count_seven_bits_for_three_weights() -> None:
    tensor = random_tensor(3, 96, -1, 0)
    assert nbytes(tensor) == 3 * 96 * 7 // 24 + 3 * 2

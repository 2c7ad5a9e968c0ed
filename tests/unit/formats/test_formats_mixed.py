"""mixed24: spellings, bits, what codes mean, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apq_tvm.errors import BadInput, BadScheme, UnsupportedModel
from apq_tvm.formats import (
    bits_per_weight,
    check_tensor,
    dequantize,
    family_of,
    nbytes,
    parse_scheme,
)
from apq_tvm.formats.mixed import (
    MixedOptions,
    Sizes,
    average_bits,
    dense_part,
    options_of,
    outlier_rows,
    sub_scale_bits,
    wide_columns,
)
from apq_tvm.quantizers.calibrated import Method
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import Calibration, ImportedModel, LayerStats, QuantizedTensor, Scheme

SPELLINGS = ("mixed24", "mixed24o0", "mixed24r50", "mixed24r10o0.5", "mixed24r0", "mixed24r100o1")


def scheme_of(text: str) -> Scheme:
    scheme = parse_scheme(text)
    assert scheme is not None
    return scheme


def normal(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def stats_of(x: np.ndarray) -> LayerStats:
    square, largest = (x * x).mean(0), np.abs(x).max(0)
    return LayerStats(square, x.mean(0), largest, len(x), (x.T @ x / len(x)).astype(np.float32))


@pytest.mark.parametrize("text", (*SPELLINGS, "mixed24A32", "mixed24r12.5A4"))
def test_spellings_are_canonical(text: str) -> None:
    scheme = scheme_of(text)
    assert str(scheme) == text and scheme_of(text.upper()) == scheme
    assert scheme.family == "mixed" and scheme.act_group == -1


def test_defaults_are_left_out() -> None:
    assert scheme_of("mixed24r25o0.20") == scheme_of("mixed24")
    assert options_of(scheme_of("mixed24")) == MixedOptions(25, 0.2)


@pytest.mark.parametrize(
    "text,reason",
    [
        ("mixed24r101", "101 %"),
        ("mixed24o6", "6 % of outliers"),
        ("mixed24o0.2r25", "is known"),
        ("mixed23", "is known"),
        ("mixed24A9", "A9"),
    ],
)
def test_bad_spellings_say_why(text: str, reason: str) -> None:
    with pytest.raises(BadScheme, match=reason):
        parse_scheme(text)


def test_average_bits_are_the_papers() -> None:
    assert round(average_bits(scheme_of("mixed24o0")), 2) == 2.84
    assert round(average_bits(scheme_of("mixed24")), 2) == 2.90
    assert family_of(scheme_of("mixed24")).note(scheme_of("mixed24")).startswith("2.90 bits")
    # Table 4's rows without outliers: 10 % of the groups are 2.6 bits
    assert round(average_bits(scheme_of("mixed24r10o0")), 1) == 2.6


def test_true_bits_count_everything() -> None:
    n, k = 64, 256
    tensor = quantize_tensor(normal(n, k), scheme_of("mixed24"))
    sizes = Sizes.of(tensor.scheme, n, k)
    assert (sizes.groups, sizes.wide, sizes.narrow, sizes.triples) == (16, 4, 12, 4)
    assert sizes.outliers == round(n * k * 0.002)
    bits = 2 * 3 * 64 * n + 4 * 64 * n  # codes
    bits += 16 * sizes.triples * n  # zeros and sub-scales
    bits += (16 + 8) * sizes.narrow * n // 16  # second order, zeros padded to bytes
    bits += (16 + 8) * n + 16 * sizes.groups  # 4-bit groups, their order
    bits += (16 + 16) * sizes.outliers + 32 * (n + 1)  # CSR
    assert nbytes(tensor) * 8 == bits
    assert bits_per_weight(tensor) == bits / (n * k)


def test_large_layers_stay_below_three_bits() -> None:
    tensor = quantize_tensor(normal(256, 1024), scheme_of("mixed24"), search=False)
    assert 2.8 < bits_per_weight(tensor) < 3


def test_codes_mean_what_the_format_says() -> None:
    tensor = quantize_tensor(normal(20, 70), scheme_of("mixed24o1"))
    t, got, j = tensor.tables, dequantize(tensor), 0
    want = np.zeros((20, 70))
    assert tensor.zeros is not None
    for g, wide in enumerate(t["wide"]):
        for n in range(20):
            for k in range(16 * g, min(16 * g + 16, 70)):
                if wide:
                    step, zero = float(tensor.scales[n, 0]), int(tensor.zeros[n, 0])
                else:
                    level = int(t["sub_scales"][n, j]) + int(t["super_zeros"][n // 16, j])
                    step = float(t["super_scales"][n // 16, j]) * level
                    zero = int(t["sub_zeros"][n, j])
                want[n, k] = step * (int(tensor.codes[n, k]) - zero)
        j += not wide
    np.testing.assert_array_equal(dense_part(tensor), want)
    for n, k, value in zip(outlier_rows(tensor), t["columns"], t["outliers"], strict=True):
        want[n, k] += value
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_sub_scales_are_clipped_in_two_of_three_groups() -> None:
    assert sub_scale_bits(7).tolist() == [4, 3, 3, 4, 3, 3, 4]
    tensor = quantize_tensor(normal(64, 512), scheme_of("mixed24"))
    largest = tensor.tables["sub_scales"].max(axis=0)
    assert (largest <= (1 << sub_scale_bits(len(largest))) - 1).all()
    assert largest.max() > 7


@given(
    text=st.sampled_from(SPELLINGS),
    w=arrays(
        np.float32,
        st.tuples(st.integers(1, 20), st.integers(1, 70)),
        elements=st.floats(-1000, 1000, width=32),
    ),
    search=st.booleans(),
)
@settings(max_examples=80)
def test_any_weights(text: str, w: np.ndarray, search: bool) -> None:
    """Valid, deterministic and never further off than a 2-bit step of the largest weights."""
    tensor = quantize_tensor(w, scheme_of(text), search=search)
    check_tensor(tensor, "w")
    again = quantize_tensor(w, scheme_of(text), search=search)
    np.testing.assert_array_equal(dequantize(tensor), dequantize(again))
    error = np.abs(dequantize(tensor) - w).max()
    assert error <= 1.1 * np.abs(w).max() + 2e-6


@pytest.mark.parametrize("text", SPELLINGS)
@pytest.mark.parametrize("value", (0.0, 1e-40, 1e-6, 0.5, -3.0))
def test_equal_weights(text: str, value: float) -> None:
    w = np.full((17, 50), value, np.float32)
    error = np.abs(dequantize(quantize_tensor(w, scheme_of(text))) - w).max()
    assert error <= max(abs(value) * 2e-3, 2.0**-20)


def test_zeros_stay_zero() -> None:
    w = np.zeros((17, 50), np.float32)
    for search in (True, False):
        assert not dequantize(quantize_tensor(w, scheme_of("mixed24"), search=search)).any()


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_not_finite_is_refused_by_name(bad: float) -> None:
    w = normal(4, 32)
    w[1, 3] = bad
    with pytest.raises(UnsupportedModel, match=r"layer7.*\[1, 3\]"):
        quantize_tensor(w, scheme_of("mixed24"), "layer7")


@pytest.mark.parametrize("text", ("mixed24o0", "mixed24"))
def test_weights_beyond_float16_are_refused_by_name(text: str) -> None:
    with pytest.raises(BadScheme, match=r"layer7.*65504.*tensor-type"):
        quantize_tensor(normal(16, 64) * np.float32(1e9), scheme_of(text), "layer7")


def test_one_huge_weight_becomes_an_outlier() -> None:
    w = normal(32, 128)
    w[5, 77] = 3000
    plain = scheme_of("mixed24r0o0.1")
    got = dequantize(quantize_tensor(w, plain))
    assert abs(got[5, 77] - 3000) < 2
    others = np.delete(np.abs(got - w)[5], 77)
    assert others.max() < 2, "its group still has steps for the other weights"


def test_no_outliers_and_a_whole_row_of_them() -> None:
    w = normal(16, 64)
    w[3] *= 1000
    none = quantize_tensor(w, scheme_of("mixed24o0"))
    assert none.tables["outliers"].size == 0 and not none.tables["row_start"].any()
    some = quantize_tensor(w, scheme_of("mixed24r50o4"))  # 41 outliers, 32 2-bit channels
    row = outlier_rows(some)
    narrow = np.flatnonzero(~wide_columns(some.tables["wide"], 64))
    assert set(some.tables["columns"][row == 3]) == set(narrow)
    wanted = np.abs(w[3, narrow]).max() * 2.0**-10
    np.testing.assert_allclose(dequantize(some)[3, narrow], w[3, narrow], atol=wanted)


def test_outliers_are_only_in_two_bit_groups() -> None:
    w = normal(40, 128)
    w[:, 16:32] *= 50  # the most sensitive group holds the largest weights
    tensor = quantize_tensor(w, scheme_of("mixed24o2"))
    assert tensor.tables["wide"][1] == 1
    assert not wide_columns(tensor.tables["wide"], 128)[tensor.tables["columns"]].any()


def test_outliers_help() -> None:
    w = np.random.default_rng(0).standard_t(3, (64, 256)).astype(np.float32)
    errors = [
        np.square(dequantize(quantize_tensor(w, scheme_of(text))) - w).sum()
        for text in ("mixed24o0", "mixed24", "mixed24o1")
    ]
    assert errors[0] > errors[1] > errors[2]


def test_more_four_bit_groups_help() -> None:
    w = normal(64, 256)
    errors = [
        np.square(dequantize(quantize_tensor(w, scheme_of(f"mixed24r{ratio}"))) - w).sum()
        for ratio in (0, 25, 50, 100)
    ]
    assert errors == sorted(errors, reverse=True)


def test_search_helps() -> None:
    w = normal(64, 256)
    errors = [
        np.square(dequantize(quantize_tensor(w, scheme_of("mixed24"), search=s)) - w).sum()
        for s in (False, True)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_sensitive_groups_get_four_bits() -> None:
    w, x = normal(32, 128), normal(500, 128, 1)
    x[:, 48:64] *= 10
    w[:, 96:112] *= 10
    wide = quantize_tensor(w, scheme_of("mixed24"), stats=stats_of(x)).tables["wide"]
    assert wide.tolist() == [0, 0, 0, 1, 0, 0, 1, 0]
    mean_square = replace(stats_of(x), hessian=None)
    again = quantize_tensor(w, scheme_of("mixed24"), stats=mean_square).tables["wide"]
    assert again.tolist() == wide.tolist()


def test_error_feedback_lowers_the_output_error() -> None:
    w = normal(48, 128)
    x = (normal(800, 40, 1) @ normal(40, 128, 2) + 0.3 * normal(800, 128, 3)).astype(np.float32)

    def output_error(stats: LayerStats | None) -> float:
        tensor = quantize_tensor(w, scheme_of("mixed24"), stats=stats)
        check_tensor(tensor, "w")
        return float(np.square(x @ (dequantize(tensor) - w).T).sum())

    stats = stats_of(x)
    plain, diagonal = output_error(None), output_error(replace(stats, hessian=None))
    assert output_error(stats) < 0.5 * min(plain, diagonal)


@pytest.mark.parametrize("name", ("rtn", "gptq"))
def test_methods_build_on_the_feedback_of_the_quantizer(name: str) -> None:
    w, stats, scheme = normal(16, 64), stats_of(normal(200, 64, 1)), scheme_of("mixed24")
    method = Method(name, Calibration({"node": stats}, "", ""))
    model = ImportedModel("m", 17, (), (), (), {}, {}, "")
    tensor = method.tensor(model, ["node"], w, scheme, "w", None)
    own = quantize_tensor(w, scheme, stats=stats)

    def output_error(found: QuantizedTensor) -> float:
        error = w - dequantize(found)
        return float(np.einsum("nk,kj,nj->", error, stats.hessian, error))

    if name == "rtn":
        np.testing.assert_array_equal(dequantize(tensor), dequantize(own))
    else:  # scales are refitted after the quantizer's own feedback
        assert output_error(tensor) <= output_error(own)
    assert method.notes["node"].startswith("error feedback")


def test_statistics_that_do_not_fit_are_refused() -> None:
    w, stats = normal(16, 64), stats_of(normal(100, 32))
    scheme = scheme_of("mixed24")
    with pytest.raises(BadInput, match=r"layer7.*\[64, 64\]"):
        quantize_tensor(w, scheme, "layer7", stats=stats)
    with pytest.raises(BadInput, match=r"layer7.*64 finite"):
        quantize_tensor(w, scheme, "layer7", stats=replace(stats, hessian=None))
    dead = LayerStats(*[np.zeros(64, np.float32)] * 3, 9, np.zeros((64, 64), np.float32))
    with pytest.raises(BadInput, match=r"layer7.*H is zero"):
        quantize_tensor(w, scheme, "layer7", stats=dead)


def test_a_singular_hessian_is_damped() -> None:
    x = np.repeat(normal(4, 64), 3, axis=0)  # rank 4
    tensor = quantize_tensor(normal(16, 64), scheme_of("mixed24"), stats=stats_of(x))
    check_tensor(tensor, "w")
    assert np.isfinite(dequantize(tensor)).all()


def broken(tensor: QuantizedTensor, key: str, value: np.ndarray) -> QuantizedTensor:
    return replace(tensor, tables={**tensor.tables, key: value})


def test_wrong_arrays_are_refused() -> None:
    tensor = quantize_tensor(normal(20, 64), scheme_of("mixed24o1"))
    t = tensor.tables
    wide = np.flatnonzero(np.repeat(t["wide"], 16))[0]
    cases = {
        "wide": [np.ones(4, np.uint8), np.zeros(3, np.uint8)],
        "sub_scales": [np.full_like(t["sub_scales"], 8), t["sub_scales"].astype(np.int32)],
        "sub_zeros": [np.full_like(t["sub_zeros"], 4)],
        "super_zeros": [np.full_like(t["super_zeros"], 16)],
        "super_scales": [np.full_like(t["super_scales"], np.inf)],
        "row_start": [np.zeros_like(t["row_start"]), t["row_start"][::-1].copy()],
        "columns": [np.full_like(t["columns"], 64), np.full_like(t["columns"], wide)],
        "outliers": [np.full_like(t["outliers"], np.nan)],
    }
    for key, values in cases.items():
        for value in values:
            with pytest.raises(BadScheme, match="layer7"):
                check_tensor(broken(tensor, key, value), "layer7")
    for codes in (np.full_like(tensor.codes, 4), np.full_like(tensor.codes, 16)):
        with pytest.raises(BadScheme, match="bit code"):
            check_tensor(replace(tensor, codes=codes), "layer7")
    with pytest.raises(BadScheme, match="zero points"):
        check_tensor(replace(tensor, zeros=None), "layer7")

"""Codebooks, non-uniform tables and super-blocks: formats and quantizers, any shape and values."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from apq_tvm.errors import BadScheme, UnsupportedModel
from apq_tvm.formats import (
    bits_per_weight,
    check_tensor,
    dequantize,
    embedding_scheme,
    parse_scheme,
)
from apq_tvm.formats.codebook import codebook_count
from apq_tvm.formats.nonlinear import MAX_VALUE, TABLE
from apq_tvm.quantizers.families.codebook_groups import TINY, Groups, Lookup
from apq_tvm.quantizers.families.levels import search_steps
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import LayerStats, Scheme

SCHEMES = ("cb2", "cb3", "cb4", "cb2c8", "cb3c16", "cb3g64", "cb2g32", "nl4", "nl4g128", "W2sA8",
           "W4mA8g32", "W2mA8g64", "W3kA8", "W4kA8", "W5kA8", "W6kA8")  # fmt: skip

# |error| of a weight, relative to the largest of its super-block: half the widest gap between
# values, and what a 4-bit sub-scale takes away. Learned codebooks may reach less far on one side.
LARGEST_ERROR = 0.75


def scheme_of(name: str) -> Scheme:
    scheme = parse_scheme(name)
    assert scheme is not None
    return scheme


@st.composite
def weights(draw: st.DrawFn) -> Any:
    n, k = draw(st.integers(1, 9)), draw(st.integers(1, 300))
    kind = draw(st.sampled_from(("normal", "zeros", "outlier", "denormal", "equal", "large")))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    w = rng.standard_normal((n, k)).astype(np.float32)
    if kind == "zeros":
        w[:] = 0
    elif kind == "outlier":
        w[rng.integers(n), rng.integers(k)] = 8e3
    elif kind == "denormal":
        w *= np.float32(1e-41)
    elif kind == "equal":
        w[:] = w[0, 0]
    elif kind == "large":
        w *= np.float32(1e3)
    return w


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("k", [1, 16, 40])
@pytest.mark.parametrize("name", ["W2sA8", "W3sA8"])
def test_rows_of_one_negative_value_keep_it(name: str, k: int, search: bool) -> None:
    w = np.full((2, k), -0.13, np.float32)
    assert_allclose(dequantize(quantize_tensor(w, scheme_of(name), search=search)), w, rtol=1e-3)


@settings(max_examples=60)
@given(weights(), st.sampled_from(SCHEMES), st.booleans())
def test_any_weights_quantize_to_a_valid_tensor(w: Any, name: str, search: bool) -> None:
    tensor = quantize_tensor(w, scheme_of(name), search=search)
    check_tensor(tensor, "w")
    decoded = dequantize(tensor)
    assert decoded.shape == w.shape and decoded.dtype == np.float32
    assert np.isfinite(decoded).all()
    if np.abs(w).max() > 1e-30:
        peak = np.abs(w).max(axis=1, keepdims=True)
        assert (np.abs(decoded - w) <= LARGEST_ERROR * peak + 1e-7).all()
    else:
        assert not decoded.any()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("cb2", 2.4375),
        ("cb3", 3.4375),
        ("cb4", 4.4375),
        ("cb2c8", 2.5),
        ("cb2c16", 2.5625),
        ("cb3g32", 3.21875),
        ("cb3g64", 3.109375),
        ("nl4", 4.5),
        ("nl4g64", 4.25),
        ("nl4g128", 4.125),
        ("W2sA8", 2.625),
        ("W3sA8", 3.625),
        ("W4mA8g32", 5),
        ("W3kA8", 3.5625),
        ("W4kA8", 4.625),
        ("W6kA8", 6.5625),
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    w = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
    assert bits_per_weight(quantize_tensor(w, scheme_of(name), search=False)) == bits


def test_short_super_blocks_are_not_padded() -> None:
    w = np.random.default_rng(0).standard_normal((8, 576)).astype(np.float32)
    tensor = quantize_tensor(w, scheme_of("cb2"), search=False)
    assert tensor.scales.shape == (8, 3) and tensor.tables["subs"].shape == (8, 36)
    assert bits_per_weight(tensor) == 2 + 6 / 16 + 3 * 16 / 576


@pytest.mark.parametrize(
    ("name", "rival"),
    [("cb2", "W2A8g32"), ("cb3g64", "W3A8g128"), ("cb4", "W4A8g32"), ("nl4", "W4A8g32"),
     ("W2sA8", "W2zA8g32"), ("W3sA8", "W3zA8g32"),
     ("W3kA8", "W3zA8g32"), ("W4kA8", "W4zA8g32")],
)  # fmt: skip
def test_better_than_rounding_at_no_more_bits(name: str, rival: str) -> None:
    w = np.random.default_rng(1).standard_normal((24, 1024)).astype(np.float32)
    mine, theirs = (quantize_tensor(w, scheme_of(s)) for s in (name, rival))
    assert bits_per_weight(mine) <= bits_per_weight(theirs)
    ours, other = (np.mean((dequantize(t) - w) ** 2) for t in (mine, theirs))
    assert ours < 0.9 * other


@pytest.mark.parametrize("name", ["cb2", "nl4", "W3sA8"])
def test_important_columns_get_smaller_errors(name: str) -> None:
    rng = np.random.default_rng(2)
    w = rng.standard_normal((16, 512)).astype(np.float32)
    square = np.where(np.arange(512) % 8 == 0, 100.0, 0.1).astype(np.float32)
    stats = LayerStats(square, np.zeros(512, np.float32), np.sqrt(square), 64)
    shared = None
    if name == "cb2":
        shared = quantize_tensor(w, scheme_of(name)).tables["codebooks"]
    plain, weighted = (
        (dequantize(quantize_tensor(w, scheme_of(name), stats=s, shared=shared)) - w) ** 2 @ square
        for s in (None, stats)
    )
    assert weighted.sum() < 0.9 * plain.sum()


def derive_table(samples: int = 20_000, rounds: int = 40) -> tuple[int, ...]:
    """How `TABLE` was made: Lloyd's alternation on normally distributed groups of 32.

    Every group takes the scale of least error for the present table, of either sign; every value
    moves to the mean, weighted by the squared scales, of what it stands for (Lloyd, "Least squares
    quantization in PCM", 1982, with scales). Values are kept on a grid 8 times finer than the one
    they are rounded to at the end; the side that reaches further is the negative one.
    """
    rng = np.random.default_rng(4)
    columns = rng.standard_normal((32, samples)).astype(np.float32)
    fine = MAX_VALUE * 8
    values = np.linspace(-1, 0.95, 16)
    work = Groups.of(columns, None)
    for _ in range(rounds):
        table = Lookup.of(np.rint(values * fine).astype(np.int32))
        step = search_steps(work, table)
        codes = work.codes(step, table).ravel()
        mass = np.bincount(codes, np.broadcast_to(step * step, columns.shape).ravel(), 16)
        total = np.bincount(codes, (columns * step).ravel(), 16)
        values = total / np.maximum(mass, TINY)
        values /= np.abs(values).max()
        if values.max() > -values.min():
            values = -values[::-1]
    return tuple(int(v) for v in np.rint(values * MAX_VALUE))


def test_table_is_what_its_derivation_gives() -> None:
    assert derive_table() == TABLE
    assert max(map(abs, TABLE)) == MAX_VALUE == -TABLE[0]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(name: str, bad: float) -> None:
    w = np.ones((3, 40), np.float32)
    w[1, 7] = bad
    with pytest.raises(UnsupportedModel, match=r"blk\.w.*\[1, 7\]"):
        quantize_tensor(w, scheme_of(name), "blk.w")


@pytest.mark.parametrize("name", ["cb2", "nl4", "W2sA8"])
def test_weights_beyond_float16_are_refused(name: str) -> None:
    w = np.full((2, 32), 3e9, np.float32)
    w[:, ::2] *= -1
    with pytest.raises(BadScheme, match="big: a scale exceeds 65504"):
        quantize_tensor(w, scheme_of(name), "big")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cb5", "codes of 5 bits; 2, 3, 4 are possible"),
        ("cb2c3", "3 codebooks; 4, 8, 16 are possible"),
        ("cb2g48", "groups of 48"),
        ("nl3", "non-uniform weights of 3 bits"),
        ("nl4g16", "groups of 16 non-uniform"),
        ("W5sA8", "super-blocks of 5 bits"),
        ("cb2A9", "activations 'A9'"),
    ],
)
def test_spellings_that_mean_nothing(text: str, reason: str) -> None:
    with pytest.raises(BadScheme, match=reason):
        parse_scheme(text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("CB2C4", "cb2"), ("cb3c8G16", "cb3c8"), ("nl4g32A8", "nl4"), ("w2s", "W2sA8"),
     ("cb4A32", "cb4A32"), ("cb3g64", "cb3g64")],
)  # fmt: skip
def test_spellings_are_canonical(text: str, canonical: str) -> None:
    scheme = scheme_of(text)
    assert str(scheme) == canonical and parse_scheme(canonical) == scheme
    assert embedding_scheme(scheme).family == "int"


def test_codebooks_of_another_size_are_refused() -> None:
    w = np.ones((2, 32), np.float32)
    with pytest.raises(BadScheme, match=r"int8 \[4, 4\] is needed"):
        quantize_tensor(w, scheme_of("cb2"), shared=np.zeros((8, 4), np.int8))
    with pytest.raises(BadScheme, match="magnitude 40 exceeds 32"):
        quantize_tensor(w, scheme_of("cb2"), shared=np.full((4, 4), 40, np.int8))


@pytest.mark.parametrize("name", ["cb2", "nl4", "W2sA8"])
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    w = np.random.default_rng(0).standard_normal((4, 80)).astype(np.float32)
    tensor = quantize_tensor(w, scheme_of(name))
    replace = dataclasses.replace
    for bad, reason in (
        (replace(tensor, codes=tensor.codes + np.uint8(200)), "code .* exceeds"),
        (replace(tensor, scales=tensor.scales[:, :0]), "scales is float16"),
        (replace(tensor, tables={**tensor.tables, "more": w}), "has tables"),
        (replace(tensor, zeros=tensor.codes), "no zero points"),
    ):
        with pytest.raises(BadScheme, match=reason):
            check_tensor(bad, "w")


def test_codebook_count_is_spelled() -> None:
    assert [codebook_count(scheme_of(s)) for s in ("cb2", "cb3c8", "cb4c16g32")] == [4, 8, 16]

"""Binary codes: spellings, meaning, exact conversion from uniform integers, layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import BcqLayout, weight_layout
from apq_tvm.codegen.layouts.bcq import ROWS
from apq_tvm.errors import BadScheme, PackError
from apq_tvm.formats import bcq, bits_per_weight, check_tensor, dequantize, parse_scheme
from apq_tvm.formats.arrays import group_count
from apq_tvm.formats.integer import format_of
from apq_tvm.types import PackedTensor, QuantizedTensor, Scheme

BITS, GROUPS = st.integers(1, 8), st.sampled_from((-1, *bcq.GROUPS))


def random_tensor(n: int, k: int, bits: int, group: int, seed: int = 0) -> QuantizedTensor:
    """Codes, scales and offsets of any size and sign."""
    rng = np.random.default_rng(seed)
    groups = group_count(k, group)
    return QuantizedTensor(
        rng.integers(0, 1 << bits, (n, k), dtype=np.uint8),
        rng.normal(size=(n, groups, bits)).astype(np.float16),
        None,
        bcq.scheme_of(bits, group),
        {bcq.OFFSETS: rng.normal(size=(n, groups)).astype(np.float16)},
    )


@pytest.mark.parametrize(
    "text,bits,group,acts",
    (
        ("bcq3g128", 3, 128, 8),
        ("BCQ2", 2, -1, 8),
        ("bcq2g64A32", 2, 64, 32),
        ("bcq8g256", 8, 256, 8),
    ),
)
def test_spelling(text: str, bits: int, group: int, acts: int) -> None:
    scheme = parse_scheme(text)
    assert scheme == bcq.scheme_of(bits, group, acts)
    assert str(scheme).lower() == text.lower()


@pytest.mark.parametrize(
    "text,reason",
    (
        ("bcq9", "weights of 9 bits; 1..8"),
        ("bcq0g32", "weights of 0 bits"),
        ("bcq3g16", "groups of 16; 32, 64, 128, 256 or a whole row"),
        ("bcq3g128A4", "activations of 4 bits; bcq has A8"),
        ("bcq3A16", "activations of 16 bits"),
    ),
)
def test_wrong_spelling_is_told_why(text: str, reason: str) -> None:
    with pytest.raises(BadScheme, match=reason):
        parse_scheme(text)


@given(st.integers(1, 5), st.integers(1, 300), BITS, GROUPS, st.integers(0, 9))
def test_meaning_weight_by_weight(n: int, k: int, bits: int, group: int, seed: int) -> None:
    tensor = random_tensor(n, k, bits, group, seed)
    values = dequantize(tensor)
    width = k if group == -1 else group
    row, column = seed % n, seed * 37 % k
    alphas = tensor.scales[row, column // width].astype(np.float64)
    code = int(tensor.codes[row, column])
    signs = [1 if code >> i & 1 else -1 for i in range(bits)]
    want = alphas @ signs + float(tensor.tables[bcq.OFFSETS][row, column // width])
    assert values.shape == (n, k) and values.dtype == np.float32
    np.testing.assert_allclose(values[row, column], want, rtol=0, atol=1e-5)


@given(
    st.integers(1, 4),
    st.integers(1, 200),
    BITS,
    GROUPS,
    st.booleans(),
    st.integers(-13, 7),
    st.integers(0, 99),
)
def test_conversion_from_uniform_is_exact(
    n: int, k: int, bits: int, group: int, zeros: bool, exponent: int, seed: int
) -> None:
    """Without zero points to the last bit; with them, but for the rounding of z to float16."""
    rng = np.random.default_rng(seed)
    groups = group_count(k, group)
    shape = (n, groups)
    scales = (rng.uniform(1, 2, shape) * 2.0**exponent).astype(np.float16)
    scales *= rng.choice((-1, 1), shape).astype(np.float16)
    points = rng.integers(0, 1 << bits, shape, dtype=np.uint8) if zeros else None
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    uniform = QuantizedTensor(codes, scales, points, Scheme(bits, zeros, group_size=group))
    got = bcq.from_uniform(uniform)
    check_tensor(got, "tensor")
    assert (got.scales >= 0).all() and (np.diff(got.scales.astype(np.float64)) >= 0).all()
    want = format_of(uniform.scheme).dequantize_ref(uniform).astype(np.float64)
    decoded = decode64(got)
    offsets = got.tables[bcq.OFFSETS].astype(np.float64)
    allowed = np.abs(offsets) * 2.0**-11 if zeros else np.zeros(shape)
    width = k if group == -1 else group
    allowed = np.repeat(allowed + (2.0**-25 if zeros else 0), width, axis=1)[:, :k]
    assert (np.abs(decoded - want) <= allowed * (1 + 1e-9)).all()


def decode64(tensor: QuantizedTensor) -> Any:
    """The decoded weights without rounding."""
    k = tensor.codes.shape[1]
    width = k if tensor.scheme.group_size == -1 else tensor.scheme.group_size
    signs = (tensor.codes[..., None] >> np.arange(tensor.scheme.bits) & 1) * 2.0 - 1
    alphas = np.repeat(tensor.scales.astype(np.float64), width, axis=1)[:, :k]
    offsets = np.repeat(tensor.tables[bcq.OFFSETS].astype(np.float64), width, axis=1)[:, :k]
    return (signs * alphas).sum(-1) + offsets


def test_conversion_refuses_what_float16_cannot_hold() -> None:
    scales = np.full((1, 1), 60000, np.float16)
    codes = np.zeros((1, 32), np.uint8)
    uniform = QuantizedTensor(codes, scales, None, Scheme(8))
    with pytest.raises(BadScheme, match="65504"):
        bcq.from_uniform(uniform)
    narrow = QuantizedTensor(codes, np.ones((1, 2), np.float16), None, Scheme(4, group_size=16))
    with pytest.raises(BadScheme, match="groups of 32 and more"):
        bcq.from_uniform(narrow)


def test_bytes_are_counted_in_full() -> None:
    tensor = random_tensor(8, 256, 3, 128)
    assert bits_per_weight(tensor) == 3 + 4 * 16 / 128


@pytest.mark.parametrize(
    "change,reason",
    (
        ({"scales": np.zeros((4, 2, 2), np.float16)}, "scales are float16"),
        ({"tables": {}}, "one table, 'offsets'"),
        ({"codes": np.full((4, 64), 8, np.uint8)}, "code 8 exceeds 7"),
        ({"codes": np.zeros((4, 64), np.int8)}, "codes are int8"),
        ({"zeros": np.zeros((4, 2), np.uint8)}, "no zero points"),
        ({"scales": np.full((4, 2, 3), np.nan, np.float16)}, "scales hold NaN"),
    ),
)
def test_bad_tensors_are_refused(change: dict[str, Any], reason: str) -> None:
    tensor = replace(random_tensor(4, 64, 3, 32), **change)
    with pytest.raises(BadScheme, match=reason):
        check_tensor(tensor, "layer")


@given(st.integers(1, 70), st.integers(1, 300), BITS, GROUPS, st.sampled_from(ROWS))
def test_layout_is_undone_exactly(n: int, k: int, bits: int, group: int, rows: int) -> None:
    tensor = random_tensor(n, k, bits, group, n + k)
    layout = BcqLayout(bits, rows, group)
    assert weight_layout(layout.name, tensor.scheme) == layout
    packed = layout.pack(tensor)
    shapes = {name: (a.shape, a.dtype.name) for name, a in packed.arrays.items()}
    assert shapes == layout.shapes(n, k)
    again = layout.unpack(packed, n, k, tensor.scheme)
    np.testing.assert_array_equal(again.codes, tensor.codes)
    np.testing.assert_array_equal(again.scales, tensor.scales)
    np.testing.assert_array_equal(again.tables[bcq.OFFSETS], tensor.tables[bcq.OFFSETS])


def test_layouts_refuse_what_does_not_fit() -> None:
    tensor = random_tensor(16, 64, 3, 32)
    with pytest.raises(PackError, match="cannot hold scheme"):
        BcqLayout(2, 16, 32).pack(tensor)
    with pytest.raises(PackError, match="rows of"):
        BcqLayout(2, 4, 32)
    with pytest.raises(PackError, match="cannot hold W4A8g32"):
        weight_layout("bcq4r16", Scheme(4, group_size=32))
    packed = BcqLayout(3, 16, 32).pack(tensor)
    cut = PackedTensor(packed.layout, {**packed.arrays, "codes": packed.arrays["codes"][:, 1:]})
    with pytest.raises(PackError, match="is needed"):
        BcqLayout(3, 16, 32).unpack(cut, 16, 64, tensor.scheme)

"""Layouts of formats with small groups: exact inverses, true sizes, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import SpanLayout, default_layout, weight_layout
from apq_tvm.errors import PackError
from apq_tvm.formats import parse_scheme
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import PackedTensor, QuantizedTensor

SCHEMES = ("cb2", "cb3", "cb4", "cb2c8", "cb4c16", "cb2g32", "cb3g64", "nl4", "nl4g128", "W2sA8",
           "W3sA8", "W4mA8g32", "W5mA8g16", "W3kA8", "W4kA8", "W5kA8", "W6kA8")  # fmt: skip


def quantized(name: str, n: int, k: int) -> QuantizedTensor:
    scheme = parse_scheme(name)
    assert scheme is not None
    w = np.random.default_rng(n * k).standard_normal((n, k)).astype(np.float32)
    return quantize_tensor(w, scheme, search=False)


@settings(max_examples=40)
@given(
    st.sampled_from(SCHEMES), st.integers(1, 40), st.integers(1, 300), st.sampled_from((4, 8, 16))
)
def test_unpack_is_the_inverse_of_pack(name: str, n: int, k: int, lanes: int) -> None:
    tensor = quantized(name, n, k)
    layout = default_layout(tensor.scheme, (), lanes)
    assert weight_layout(layout.name, tensor.scheme) == layout
    packed = layout.pack(tensor)
    shapes = layout.shapes(n, k)
    assert {a: (v.shape, str(v.dtype)) for a, v in packed.arrays.items()} == shapes
    assert list(packed.arrays) == list(shapes)
    back = layout.unpack(packed, n, k, tensor.scheme)
    pairs = [(back.codes, tensor.codes), (back.scales, tensor.scales)]
    assert set(back.tables) == set(tensor.tables)
    pairs += [(back.tables[key], tensor.tables[key]) for key in tensor.tables]
    for found, wanted in pairs:
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("cb2", 2.4375),
        ("cb3g64", 3.109375),
        ("nl4", 4.5),
        ("W3sA8", 3.625),
        ("W4mA8g32", 5),
        ("W3kA8", 3.5625),
        ("W4kA8", 4.625),
        ("W5kA8", 5.625),
        ("W6kA8", 6.5625),
    ],
)
def test_whole_blocks_take_the_formats_bits(name: str, bits: float) -> None:
    tensor = quantized(name, 32, 1024)
    packed = default_layout(tensor.scheme, (), 16).pack(tensor)
    table = packed.arrays["table"].nbytes if "table" in packed.arrays else 0
    nbytes = sum(array.nbytes for array in packed.arrays.values()) - table
    assert 8 * nbytes / tensor.codes.size == bits


@pytest.mark.parametrize("name", ["cb2", "nl4", "W2sA8"])
def test_refusals(name: str) -> None:
    tensor = quantized(name, 5, 64)
    layout = default_layout(tensor.scheme, (), 16)
    assert isinstance(layout, SpanLayout)
    other = parse_scheme("W3sA8")
    with pytest.raises(PackError, match="cannot hold"):
        weight_layout(layout.name, other)
    with pytest.raises(PackError, match="cannot hold"):
        layout.pack(dataclasses.replace(tensor, scheme=other))
    with pytest.raises(PackError, match="code 255 exceeds"):
        layout.pack(dataclasses.replace(tensor, codes=np.full((5, 64), 255, np.uint8)))
    packed = layout.pack(tensor)
    with pytest.raises(PackError, match="is needed"):
        layout.unpack(packed, 5, 640, tensor.scheme)
    with pytest.raises(PackError, match="is no"):
        layout.unpack(PackedTensor("other", packed.arrays), 5, 64, tensor.scheme)
    with pytest.raises(PackError, match="4, 8 or 16 rows"):
        dataclasses.replace(layout, rows=5)

"""Layouts of mixed24: exact round trips, and bytes where kernels look for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import MixedLayout, default_layout, weight_layout
from apq_tvm.errors import PackError
from apq_tvm.formats import parse_scheme
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.types import PackedTensor, QuantizedTensor, Scheme

SPELLINGS = ("mixed24", "mixed24o0", "mixed24r50", "mixed24r10o1", "mixed24r0", "mixed24r100")
ROWS = (8, 16)


def tensor_of(text: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    scheme = parse_scheme(text)
    assert scheme is not None
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    return quantize_tensor(w, scheme, search=False)


def assert_equal(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert got.scheme == want.scheme and set(got.tables) == set(want.tables)
    assert got.zeros is not None and want.zeros is not None
    pairs = [(got.codes, want.codes), (got.scales, want.scales), (got.zeros, want.zeros)]
    pairs += [(got.tables[key], want.tables[key]) for key in want.tables]
    for a, b in pairs:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("text", SPELLINGS)
def test_round_trip_at_edges(text: str, rows: int) -> None:
    for n in (1, rows - 1, rows, rows + 1, 33):
        for k in (1, 15, 16, 17, 64, 100, 129):
            tensor = tensor_of(text, n, k)
            layout = MixedLayout(rows, tensor.scheme)
            packed = layout.pack(tensor)
            got = {key: (a.shape, str(a.dtype)) for key, a in packed.arrays.items()}
            assert got == layout.shapes(n, k) and list(got) == list(layout.shapes(n, k))
            assert_equal(layout.unpack(packed, n, k), tensor)


@given(
    text=st.sampled_from(SPELLINGS),
    rows=st.sampled_from(ROWS),
    n=st.integers(1, 40),
    k=st.integers(1, 200),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_round_trip_any_shape(text: str, rows: int, n: int, k: int, seed: int) -> None:
    tensor = tensor_of(text, n, k, seed)
    layout = MixedLayout(rows, tensor.scheme)
    assert_equal(layout.unpack(layout.pack(tensor), n, k), tensor)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("text", ("mixed24", "mixed24r50"))
def test_codes_are_where_kernels_look(text: str, rows: int) -> None:
    tensor = tensor_of(text, rows + 3, 130)
    layout = MixedLayout(rows, tensor.scheme)
    arrays = layout.pack(tensor).arrays
    wide, triples = tensor.tables["wide"], layout.triples(130)
    for n, k in np.ndindex(rows + 3, 130):
        place, (vector, i) = int(arrays["permutation"][k // 16]), divmod(k % 16, 4)
        byte = 4 * (n % rows) + i
        if wide[k // 16]:
            four = arrays["codes" if layout.one_stream else "wide_codes"][n // rows]
            group = place // 4 if layout.one_stream else place - 3 * triples
            start = 12 * rows if layout.one_stream else 0
            code = four[group, start + vector % 2 * 4 * rows + byte] >> (vector // 2 * 4) & 15
        else:
            word, tile = (place // 4, place % 4) if layout.one_stream else divmod(place, 3)
            code = arrays["codes"][n // rows, word, tile * 4 * rows + byte] >> (2 * vector) & 3
        assert code == tensor.codes[n, k]


def test_a_triple_fills_sixteen_bits() -> None:
    tensor = tensor_of("mixed24", 16, 256)
    words = MixedLayout(16, tensor.scheme).pack(tensor).arrays["triples"]
    zeros, subs = tensor.tables["sub_zeros"], tensor.tables["sub_scales"]
    want = zeros[5, 3] | zeros[5, 4] << 2 | zeros[5, 5] << 4
    want = int(want) | int(subs[5, 3]) << 6 | int(subs[5, 4]) << 10 | int(subs[5, 5]) << 13
    assert words[0, 1, 5] == want


def test_word_rows_are_whole_cache_lines() -> None:
    """At the default ratio a word row of 16 rows x 64 channels takes 5 lines: no padding."""
    tensor = tensor_of("mixed24", 32, 256)
    shapes = MixedLayout(16, tensor.scheme).shapes(32, 256)
    assert shapes["codes"] == ((2, 4, 5 * 64), "uint8")
    assert "wide_codes" not in shapes


def test_every_place_is_taken_once() -> None:
    for text in SPELLINGS:
        tensor = tensor_of(text, 8, 400)
        layout = MixedLayout(8, tensor.scheme)
        places = layout.pack(tensor).arrays["permutation"]
        assert len(set(places.tolist())) == 25
        assert places.min() >= 0 and places.max() < layout.places(400)


def test_names_parse_back() -> None:
    for text in SPELLINGS:
        scheme = parse_scheme(text)
        assert scheme is not None
        for rows in ROWS:
            layout = MixedLayout(rows, scheme)
            assert weight_layout(layout.name, scheme) == layout
        assert default_layout(scheme, (), 64) == MixedLayout(16, scheme)
        assert default_layout(scheme, (), 32) == MixedLayout(8, scheme)


def test_what_does_not_fit_is_refused() -> None:
    tensor = tensor_of("mixed24", 8, 64)
    layout = MixedLayout(8, tensor.scheme)
    with pytest.raises(PackError, match="rows=4"):
        MixedLayout(4, tensor.scheme)
    with pytest.raises(PackError, match="W4A8"):
        MixedLayout(8, Scheme(4))
    with pytest.raises(PackError, match="mixed24r8split"):
        weight_layout("mixed24r8q31", parse_scheme("mixed24r50"))
    with pytest.raises(PackError, match="float32"):
        weight_layout("mixed24r8q31", None)
    with pytest.raises(PackError, match="layer7"):
        layout.pack(tensor_of("mixed24r50", 8, 64), "layer7")
    packed = layout.pack(tensor)
    with pytest.raises(PackError, match="codes is"):
        layout.unpack(packed, 8, 65)
    with pytest.raises(PackError, match="is no"):
        layout.unpack(PackedTensor("mixed24r16q31", packed.arrays), 8, 64)

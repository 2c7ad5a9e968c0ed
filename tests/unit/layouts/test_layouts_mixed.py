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
@settings(max_examples=40)
def test_round_trip_any_shape(text: str, rows: int, n: int, k: int, seed: int) -> None:
    tensor = tensor_of(text, n, k, seed)
    layout = MixedLayout(rows, tensor.scheme)
    assert_equal(layout.unpack(layout.pack(tensor), n, k), tensor)


def arrays_apart(tensor: QuantizedTensor, rows: int) -> dict[str, np.ndarray]:
    """What kernels see, whether it is in records or not."""
    n, k = tensor.codes.shape
    layout = MixedLayout(rows, tensor.scheme)
    arrays = dict(layout.pack(tensor).arrays)
    if layout.one_stream:
        arrays |= layout.records(k).split(arrays["records"], layout.row_blocks(n))
    return arrays


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("text", ("mixed24", "mixed24r50"))
def test_codes_are_where_kernels_look(text: str, rows: int) -> None:
    tensor = tensor_of(text, rows + 3, 130)
    layout = MixedLayout(rows, tensor.scheme)
    arrays = arrays_apart(tensor, rows)
    wide, triples = tensor.tables["wide"], layout.triples(130)
    for n, k in np.ndindex(rows + 3, 130):
        place, (vector, i) = int(arrays["permutation"][k // 16]), divmod(k % 16, 4)
        byte = 4 * (n % rows) + i
        if wide[k // 16]:
            group = place // 4 if layout.one_stream else place - 3 * triples
            at = vector % 2 * 4 * rows + byte
            code = arrays["wide_codes"][n // rows, group, at] >> (vector // 2 * 4) & 15
        else:
            word, tile = (place // 4, place % 4) if layout.one_stream else divmod(place, 3)
            code = arrays["codes"][n // rows, word, tile * 4 * rows + byte] >> (2 * vector) & 3
        assert code == tensor.codes[n, k]


@pytest.mark.parametrize("text", ("mixed24", "mixed24r50"))
def test_a_triple_fills_sixteen_bits(text: str) -> None:
    tensor = tensor_of(text, 16, 512)
    low, high = arrays_apart(tensor, 16)["codes"][0, 1, 12 * 16 + 2 * 5 :][:2].astype(int)
    zeros, subs = tensor.tables["sub_zeros"], tensor.tables["sub_scales"]
    want = zeros[5, 3] | zeros[5, 4] << 2 | zeros[5, 5] << 4
    want = int(want) | int(subs[5, 3]) << 6 | int(subs[5, 4]) << 10 | int(subs[5, 5]) << 13
    assert low + 256 * high == want


@pytest.mark.parametrize("rows", ROWS)
def test_records_are_one_stream_of_whole_cache_lines(rows: int) -> None:
    """A word row of 64 channels takes 22 bytes a row: two of 16 rows are 11 lines."""
    tensor = tensor_of("mixed24o0", 33, 256)
    layout = MixedLayout(rows, tensor.scheme)
    packed, rec = layout.pack(tensor), layout.records(256)
    assert list(packed.arrays) == ["records", "permutation"]
    header = 3 * (4 * 3) + 3 * 16  # second order, then 4-bit groups
    assert rec.header == -(-header // 64) * 64 and rec.word == 22 * rows
    assert packed.arrays["records"].shape == (3, rec.header + 16 // rows * 4 * 22 * rows)
    # The second word row of row 17: in the second record, after its header.
    at = rec.header + 1 * rec.word + 4 * 1
    codes = arrays_apart(tensor, rows)["codes"]
    np.testing.assert_array_equal(
        packed.arrays["records"][1, at : at + 4], codes[16 // rows, 1, 4:8]
    )


def test_scales_lie_at_the_head_of_a_record() -> None:
    tensor = tensor_of("mixed24o0", 20, 256)
    layout = MixedLayout(8, tensor.scheme)
    records, start = layout.pack(tensor).arrays["records"], layout.records(256).scales
    count = tensor.tables["super_scales"].shape[1]
    low, high = (records[1, i * count :][:count].astype(np.uint16) for i in (0, 1))
    got = (low | high << 8).view(np.float16)
    np.testing.assert_array_equal(got, tensor.tables["super_scales"][1])
    zeros = records[1, 2 * count : 3 * count]
    np.testing.assert_array_equal(zeros, tensor.tables["super_zeros"][1])
    low, high = (records[0, start + 16 * i :][:16].astype(np.uint16) for i in (0, 1))
    np.testing.assert_array_equal((low | high << 8).view(np.float16), tensor.scales[:16, 0])
    assert tensor.zeros is not None
    np.testing.assert_array_equal(records[0, start + 32 :][:16], tensor.zeros[:16, 0])


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
        assert default_layout(scheme, (), 16) == MixedLayout(16, scheme)
        assert default_layout(scheme, (), 8) == MixedLayout(8, scheme)


def test_what_does_not_fit_is_refused() -> None:
    tensor = tensor_of("mixed24", 8, 64)
    layout = MixedLayout(8, tensor.scheme)
    with pytest.raises(PackError, match="rows=4"):
        MixedLayout(4, tensor.scheme)
    with pytest.raises(PackError, match="W4A8"):
        MixedLayout(8, Scheme(4))
    with pytest.raises(PackError, match="mixed24r8c64 cannot hold mixed24r50"):
        weight_layout("mixed24r8c64", parse_scheme("mixed24r50"))
    with pytest.raises(PackError, match="float32"):
        weight_layout("mixed24r8c64", None)
    with pytest.raises(PackError, match="layer7"):
        layout.pack(tensor_of("mixed24r50", 8, 64), "layer7")
    packed = layout.pack(tensor)
    with pytest.raises(PackError, match="records is"):
        layout.unpack(packed, 8, 65)
    with pytest.raises(PackError, match="is no"):
        layout.unpack(PackedTensor("mixed24r16c64", packed.arrays), 8, 64)

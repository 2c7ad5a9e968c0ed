"""The any-precision format and its bitplanes: prefixes, tables, exact packing, named errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import PlanesLayout, default_layout, weight_layout
from apq_tvm.errors import BadScheme, PackError
from apq_tvm.formats import check_tensor, dequantize, details, nbytes, parse_scheme
from apq_tvm.formats.anyprec import (
    TABLE_SHARE,
    alone,
    channels_of,
    choose_channels,
    integer_table,
    restore_table,
    snap,
    table_bytes,
    table_name,
)
from apq_tvm.formats.scheme import GROUP_SIZES, check_scheme
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.types import QuantizedTensor, Scheme

WIDTHS = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)


def scheme(text: str) -> Scheme:
    parsed = parse_scheme(text)
    assert parsed is not None
    return parsed


@st.composite
def tensors(draw: st.DrawFn) -> QuantizedTensor:
    low, high = draw(WIDTHS)
    kind = scheme(f"anyprec{low}-{high}s{draw(st.sampled_from(('', 'A32', 'A8', 'A4g128')))}")
    n, k = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    channels = draw(st.sampled_from((1, 2, 4, 8, 16, 64)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size = draw(st.sampled_from((0.0, 1e-7, 1.0, 6e4)))
    tables = {}
    for b in kind.widths:
        table = (rng.uniform(-1, 1, (-(-n // channels), 1 << b)) * size).astype(np.float16)
        tables[table_name(b)] = snap(table) if kind.integer_acts else table
    codes = rng.integers(0, 1 << high, (n, k), dtype=np.uint8)
    return QuantizedTensor(codes, rng.normal(size=(n, 1)).astype(np.float16), None, kind, tables)


@settings(max_examples=80)
@given(tensors())
def test_packing_is_exact(tensor: QuantizedTensor) -> None:
    n, k = tensor.codes.shape
    check_tensor(tensor, "w")
    layout = default_layout(tensor.scheme, details(tensor), 8)
    assert layout == weight_layout(layout.name, tensor.scheme, details(tensor))
    packed = layout.pack(tensor)
    shapes = {key: (a.shape, str(a.dtype)) for key, a in packed.arrays.items()}
    assert list(shapes.items()) == list(layout.shapes(n, k).items())
    back = layout.unpack(packed, n, k, tensor.scheme)
    np.testing.assert_array_equal(back.codes, tensor.codes)
    np.testing.assert_array_equal(back.scales, tensor.scales)
    assert set(back.tables) == set(tensor.tables)
    for key, table in tensor.tables.items():
        np.testing.assert_array_equal(back.tables[key], table)


@settings(max_examples=60)
@given(tensors(), st.data())
def test_narrow_models_are_prefixes(tensor: QuantizedTensor, data: st.DataObject) -> None:
    """Width b needs the b upper planes and table b: all else may be anything."""
    bits = data.draw(st.sampled_from(tensor.scheme.widths))
    (n, k), spare = tensor.codes.shape, tensor.scheme.bits - bits
    prefix = tensor.codes >> spare
    noise = np.random.default_rng(0).integers(0, 1 << spare, (n, k)).astype(np.uint8)
    others = {
        key: table if key == table_name(bits) else np.zeros_like(table)
        for key, table in tensor.tables.items()
    }
    changed = replace(tensor, codes=(prefix << spare) | noise, tables=others)
    np.testing.assert_array_equal(dequantize(changed, bits), dequantize(tensor, bits))
    # The same codes are a tensor of that width alone.
    table = {table_name(bits): tensor.tables[table_name(bits)]}
    narrow = QuantizedTensor(prefix, tensor.scales, None, alone(tensor.scheme, bits), table)
    np.testing.assert_array_equal(dequantize(narrow), dequantize(tensor, bits))
    # Its planes are the first of the parent's.
    layouts = [PlanesLayout.of(t.scheme, details(t)) for t in (narrow, tensor)]
    mine, parent = (
        layout.pack(t).arrays["planes"] for layout, t in zip(layouts, (narrow, tensor), strict=True)
    )
    np.testing.assert_array_equal(mine, parent[:bits])


def test_wider_clusters_split_narrower_ones() -> None:
    """The quantizer's codes at b + 1 bits only divide clusters of b bits, on sorted weights."""
    w = np.random.default_rng(0).normal(size=(24, 200)).astype(np.float32)
    tensor = quantize_tensor(w, scheme("anyprec2-6sA8"))
    scaled = w / tensor.scales.astype(np.float32)
    for bits in tensor.scheme.widths:
        codes = tensor.codes >> (6 - bits)
        for first in range(0, 24, channels_of(tensor)):
            block = slice(first, first + channels_of(tensor))
            order = np.argsort(scaled[block], axis=None)
            assert (np.diff(codes[block].reshape(-1)[order].astype(int)) >= 0).all()


@pytest.mark.parametrize("n,k", ((384, 384), (1536, 576), (576, 1536), (4096, 4096), (64, 20000)))
@pytest.mark.parametrize("name", ("anyprec3-8sA8", "anyprec2-4sA8", "anyprec3-8sA32"))
def test_tables_stay_small(name: str, n: int, k: int) -> None:
    kind = scheme(name)
    channels, codes = choose_channels(n, k, kind), n * k * kind.bits / 8
    assert -(-n // channels) * table_bytes(kind) <= TABLE_SHARE * codes
    if channels > 1:  # no more are shared than need be
        assert -(-n // (channels // 2)) * table_bytes(kind) > TABLE_SHARE * codes


def test_sizes_that_are_reported() -> None:
    w = np.random.default_rng(1).normal(size=(64, 384)).astype(np.float32)
    tensor = quantize_tensor(w, scheme("anyprec3-8sA8"))
    assert details(tensor) == (("channels", 16),)
    # Codes, a float16 scale a row, and 4 blocks of 504 int8 centroids and 6 float32 steps.
    assert nbytes(tensor) == 64 * 384 + 2 * 64 + 4 * (504 + 24)


def test_int8_tables() -> None:
    table = np.array([[-1, -0.5, 0.25, 2], [0, 0, 0, 0]], np.float16)
    integers, step = integer_table(table)
    np.testing.assert_array_equal(integers, [[-64, -32, 16, 127], [0, 0, 0, 0]])
    np.testing.assert_allclose(step, [2 / 127, 0])
    once = restore_table(integers, step)
    np.testing.assert_array_equal(snap(once), once)
    assert np.abs(once - table).max() <= step[0] / 2 * 1.001


@pytest.mark.parametrize(
    "text,reason",
    (
        ("anyprec0-8sA8", "1 <= narrowest"),
        ("anyprec3-9sA8", "1 <= narrowest"),
        ("anyprec5-4sA8", "1 <= narrowest"),
        ("anyprec3-8sA9", "activations"),
        ("anyprec3-8sA8g24", "groups of 24"),
        ("anyprec3-8sA8g0", "groups of 0"),
        ("anyprec3-8sA32g32", "no activation scales"),
        ("anyprec3-8g32", "no family"),
        ("anyprec3", "no family"),
    ),
)
def test_bad_names(text: str, reason: str) -> None:
    with pytest.raises(BadScheme, match=reason):
        parse_scheme(text)


def test_names_are_canonical() -> None:
    for text in ("anyprec3-8sA8", "ANYPREC2-4sa32", "anyprec1-1sA4"):
        assert str(scheme(text)).upper() == text.upper()
    assert scheme("anyprec3-8sA8").widths == (3, 4, 5, 6, 7, 8)


@settings(max_examples=60)
@given(
    WIDTHS,
    st.sampled_from(("", "c1", "c16")),
    st.integers(1, 8),
    st.sampled_from((-1, *GROUP_SIZES)),
)
def test_groups_of_activations(widths: list[int], channels: str, act_bits: int, group: int) -> None:
    """They are spelled after the activations, and nothing of the weights depends on them."""
    word = f"anyprec{widths[0]}-{widths[1]}{channels}"
    acts = f"A{act_bits}g{group}" if group > 0 else f"A{act_bits}"
    kind = scheme(word + acts)
    assert str(kind) == word + ("" if acts == "A8g32" else acts)
    assert kind == scheme(str(kind).upper()) and kind.act_group == group
    check_scheme(kind, "layer7")
    w = np.random.default_rng(0).normal(size=(5, 48)).astype(np.float32)
    mine, plain = quantize_tensor(w, kind), quantize_tensor(w, scheme(word))
    assert nbytes(mine) == nbytes(plain) and details(mine) == details(plain)
    np.testing.assert_array_equal(dequantize(mine), dequantize(plain))
    assert alone(kind, widths[1]).act_group == group
    layout = default_layout(kind, details(mine), 16)
    assert layout == default_layout(plain.scheme, details(plain), 16)


def small() -> QuantizedTensor:
    return quantize_tensor(np.eye(9, 12, dtype=np.float32), scheme("anyprec2-3sA8"))


def test_bad_tensors_are_refused_by_name() -> None:
    good = small()
    tables = dict(good.tables)
    wide, wrong = table_name(3), np.full_like(tables[table_name(3)], np.nan)
    bad = {
        "codes are": replace(good, codes=good.codes.astype(np.int16)),
        "exceeds 7": replace(good, codes=good.codes + np.uint8(8)),
        "scales": replace(good, scales=good.scales[:3]),
        "zero points": replace(good, zeros=np.zeros((9, 1), np.uint8)),
        "tables are": replace(good, tables={wide: tables[wide]}),
        "not finite": replace(good, tables={**tables, wide: wrong}),
        "power of 2": replace(
            good, tables={key: np.tile(t[:1], (4, 1)) for key, t in tables.items()}
        ),
    }
    for reason, tensor in bad.items():
        with pytest.raises(BadScheme, match=f"layer7.*{reason}"):
            check_tensor(tensor, "layer7")
    with pytest.raises(BadScheme, match=r"at 4 bits: 2\.\.3 are possible"):
        dequantize(good, 4)


def test_layouts_refuse_what_is_not_theirs() -> None:
    good = small()
    layout = PlanesLayout.of(good.scheme, details(good))
    with pytest.raises(PackError, match="cannot hold anyprec2-3sA8"):
        weight_layout("planes3-8r8", good.scheme, details(good))
    with pytest.raises(PackError, match="cannot hold W4A8"):
        weight_layout("planes3-8r8", scheme("W4A8"), ())
    with pytest.raises(PackError, match="channels that share"):
        weight_layout("planes2-3r8", good.scheme, ())
    with pytest.raises(PackError, match="power of 2"):
        PlanesLayout(2, 3, True, 3)
    with pytest.raises(PackError, match="w3: code 15"):
        layout.pack(replace(good, codes=good.codes | np.uint8(8)), "w3")
    with pytest.raises(PackError, match="cannot hold"):
        layout.pack(replace(good, scheme=scheme("anyprec2-4sA8")), "w3")
    packed = layout.pack(good)
    with pytest.raises(PackError, match="planes is"):
        layout.unpack(packed, 17, 12, good.scheme)
    del packed.arrays["scales"]
    with pytest.raises(PackError, match="needs"):
        layout.unpack(packed, 9, 12, good.scheme)

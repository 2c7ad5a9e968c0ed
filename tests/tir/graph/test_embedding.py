"""Rows by id: every bit width and group against the numpy decode, ids of both signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from scheduled import AVX2, PROFILES, compiled, normal

from apq_tvm.codegen.layouts import default_layout, embedding_layout
from apq_tvm.formats import dequantize, details, parse_scheme
from apq_tvm.ops.graph.embedding import embedding
from apq_tvm.quantizers.registry import quantize_tensor
from apq_tvm.schedules.decide import Random
from apq_tvm.types import QuantizedTensor, Scheme

ROWS = 19


def codes_of(scheme: Scheme, width: int) -> QuantizedTensor:
    """A random table."""
    rng = np.random.default_rng(scheme.bits)
    group = width if scheme.group_size < 0 else scheme.group_size
    groups = -(-width // group)
    top = 1 << scheme.bits
    return QuantizedTensor(
        rng.integers(0, top, (ROWS, width)).astype(np.uint8),
        (rng.random((ROWS, groups)) + 0.1).astype(np.float16),
        rng.integers(0, top, (ROWS, groups)).astype(np.uint8) if scheme.zero_points else None,
        scheme,
    )


def quantized(scheme: Scheme, width: int) -> tuple[list[Any], Any]:
    """Packed arrays of a random table, and the table as float32."""
    tensor = codes_of(scheme, width)
    packed = embedding_layout(scheme).pack(tensor)
    return list(packed.arrays.values()), dequantize(tensor)


SCHEMES = [
    *(Scheme(bits, bits % 2 == 0, group_size=32) for bits in range(1, 9)),
    Scheme(4, group_size=32),
    *(Scheme(4, group_size=g) for g in (-1, 16, 64)),
]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_tables(profile: Any, scheme: Scheme) -> None:
    arrays, table = quantized(scheme, 64)
    ids = np.random.default_rng(0).integers(-ROWS, ROWS, (2, 9))
    y = np.full((2, 9, 64), np.nan, np.float32)
    compiled(embedding(ROWS, 64, ("B", "S"), "int64", scheme), profile)(*arrays, ids, y)
    np.testing.assert_array_equal(y, table[ids])


SHARED = ("W4A8g32", "W4zA8g32", "W3A8g16", "W8A8", "W1A8g64", "W2A2", "W4A32g128")


@pytest.mark.parametrize("width", [64, 50])
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("word", SHARED)
def test_tables_in_the_layout_of_a_linear_layer(word: str, lanes: int, width: int) -> None:
    """So that a language model's head and its embedding are one array."""
    scheme = parse_scheme(word)
    tensor = codes_of(scheme, width)
    layout = default_layout(scheme, details(tensor), lanes)
    assert layout.rows > 1
    ids = np.random.default_rng(0).integers(-ROWS, ROWS, (2, 9))
    y = np.full((2, 9, width), np.nan, np.float32)
    func = embedding(ROWS, width, ("B", "S"), "int64", scheme, layout)
    compiled(func, AVX2)(*layout.pack(tensor, "table").arrays.values(), ids, y)
    np.testing.assert_array_equal(y, dequantize(tensor)[ids])


@pytest.mark.parametrize("word", ["W4mA8g32", "W2sA8", "W3kA8", "W4kA8", "W6kA8"])
def test_tables_that_came_in_other_formats(word: str) -> None:
    """As files of codes have them: `apq_tvm.codes`."""
    scheme, width = parse_scheme(word), 304
    assert scheme is not None
    w = np.random.default_rng(0).standard_normal((ROWS, width)).astype(np.float32)
    tensor = quantize_tensor(w, scheme, search=False)
    ids = np.random.default_rng(0).integers(-ROWS, ROWS, (2, 9))
    y = np.full((2, 9, width), np.nan, np.float32)
    arrays = embedding_layout(scheme).pack(tensor, "table").arrays.values()
    compiled(embedding(ROWS, width, ("B", "S"), "int64", scheme), AVX2)(*arrays, ids, y)
    np.testing.assert_allclose(y, dequantize(tensor)[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 31, 32, 33])
def test_widths_that_do_not_fill_a_unit(width: int) -> None:
    scheme = Scheme(4, group_size=32)
    arrays, table = quantized(scheme, width)
    ids = np.arange(ROWS)
    y = np.full((ROWS, width), np.nan, np.float32)
    compiled(embedding(ROWS, width, ("S",), "int64", scheme), AVX2)(*arrays, ids, y)
    np.testing.assert_array_equal(y, table)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("dtype", "width"), [("int32", 50), ("int64", 1), ("int64", 16)])
def test_float_tables(profile: Any, dtype: str, width: int) -> None:
    table = normal(np.random.default_rng(1), (ROWS, width))
    ids = np.array([0, -1, ROWS - 1, -ROWS], dtype)
    y = np.full((4, width), np.nan, np.float32)
    compiled(embedding(ROWS, width, ("S",), dtype), profile)(table, ids, y)
    np.testing.assert_array_equal(y, table[ids])


def test_ids_outside_the_table_read_its_first_or_last_row() -> None:
    table = normal(np.random.default_rng(2), (ROWS, 8))
    ids = np.array([ROWS, 10**12, -ROWS - 1, -(10**12)])
    y = np.empty((4, 8), np.float32)
    compiled(embedding(ROWS, 8, ("S",)), AVX2)(table, ids, y)
    np.testing.assert_array_equal(y, table[[-1, -1, 0, 0]])


def test_one_id_without_axes() -> None:
    table = normal(np.random.default_rng(3), (ROWS, 8))
    y = np.empty((8,), np.float32)
    compiled(embedding(ROWS, 8, ()), AVX2)(table, np.array(4), y)
    np.testing.assert_array_equal(y, table[4])


@pytest.mark.parametrize("seed", range(10))
def test_random_decisions(seed: int) -> None:
    scheme = Scheme(4, True, group_size=32)
    arrays, table = quantized(scheme, 96)
    ids = np.random.default_rng(seed).integers(-ROWS, ROWS, (3, 5))
    y = np.empty((3, 5, 96), np.float32)
    compiled(embedding(ROWS, 96, ("B", "S"), "int64", scheme), AVX2, Random(seed))(*arrays, ids, y)
    np.testing.assert_array_equal(y, table[ids])

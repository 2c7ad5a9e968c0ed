"""``anyprec3-8``: what codes of divided cells mean, how many bytes they are, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apq_tvm.codegen.layouts import default_layout, weight_layout
from apq_tvm.errors import BadScheme
from apq_tvm.formats import (
    bits_per_weight,
    check_tensor,
    dequantize,
    details,
    nbytes,
    parse_scheme,
)
from apq_tvm.formats.anyprec import one_width, table_name
from apq_tvm.formats.anyprec_cells import CELLS, HALVES, MOST, UNITS, offsets, restored, snap
from apq_tvm.formats.scheme import check_scheme
from apq_tvm.quantizers import quantize_tensor
from apq_tvm.types import QuantizedTensor, Scheme


def scheme(text: str) -> Scheme:
    parsed = parse_scheme(text)
    assert parsed is not None
    return parsed


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, Scheme]:
    low, high = sorted(draw(st.tuples(st.integers(1, 8), st.integers(1, 8))))
    kind = scheme(f"anyprec{low}-{high}{draw(st.sampled_from(('', 'A32', 'A8')))}")
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    w = rng.standard_t(2, (draw(st.integers(1, 20)), draw(st.integers(1, 70))))
    w[draw(st.integers(0, len(w) - 1))] *= draw(st.sampled_from((0.0, 1e-30, 1.0)))
    return w.astype(np.float32), kind


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_any_matrix_packs_exactly(case: tuple[np.ndarray, Scheme]) -> None:
    w, kind = case
    check_scheme(kind, "w")
    tensor = quantize_tensor(w, kind)
    check_tensor(tensor, "w")
    n, k = w.shape
    layout = default_layout(kind, details(tensor), 8)
    assert layout.name.startswith("cells")
    assert layout == weight_layout(layout.name, kind, details(tensor))
    packed = layout.pack(tensor)
    shapes = {key: (a.shape, str(a.dtype)) for key, a in packed.arrays.items()}
    assert list(shapes.items()) == list(layout.shapes(n, k).items())
    back = layout.unpack(packed, n, k, kind)
    np.testing.assert_array_equal(back.codes, tensor.codes)
    assert set(back.tables) == set(tensor.tables)
    for key, table in tensor.tables.items():
        np.testing.assert_array_equal(back.tables[key], table)
    for bits in kind.widths:
        alone = one_width(tensor, bits)
        check_tensor(alone, "w")
        np.testing.assert_array_equal(dequantize(alone), dequantize(tensor, bits))


def test_codes_mean_what_is_written() -> None:
    """The formulas of `apq_tvm.formats.anyprec_cells`, one code after the other."""
    for h in range(MOST + 1):
        halves = np.full((1, CELLS), h, np.uint8)
        for bits in (6, 7, 8):
            found = offsets(halves, bits)[0, 0]
            for low in range(1 << (bits - 5)):
                up, last = low >> (bits - 6), low & ((1 << (bits - 6)) - 1)
                first = (h + 2) // 4 if up else -((h + 1) // 4)
                second = {6: 0, 7: 2 * h * (2 * last - 1), 8: h * (2 * last - 3)}[bits]
                assert found[low] == 16 * first + second
                assert abs(first) + UNITS <= 127 and abs(second) <= 127


def test_bytes_are_counted() -> None:
    for k, most in ((384, 9.88), (1536, 8.47)):
        w = np.random.default_rng(0).standard_normal((16, k)).astype(np.float32)
        assert bits_per_weight(quantize_tensor(w, scheme("anyprec3-8"))) <= most
    tensor = quantize_tensor(np.ones((4, 32), np.float32), scheme("anyprec3-8"))
    assert nbytes(tensor) == 4 * (32 + 2 + 8 + 16 + 32 + 32)
    assert nbytes(quantize_tensor(np.ones((4, 32), np.float32), scheme("anyprec6-6"))) == 4 * (
        24 + 2 + 32 + 32
    )


def test_centroids_settle_once() -> None:
    table = np.linspace(-1.2, 1.2, 999).astype(np.float16)[None]
    np.testing.assert_array_equal(snap(snap(table)), snap(table))


def test_what_does_not_fit_is_refused() -> None:
    tensor = quantize_tensor(np.ones((4, 32), np.float32), scheme("anyprec3-8"))
    halves = tensor.tables[HALVES]

    def other(**tables: np.ndarray) -> QuantizedTensor:
        return replace(tensor, tables={**tensor.tables, **tables})

    for bad, reason in (
        (other(halves=halves[:3]), "halves"),
        (other(halves=np.full_like(halves, MOST + 1)), "at most 42"),
        (other(halves=halves.astype(np.int32)), "int32"),
        (other(centroids6=np.zeros((4, 64), np.float16)), "tables"),
        (other(centroids5=restored(np.zeros((2, 32), np.int8))), "centroids"),
    ):
        with pytest.raises(BadScheme, match=reason):
            check_tensor(bad, "w")
    assert table_name(6) not in tensor.tables


@pytest.mark.parametrize(
    "text", ("anyprec3-8u", "anyprec3-8s2", "anyprec3-8c1s", "anyprec3-8sc1", "anyprecs3-8")
)
def test_no_other_spellings(text: str) -> None:
    with pytest.raises(BadScheme):
        parse_scheme(text)
    assert str(scheme("ANYPREC3-8A8G32")) == "anyprec3-8"


def test_errors_against_tables() -> None:
    """As good as a table per channel up to 5 bits; at 8 better than int8 centroids can be."""
    w = np.random.default_rng(1).standard_normal((48, 512)).astype(np.float32)
    ours, tables, shared = (
        quantize_tensor(w, scheme(f"anyprec3-8{end}")) for end in ("", "c1", "s")
    )

    def error(tensor: QuantizedTensor, bits: int) -> float:
        return float(np.square(dequantize(tensor, bits) - w).sum())

    for bits in (3, 4, 5):
        assert error(ours, bits) < 1.02 * error(tables, bits)
    for bits in range(3, 9):
        assert error(ours, bits) < error(shared, bits)
    assert error(ours, 8) < 0.8 * error(tables, 8)

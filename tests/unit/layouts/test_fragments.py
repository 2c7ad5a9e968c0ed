"""Layouts in the order of fragments: names, inverses, five levels in seven bits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from coded_tensors import tensor_of

from apq_tvm.codegen.layouts import FragmentLayout, quinary, weight_layout
from apq_tvm.errors import PackError
from apq_tvm.formats.balance import LEVELS
from apq_tvm.formats.scheme import parse_scheme
from apq_tvm.types import QuantizedTensor, Scheme

SCHEMES = (
    *(f"W{bits}A8" for bits in range(1, 9)),
    "W3zA8g64", "W4A8g32", "W2zA8g128", "W8A8g256", "W2*A8", "W2*A8g32", "W2*A4tg128",
)  # fmt: skip
SIZES = ((1, 1), (16, 256), (49, 300), (96, 513))


@pytest.mark.parametrize("planes", (False, True))
@pytest.mark.parametrize("name", SCHEMES)
def test_round_trip(name: str, planes: bool) -> None:
    scheme = parse_scheme(name)
    assert scheme is not None
    for n, k in SIZES:
        tensor = tensor_of(scheme, n, k)
        layout = FragmentLayout.of(scheme, planes)
        assert layout is not None
        assert weight_layout(layout.name, scheme) == layout
        packed = layout.pack(tensor)
        shapes = {key: (array.shape, str(array.dtype)) for key, array in packed.arrays.items()}
        assert shapes == layout.shapes(n, k)
        again = layout.unpack(packed, n, k, scheme)
        np.testing.assert_array_equal(again.codes, tensor.codes)
        np.testing.assert_array_equal(again.scales, tensor.scales)
        if tensor.zeros is not None:
            np.testing.assert_array_equal(again.zeros, tensor.zeros)


def test_a_plane_is_operand_a_of_a_product_of_bits() -> None:
    """PTX ISA, "Matrix Fragments for mma.m16n8k256", but for the order of columns."""
    layout = FragmentLayout(2, planes=True)
    row, column = 11, 101
    codes = np.zeros((16, 256), np.uint8)
    codes[row, column] = 2
    tensor = QuantizedTensor(codes, np.ones((16, 1), np.float16), None, Scheme(2))
    words = layout.pack(tensor).arrays["codes"][0, 0]
    plane, lane, word = np.argwhere(words)[0]
    assert (plane, lane // 4, word % 2) == (1, row % 8, row // 8)
    bit = 8 * (column % 4) + column // 32
    assert lane % 4 * 2 + word // 2 == column % 32 // 4 and words[plane, lane, word] == 1 << bit


def test_three_digits_of_five_levels_are_seven_bits() -> None:
    every = np.array(list(product(range(LEVELS), repeat=3)), np.uint8)
    codes = quinary.packed(*every.T)
    assert len(set(codes)) == LEVELS**3 and codes.max() < 128
    np.testing.assert_array_equal(np.stack(quinary.unpacked(codes), 1), every)
    assert all(max(quinary.digits(code)) < LEVELS for code in range(128))  # of damaged files


def test_names_of_other_codes_are_refused() -> None:
    with pytest.raises(PackError, match="cannot hold"):
        weight_layout("W2Br48k8p", Scheme(2))
    for name in ("W2Br16k8p", "W2Br48k8m", "W9r16k8m"):
        with pytest.raises(PackError):
            weight_layout(name, parse_scheme("W2*A8"))

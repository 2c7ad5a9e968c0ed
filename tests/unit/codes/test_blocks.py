"""Blocks of GGUF become tensors of ours that mean the same, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from apq_tvm.codes.blocks import DECODERS
from apq_tvm.codes.container import TYPES
from apq_tvm.formats import bits_per_weight, check_tensor, dequantize
from tests.cases.gguf_files import HALVES, NUMBERS, meaning, random_blocks

SCHEMES = {
    "Q4_0": ("W4A8g32", 0), "Q5_0": ("W5A8g32", 0), "Q8_0": ("W8A8g32", 0),
    "Q4_1": ("W4mA8g32", 0), "Q5_1": ("W5mA8g32", 0), "Q2_K": ("W2sA8", 0),
    "Q3_K": ("W3kA8", 0.125), "Q4_K": ("W4kA8", 0.125), "Q5_K": ("W5kA8", 0.125),
    "Q6_K": ("W6kA8", 0),
}  # fmt: skip
"""What each type becomes, and how many bits per weight more it takes."""


@pytest.mark.parametrize("kind", SCHEMES)
def test_every_weight_is_the_same_float(kind: str) -> None:
    _, block, nbytes = NUMBERS[kind]
    raw = random_blocks(kind, 3, 2 * block)
    tensor = DECODERS[kind](raw.reshape(3, 2, nbytes))
    check_tensor(tensor, kind)
    scheme, more = SCHEMES[kind]
    assert str(tensor.scheme) == scheme
    assert bits_per_weight(tensor) == 8 * nbytes / block + more
    np.testing.assert_array_equal(dequantize(tensor), meaning(kind, raw))


@pytest.mark.parametrize("kind", SCHEMES)
def test_the_gguf_package_says_so_too(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    _, block, nbytes = NUMBERS[kind]
    raw = random_blocks(kind, 4, 3 * block, seed=1)
    number = gguf.GGMLQuantizationType[kind]
    wanted = gguf.quants.dequantize(raw, number)
    tensor = DECODERS[kind](raw.reshape(4, 3, nbytes))
    np.testing.assert_array_equal(dequantize(tensor), wanted)


def test_floats_stay_floats() -> None:
    w = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    half = w.astype(np.float16)
    found = DECODERS["F16"](half.view(np.uint8).reshape(3, 8, 2))
    np.testing.assert_array_equal(found, half.astype(np.float32))
    high = np.ascontiguousarray(w.view(np.uint16).reshape(3, 8, 2)[..., 1])
    found = DECODERS["BF16"](high.view(np.uint8).reshape(3, 8, 2))
    np.testing.assert_allclose(found, w, rtol=2**-7)


def test_types_are_those_of_the_format() -> None:
    known = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}
    assert all(known[name] == sizes[1:] for name, sizes in NUMBERS.items())
    assert HALVES.keys() == SCHEMES.keys() == {name for name in DECODERS if name[0] == "Q"}

"""Codes found by searching a group's levels are those that every code's value gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apq_tvm.formats import parse_scheme
from apq_tvm.formats.families import dequantize
from apq_tvm.progress import Silent
from apq_tvm.quantizers.feedback.descend import round_to
from apq_tvm.quantizers.registry import prepare, quantize_tensor
from apq_tvm.types import QuantizedTensor

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")


def tensor_of(word: str) -> tuple[QuantizedTensor, np.ndarray]:
    """A tensor of 5 rows, whose last group is not full."""
    w = np.random.default_rng(3).standard_normal((5, 328)).astype(np.float32)
    scheme = parse_scheme(word)
    assert scheme is not None
    shared = prepare({"w": w}, scheme, None, Silent()) if scheme.family == "cb" else None
    return quantize_tensor(w, scheme, "w", shared=shared), w


@pytest.mark.parametrize("word", ["nl4", "cb3", "cb4g64", "cb2c8g32", "W2hA8g32", "W2*A8g32"])
def test_they_are_the_nearest(word: str) -> None:
    from apq_tvm.quantizers.torch.group_levels import GroupLevels

    tensor, w = tensor_of(word)
    levels = GroupLevels.of(tensor, "w")
    assert levels is not None
    flipped = tensor.scales.copy()
    flipped[0] *= -1  # levels fall there
    flipped[1] = 0  # all are one
    now = replace(tensor, scales=flipped) if word != "cb3" else tensor
    target = w + np.random.default_rng(4).standard_normal(w.shape).astype(np.float32)
    codes, values = levels.nearest(now, torch.from_numpy(target))
    wanted, nearest = round_to(now, target, "w")
    np.testing.assert_array_equal(values.numpy(), nearest)
    np.testing.assert_array_equal(dequantize(replace(now, codes=codes)), nearest)
    assert (codes[2:] == wanted[2:]).all()


@pytest.mark.parametrize("word", ["mixed24", "W2sA8", "bcq2g128", "W4zA8g32"])
def test_weights_with_levels_of_their_own_have_none(word: str) -> None:
    from apq_tvm.errors import BadScheme
    from apq_tvm.quantizers.torch.group_levels import GroupLevels

    tensor, _ = tensor_of(word)
    try:
        assert GroupLevels.of(tensor, "w") is None
    except BadScheme as error:
        assert "no codes that" in str(error)

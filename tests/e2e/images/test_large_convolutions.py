"""Float convolutions whose weights leave the second cache: in groups of channels, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, save

import apq_tvm
from apq_tvm.module import load_module
from apq_tvm.schedules.devices import find_profile
from apq_tvm.schedules.graph import convolution

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("channels", [48, 75, 130])
def test_groups_of_channels_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    """Of whole vectors and of a rest behind them, on every number of threads."""
    w = RNG.standard_normal((channels, 5, 3, 3)).astype(np.float32)
    nodes = [("Conv", "x w", "c", {"pads": [1] * 4}), ("Relu", "c", "y")]
    model = save(build(nodes, {"x": ("float32", ["b", 5, 9, 40])}, "y", {"w": w}), tmp_path)
    x = RNG.standard_normal((2, 5, 9, 40)).astype(np.float32)
    found = []
    for name, near in (("whole", 1 << 20), ("parts", 4096)):
        monkeypatch.setattr(convolution, "_near", lambda profile, near=near: near)
        apq_tvm.compile(model, tmp_path / name, scheme="float")
        module = load_module(tmp_path / name)
        for threads in (1, 2, 3):
            module.set_num_threads(threads)
            found.append(module.run(x=x)["y"])
    for each in found[1:]:
        np.testing.assert_array_equal(found[0], each)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    seen = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    wanted = np.maximum(np.einsum("bchwij,ncij->bnhw", seen, w, dtype=np.float64), 0)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "width", "pays"),
    [
        ((9, 2000, 16), 8, True),  # 1.2 MB of 2 in the second cache
        ((32, 4608, 16), 14, False),
        ((32, 4608, 16), 56, True),
        ((32, 4608, 16), "w", False),
    ],
)
def test_few_pixels_of_large_weights_are_products_of_matrices(
    weight: tuple[int, int, int], width: int | str, pays: bool
) -> None:
    assert convolution.pays(weight, width, find_profile("sapphirerapids")) is pays

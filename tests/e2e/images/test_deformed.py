"""Deformable convolution: every tap of a window where its offset says, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.module import load_module

PLAIN: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
WIDE: dict[str, Any] = {
    "kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 2, 1, 0], "dilations": [1, 2],
    "group": 2, "offset_group": 4,
}  # fmt: skip


def test_images(tmp_path: Path) -> None:
    nodes = [
        ("DeformConv", "x w o b m", "plain", PLAIN),
        ("DeformConv", "x w2 o2", "wide", WIDE),
        ("DeformConv", "x w o", "bare", {"pads": [1, 1, 1, 1]}),
    ]
    ends = {"x": (8, "h", "w"), "o": (18, "h", "w"), "m": (9, "h", "w"), "o2": (48, "p", "q")}
    inputs: dict[str, Any] = {name: ("float32", ["n", *end]) for name, end in ends.items()}
    weights = {"w": rand(6, 8, 3, 3), "b": rand(6), "w2": rand(4, 4, 3, 2, seed=1)}
    path = save(build(nodes, inputs, "plain wide bare", weights, 22), tmp_path)
    apq_tvm.compile(path, tmp_path / "deformed", scheme="float")
    shapes = {"x": (2, 8, 9, 7), "o": (2, 18, 9, 7), "m": (2, 9, 9, 7), "o2": (2, 48, 5, 7)}
    feeds = {name: rand(*shape, seed=i) * 2 for i, (name, shape) in enumerate(shapes.items())}
    got, want = load_module(tmp_path / "deformed").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, 1e-4, 1e-4, err_msg=name)


def test_of_torch_too(tmp_path: Path) -> None:
    """What calibration and learning compute."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")
    from apq_tvm.onnx_import import import_onnx
    from apq_tvm.quantizers.torch.graph import TorchGraph

    inputs = {"x": ("float32", [1, 8, 6, 7]), "o": ("float32", [1, 18, 6, 7])}
    nodes = [("DeformConv", "x w o", "y", PLAIN)]
    path = save(build(nodes, inputs, "y", {"w": rand(6, 8, 3, 3)}, 22), tmp_path)
    feeds = {"x": rand(1, 8, 6, 7), "o": rand(1, 18, 6, 7, seed=1)}
    with torch.no_grad():
        ours = TorchGraph(import_onnx(path)).run(feeds)["y"].numpy()
    np.testing.assert_allclose(ours, run_onnx(path, feeds)["y"], 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("sizes", "attrs", "error"),
    [
        ({"o": (2, 16, 9, 7)}, {}, "is not of 1 groups of 2 numbers for 3 x 3 taps"),
        ({"o": (2, 18, 9, 8)}, {}, "is not of 1 groups of 2 numbers for 3 x 3 taps"),
        ({"m": (2, 9, 9, 8)}, {}, "is not of 1 groups of 1 numbers for 3 x 3 taps"),
        ({}, {"offset_group": 3}, "its 8 channels are no 3 groups of offsets"),
        ({"x": (2, 8, 9)}, {}, "DeformConv"),
    ],
)
def test_what_does_not_fit_is_refused(
    sizes: dict[str, Any], attrs: dict[str, int], error: str, tmp_path: Path
) -> None:
    shapes = {"x": (2, 8, 9, 7), "o": (2, 18, 9, 7), "m": (2, 9, 9, 7), **sizes}
    inputs = {name: ("float32", list(shape)) for name, shape in shapes.items()}
    nodes = [("DeformConv", "x w o b m", "y", {**PLAIN, **attrs})]
    weights = {"w": rand(6, 8, 3, 3), "b": rand(6)}
    path = save(build(nodes, inputs, "y", weights, 22), tmp_path)
    with pytest.raises((UnsupportedModel, ImportFailed), match=error):
        apq_tvm.compile(path, tmp_path / "no")

"""Convolutions of which some taps see nothing but padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx

WIDE: dict[str, Any] = {"pads": [12] * 4, "dilations": [12, 12]}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "one tap is left": (WIDE, (1, 8, 10, 10), (16, 8, 3, 3)),
    "all are": ({"pads": [12] * 4, "dilations": [12, 12]}, (1, 8, 14, 14), (16, 8, 3, 3)),
    "one row": (WIDE, (1, 8, 10, 14), (16, 8, 3, 3)),
    "strides": ({**WIDE, "strides": [2, 3]}, (2, 8, 9, 11), (16, 8, 3, 3)),
    "one side": ({"pads": [4, 0, 0, 1], "dilations": [4, 1]}, (1, 8, 6, 7), (16, 8, 3, 2)),
    "groups": ({**WIDE, "group": 8}, (1, 8, 10, 10), (8, 1, 3, 3)),
    "a line": ({"pads": [30, 30], "dilations": [15]}, (1, 8, 12), (16, 8, 5)),
    "padding alone": ({"pads": [9, 0, 0, 0], "strides": [9, 1]}, (1, 8, 5, 5), (16, 8, 3, 3)),
}
LEFT = {"one tap is left": (1, 1), "all are": (3, 3), "one row": (1, 3), "a line": (1,)}


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_before(tmp_path: Path, name: str) -> None:
    attrs, shape, kernel = CASES[name]
    nodes = [("Conv", "x w c", "y", attrs), ("Relu", "y", "z")]
    weights = {"w": rand(*kernel), "c": rand(kernel[0], seed=1)}
    path = save(build(nodes, {"x": ("float32", shape)}, "y z", weights), tmp_path)
    if name in LEFT:
        kept = import_onnx(path).weights.values()
        taps = int(np.prod(LEFT[name])) * kernel[1] * kernel[0]
        assert max(array.size for array in kept) == taps
    apq_tvm.compile(path, tmp_path / "module", scheme="float")
    x = rand(*shape, seed=2)
    got, want = load_module(tmp_path / "module").run(x=x), run_onnx(path, {"x": x})
    for output, expected in want.items():
        np.testing.assert_allclose(got[output], expected, rtol=1e-4, atol=1e-5)


def test_codes_of_the_file_stay_whole(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (16, 8, 3, 3)).astype(np.int8)
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 0}), ("Conv", "x w", "y", WIDE)]
    weights = {"q": codes, "s": np.abs(rand(16)) / 100 + 0.01}
    path = save(build(nodes, {"x": ("float32", [1, 8, 10, 10])}, "y", weights), tmp_path)
    assert max(array.size for array in import_onnx(path).weights.values()) == codes.size

"""Values of a run rounded in blocks, truth values compared, signs of what has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.module import load_module


def test_blocks_of_a_run_and_equal_truths(tmp_path: Path) -> None:
    """33 columns: whole vectors and a rest; 20 columns in blocks of 16: the last is shorter."""
    blocks = {"axis": 1, "block_size": 16}
    nodes = [
        ("QuantizeLinear", "x s z", "codes", blocks),
        ("DequantizeLinear", "codes s z", "y", blocks),
        ("QuantizeLinear", "x t", "plain", {**blocks, "axis": -2, "output_dtype": 3}),
        ("DequantizeLinear", "codes computed", "w", blocks),
        ("Exp", "logarithms", "computed"),
        ("Less", "a b", "less"),
        ("Equal", "less never", "not_less"),
        ("Less", "b a", "more"),
        ("Equal", "less more", "same"),
        ("Sign", "codes", "signs"),
    ]
    inputs: dict[str, Any] = {"x": ("float32", [18, 20]), "logarithms": ("float32", [18, 2])}
    inputs |= {name: ("float32", ["n", 33]) for name in "ab"}
    weights = {"never": np.array(False), "s": np.abs(rand(18, 2, seed=3)) / 16 + 0.01}
    weights["z"] = np.random.default_rng(0).integers(90, 160, (18, 2)).astype(np.uint8)
    weights["t"] = np.abs(rand(2, 20, seed=4)) / 16 + 0.01
    path = save(build(nodes, inputs, "y codes plain w not_less same signs", weights, 21), tmp_path)
    apq_tvm.compile(path, tmp_path / "blocks", scheme="float")
    feeds = {"x": 3 * rand(18, 20), "logarithms": rand(18, 2, seed=5)}
    feeds |= {"a": rand(3, 33, seed=1), "b": rand(3, 33, seed=2)}
    feeds["b"][:, ::4] = feeds["a"][:, ::4]
    feeds["x"][4, 7] = np.nan
    got, want = load_module(tmp_path / "blocks").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)

"""Images of integers resized between their values: rounded once, not along each axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx_models import build, run_onnx, save

import apq_tvm
from apq_tvm.module import load_module


def test_integers_are_rounded_once(tmp_path: Path) -> None:
    """By scales, to sizes that do not divide, and by scales that a run brings."""
    nodes: list[Any] = [
        ("Resize", "x _ twice", "y", {"mode": "linear"}),
        ("Resize", "x _ _ sizes", "odd", {"mode": "linear"}),
        ("Resize", "z _ given", "late", {"mode": "linear"}),
    ]
    inputs: dict[str, Any] = {"x": ("uint8", ["b", 3, 6, 8]), "z": ("int8", [2, 3, 6, 8])}
    inputs["given"] = ("float32", [4])
    weights = {"twice": np.float32([1, 1, 2, 2]), "sizes": np.int64([2, 3, 11, 7])}
    path = save(build(nodes, inputs, "y odd late", weights, 19), tmp_path)
    apq_tvm.compile(path, tmp_path / "resized", scheme="float")
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {"x": rng.integers(0, 256, (2, 3, 6, 8)).astype(np.uint8)}
    feeds["z"] = rng.integers(-128, 128, (2, 3, 6, 8)).astype(np.int8)
    feeds["given"] = np.float32([1, 1, 2, 0.5])
    got, want = load_module(tmp_path / "resized").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype and got[name].shape == expected.shape
        apart = got[name].astype(int) != expected.astype(int)
        assert apart.mean() < 0.01, name  # where a sum falls on the other side of a whole number

"""Images of one type of floats, read by a grid of another, which ONNX Runtime has no kernel for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, run_onnx, save

import apq_tvm
from apq_tvm.errors import UnsupportedModel
from apq_tvm.module import load_module


def test_grids_of_other_floats(tmp_path: Path) -> None:
    """As where both are float32, or float64 with a float64 image, and of the image's type."""
    rng = np.random.default_rng(0)
    image, grid = rng.standard_normal((2, 8, 6, 7)), rng.uniform(-1.1, 1.1, (2, 3, 5, 2))
    pairs = {"fine": ("float32", "float64"), "half": ("float16", "float32"),
             "wide": ("float64", "float32")}  # fmt: skip
    nodes: list[Any] = []
    inputs: dict[str, Any] = {}
    feeds: dict[str, Any] = {}
    for name, (x, g) in pairs.items():
        nodes.append(("GridSample", f"{name}_x {name}_g", name))
        inputs |= {f"{name}_x": (x, ["b", 8, "h", "w"]), f"{name}_g": (g, ["b", 3, 5, 2])}
        feeds |= {f"{name}_x": image.astype(x), f"{name}_g": grid.astype(g)}
    path = save(build(nodes, inputs, " ".join(pairs), opset=20), tmp_path)
    apq_tvm.compile(path, tmp_path / "sampled", scheme="float")
    found = load_module(tmp_path / "sampled").run(feeds)
    plain = {"x": ("float32", ["b", 8, "h", "w"]), "g": ("float32", ["b", 3, 5, 2])}
    other = tmp_path / "plain"
    other.mkdir()
    reference = save(build([("GridSample", "x g", "y")], plain, "y", opset=20), other)
    for name, (x, _) in pairs.items():
        given = {k: feeds[f"{name}_{k}"].astype(np.float32) for k in "xg"}
        wanted = run_onnx(reference, given)["y"]
        assert found[name].dtype == x
        bound = 2e-3 if x == "float16" else 1e-5
        np.testing.assert_allclose(found[name], wanted, rtol=bound, atol=bound)


def test_integers_are_refused(tmp_path: Path) -> None:
    inputs = {"x": ("int32", [1, 2, 4, 4]), "g": ("float32", [1, 3, 3, 2])}
    path = save(build([("GridSample", "x g", "y")], inputs, "y", opset=20), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"GridSample .*of int32 it cannot be compiled"):
        apq_tvm.compile(path, tmp_path / "sampled")

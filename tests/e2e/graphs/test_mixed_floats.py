"""Types of floats that kernels are not of, or that ONNX Runtime has no kernel for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

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


def test_what_is_of_float32_alone_takes_float64(tmp_path: Path) -> None:
    """In float32, with outputs of the types that the operators give."""
    ms = "com.microsoft."
    nodes: list[Any] = [
        ("LayerNormalization", "x g b", "n mean inverse"),
        ("RMSNormalization", "x g", "r"),
        (f"{ms}SkipLayerNormalization", "x n g b", "s"),
        ("LRN", "x", "l", {"size": 3}),
        ("MeanVarianceNormalization", "x", "m"),
        ("Attention", "x x x", "a"),
        ("DFT", "d", "f"),
        (f"{ms}FastGelu", "x", "gelu"),
        (f"{ms}QuickGelu", "x", "quick"),
    ]
    outputs = "n mean inverse r s l m a f gelu quick"
    shapes = {"x": [2, 4, 6, 8], "d": [3, 8, 1]}
    weights = {"g": rand(8), "b": rand(8, seed=1)}
    found = {}
    feeds = {name: rand(*shape, seed=2) for name, shape in shapes.items()}
    for kind in ("float32", "float64"):
        (tmp_path / kind).mkdir()
        given = {name: (kind, shape) for name, shape in shapes.items()}
        own = {name: array.astype(kind) for name, array in weights.items()}
        model = build(nodes, given, outputs, own, opset=23, domains={"com.microsoft": 1})
        path = save(model, tmp_path / kind)
        apq_tvm.compile(path, tmp_path / kind / "compiled", scheme="float")
        module = load_module(tmp_path / kind / "compiled")
        found[kind] = module.run({name: array.astype(kind) for name, array in feeds.items()})
    for name, value in found["float64"].items():
        assert value.dtype == ("float32" if name in ("mean", "inverse") else "float64")
        np.testing.assert_allclose(value, found["float32"][name], 1e-4, 1e-5, err_msg=name)

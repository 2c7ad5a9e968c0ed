"""Products that ONNX Runtime's optimizer saved with what stood around them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.errors import UnsupportedModel
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx

MS = {"com.microsoft": 1}


def products(feeds: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """FusedMatMul in all its forms, of inputs; their sizes are numbers but for the batch."""
    nodes, inputs = list[Any](), dict[str, Any]()
    for at, flags in enumerate(product((0, 1), repeat=4)):
        sides = []
        for side, shape in enumerate(((2, 3, 4, 5), (2, 3, 5, 6))):
            x = rand(*shape, seed=at)
            x = x.swapaxes(-1, -2) if flags[side] else x
            x = np.moveaxis(x, -2, 0) if flags[2 + side] else x
            sides.append(f"{'ab'[side]}{at}")
            feeds[sides[-1]] = np.ascontiguousarray(x)
            inputs[sides[-1]] = ("float32", x.shape)
        names = ("transA", "transB", "transBatchA", "transBatchB")
        attrs = dict(zip(names, flags, strict=True)) | {"alpha": 0.5}
        nodes.append(("com.microsoft.FusedMatMul", " ".join(sides), f"p{at}", attrs))
    return nodes, inputs


def test_fused_products(tmp_path: Path) -> None:
    """And behind weights: layers of the module."""
    feeds: dict[str, Any] = {"x": rand(2, 6), "image": rand(2, 3, 6, 7), "other": rand(2, 4, 6, 7)}
    nodes, inputs = products(feeds)
    inputs |= {"x": ("float32", ["n", 6]), "image": ("float32", ["n", 3, 6, 7])}
    inputs["other"] = ("float32", ["n", 4, 6, 7])
    leaky = {"activation": "LeakyRelu", "activation_params": [0.25], "pads": [1, 1, 1, 1]}
    clip = {"activation": "Clip", "activation_params": [-0.5, 1.0]}
    hard = {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4}
    gemm = "com.microsoft.FusedGemm"
    nodes += [
        ("com.microsoft.FusedMatMul", "x w", "linear", {"transB": 1, "alpha": 2.0}),
        (gemm, "x w bias", "relu", {"activation": "Relu", "transB": 1}),
        (gemm, "x w bias", "hard", {**hard, "transB": 1, "alpha": 0.5}),
        ("com.microsoft.FusedConv", "image k c other", "leaky", leaky),
        ("com.microsoft.FusedConv", "image one", "clip", clip),
    ]
    weights = {"w": rand(5, 6), "bias": rand(5), "k": rand(4, 3, 3, 3), "c": rand(4)}
    weights["one"] = rand(8, 3, 1, 1)
    outputs = " ".join([*(f"p{i}" for i in range(16)), "linear relu hard leaky clip"])
    path = save(build(nodes, inputs, outputs, weights, 17, MS), tmp_path)
    apq_tvm.compile(path, tmp_path / "fused", scheme="float")
    got, want = load_module(tmp_path / "fused").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    """Before readers ask for the shape of what it makes."""
    nodes = [
        ("com.microsoft.Nothing", "x", "y"),
        ("Shape", "y", "s"),
        ("Reshape", "x s", "z"),
    ]
    path = save(build(nodes, {"x": ("float32", ["n", 4])}, "z", None, 17, MS), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"com\.microsoft\.Nothing: 'n_y'"):
        import_onnx(path)

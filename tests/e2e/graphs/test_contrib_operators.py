"""Small operators of ONNX Runtime's own, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.errors import UnsupportedModel
from apq_tvm.module import load_module

MS = "com.microsoft."


def test_each(tmp_path: Path) -> None:
    nodes = [
        (MS + "CDist", "x known", "far", {"metric": "euclidean"}),
        (MS + "CDist", "x known", "squares", {"metric": "sqeuclidean"}),
        (MS + "ExpandDims", "x last", "more"),
        (MS + "Trilu", "x one", "upper", {"upper": 1}),
        (MS + "Trilu", "x", "lower", {"upper": 0}),
        (MS + "TransposeMatMul", "x known", "scaled", {"transB": 1, "alpha": 0.5}),
        (MS + "NhwcMaxPool", "image", "pooled", {"kernel_shape": [2, 3], "strides": [1, 2]}),
    ]
    inputs: dict[str, Any] = {"x": ("float32", ["rows", 5]), "image": ("uint8", ["b", 6, 7, 3])}
    weights = {"known": rand(4, 5, seed=1), "last": np.int32(-1), "one": np.int64(1)}
    outputs = "far squares more upper lower scaled pooled"
    path = save(build(nodes, inputs, outputs, weights, 17, {"com.microsoft": 1}), tmp_path)
    apq_tvm.compile(path, tmp_path / "contrib", scheme="float")
    image = np.random.default_rng(0).integers(0, 256, (2, 6, 7, 3)).astype(np.uint8)
    feeds = {"x": rand(3, 5), "image": image}
    got, want = load_module(tmp_path / "contrib").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_other_metrics_are_refused(tmp_path: Path) -> None:
    nodes = [(MS + "CDist", "x known", "y", {"metric": "cosine"})]
    weights = {"known": rand(4, 5)}
    inputs = {"x": ("float32", ["rows", 5])}
    path = save(build(nodes, inputs, "y", weights, 17, {"com.microsoft": 1}), tmp_path)
    with pytest.raises(UnsupportedModel, match="'cosine' is neither euclidean nor sqeuclidean"):
        apq_tvm.compile(path, tmp_path / "no")

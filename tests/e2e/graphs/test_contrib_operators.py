"""Small operators of ONNX Runtime's own, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.errors import ImportFailed, UnsupportedModel
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


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(("n", "k", "block"), [(6, 48, 64), (5, 33, 16)])
def test_weights_of_bitsandbytes(kind: int, n: int, k: int, block: int, tmp_path: Path) -> None:
    """FP4 and NF4, whose blocks run on over rows."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.integers(0, 256, -(-n * k // 2)).astype(np.uint8)}
    weights["absmax"] = rng.uniform(0.1, 1, -(-n * k // block)).astype(np.float32)
    attrs = {"N": n, "K": k, "block_size": block, "quant_type": kind}
    nodes = [(MS + "MatMulBnb4", "x w absmax", "y", attrs)]
    inputs = {"x": ("float32", ["b", 3, k])}
    path = save(build(nodes, inputs, "y", weights, 17, {"com.microsoft": 1}), tmp_path)
    apq_tvm.compile(path, tmp_path / "bnb", scheme="float")
    feeds = {"x": rand(2, 3, k)}
    got = load_module(tmp_path / "bnb").run(feeds)["y"]
    np.testing.assert_allclose(got, run_onnx(path, feeds)["y"], 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("attrs", "error"),
    [
        ({"quant_type": 2}, "quant_type 2 is neither 0"),
        ({"block_size": 1 << 40, "N": 7}, "needs 112 of uint8"),
        ({"block_size": 16}, "12 floats are needed"),
        ({"K": -1}, "K=-1; a positive integer is needed"),
    ],
)
def test_bad_weights_of_bitsandbytes(attrs: dict[str, int], error: str, tmp_path: Path) -> None:
    whole = {"N": 6, "K": 32, "block_size": 64, **attrs}
    nodes = [(MS + "MatMulBnb4", "x w absmax", "y", whole)]
    weights = {"w": np.zeros(96, np.uint8), "absmax": np.ones(3, np.float32)}
    inputs = {"x": ("float32", ["b", 32])}
    path = save(build(nodes, inputs, "y", weights, 17, {"com.microsoft": 1}), tmp_path)
    with pytest.raises((UnsupportedModel, ImportFailed), match=error):
        apq_tvm.compile(path, tmp_path / "no")


def test_small_matrices_are_inverted(tmp_path: Path) -> None:
    inputs = {f"x{n}": ("float32", ["b", n, n]) for n in range(1, 5)}
    nodes = [(MS + "Inverse", name, f"y{name}") for name in inputs]
    outputs = " ".join(f"y{name}" for name in inputs)
    path = save(build(nodes, inputs, outputs, {}, 17, {"com.microsoft": 1}), tmp_path)
    apq_tvm.compile(path, tmp_path / "inverted", scheme="float")
    feeds = {f"x{n}": rand(3, n, n, seed=n) + 3 * np.eye(n, dtype=np.float32) for n in range(1, 5)}
    got, want = load_module(tmp_path / "inverted").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, 1e-4, 1e-5, err_msg=name)


def test_large_matrices_are_not_inverted(tmp_path: Path) -> None:
    inputs = {"x": ("float32", [2, 5, 5])}
    nodes = [(MS + "Inverse", "x", "y")]
    path = save(build(nodes, inputs, "y", {}, 17, {"com.microsoft": 1}), tmp_path)
    with pytest.raises(
        UnsupportedModel, match=r"Inverse 'n_y': matrices of 5 x 5; up to 4 x 4 can"
    ):
        apq_tvm.compile(path, tmp_path / "no")

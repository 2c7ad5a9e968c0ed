"""Operators beyond transformers in torch: what ONNX Runtime computes, and what learns by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

from apq_tvm.onnx_import import import_onnx

torch = pytest.importorskip("torch", reason="needs torch: pip install 'apq-tvm[calibrate]'")

IMAGES = [
    ("Conv", "x w3", "c", {"pads": [1, 1, 1, 1], "strides": [2, 1]}),
    ("PRelu", "c slope", "p"),
    ("ConvTranspose", "p wt", "up", {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    ("MaxPool", "p", "most", {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    ("AveragePool", "x", "mean", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1,
                                  "strides": [2, 2]}),
    ("LpPool", "x", "norm", {"kernel_shape": [2, 2], "p": 2}),
    ("Resize", "x _ scales", "near", {"mode": "nearest", "nearest_mode": "floor",
                                      "coordinate_transformation_mode": "asymmetric"}),
    ("Resize", "x _ _ sizes", "linear", {"mode": "linear",
                                         "coordinate_transformation_mode": "align_corners"}),
    ("Resize", "x _ _ sizes", "cubic", {"mode": "cubic"}),
    ("Resize", "c _ _ wide", "half", {"mode": "linear"}),
    ("Pad", "x around", "reflected", {"mode": "reflect"}),
    ("Pad", "x cut value", "moved"),
    ("GlobalMaxPool", "x", "top"),
    ("InstanceNormalization", "x gain shift", "instance"),
    ("DepthToSpace", "c4", "deep", {"blocksize": 2}),
    ("Concat", "x x", "c6", {"axis": 1}),
    ("Slice", "c6 zero four one", "c4"),
    ("LRN", "x", "lrn", {"size": 3}),
    ("Conv", "c6 wg", "groups", {"group": 3, "pads": [0, 1, 1, 0]}),
    ("HardSigmoid", "x", "hard", {"alpha": 0.3}),
    ("LeakyRelu", "x", "leaky", {"alpha": 0.1}),
    ("Selu", "x", "selu"),
    ("TopK", "x two", "best where", {"axis": 3}),
    ("GatherElements", "x where", "found", {"axis": 3}),
    ("ReduceLogSumExp", "x", "lse", {"axes": [1, 3]}),
    ("ReduceProd", "x", "prod", {"axes": [2]}),
    ("Tile", "x twice", "tiled"),
    ("Einsum", "x x", "gram", {"equation": "nchw,ndhw->ncd"}),
]  # fmt: skip


def test_images_agree_with_onnxruntime(tmp_path: Path) -> None:
    from apq_tvm.quantizers.torch.graph import TorchGraph

    def whole(*numbers: int) -> np.ndarray:
        return np.array(numbers, np.int64)

    weights = {
        "w3": rand(5, 3, 3, 3), "slope": rand(5, 1, 1), "wt": rand(5, 4, 3, 2),
        "scales": np.array([1, 1, 2, 1.5], np.float32), "sizes": whole(2, 3, 9, 5),
        "wide": whole(2, 5, 7, 13), "around": whole(0, 0, 2, 1, 0, 0, 1, 3),
        "cut": whole(0, 0, -1, 2, 0, 0, 1, -2), "value": np.array(0.5, np.float32),
        "gain": rand(3), "shift": rand(3), "two": whole(2), "twice": whole(1, 2, 1, 2),
        "zero": whole(0), "four": whole(4), "one": whole(1), "wg": rand(12, 2, 3, 2),
    }  # fmt: skip
    outputs = " ".join(name for _, _, made, *_ in IMAGES for name in made.split() if name != "c6")
    behind = ("c6", "c4", "deep", "groups")
    order = sorted(IMAGES, key=lambda node: behind.index(node[2]) if node[2] in behind else -1)
    path = save(build(order, {"x": ("float32", [2, 3, 6, 8])}, outputs, weights, 17), tmp_path)
    feeds = {"x": rand(2, 3, 6, 8)}
    with torch.no_grad():
        ours = TorchGraph(import_onnx(path)).run(feeds)
    for name, value in run_onnx(path, feeds).items():
        np.testing.assert_allclose(ours[name].numpy(), value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_convolutions_and_recurrent_layers_are_calibrated(tmp_path: Path) -> None:
    from apq_tvm.calibrate import calibrate
    from apq_tvm.evaluate import evaluate_scheme

    weights = {
        "w3": rand(24, 8, 3, 3) / 6, "b3": rand(24), "shape": np.array([0, 24, -1], np.int64),
        "w": rand(1, 64, 24) / 5, "r": rand(1, 64, 16) / 4, "b": rand(1, 128),
        "last": rand(16, 24) / 4,
    }  # fmt: skip
    nodes = [
        ("Conv", "x w3 b3", "c", {"pads": [1, 1, 1, 1]}),
        ("Relu", "c", "a"),
        ("Reshape", "a shape", "flat"),
        ("Transpose", "flat", "steps", {"perm": [2, 0, 1]}),
        ("LSTM", "steps w r b", "h", {"hidden_size": 16}),
        ("ReduceMean", "h", "mean", {"axes": [0, 1], "keepdims": 0}),
        ("MatMul", "mean last", "y"),
    ]
    model = build(nodes, {"x": ("float32", ["n", 8, 4, 4])}, "y", weights, 17)
    path, inputs = save(model, tmp_path), tmp_path / "in.npz"
    x = np.maximum(np.random.default_rng(0).standard_normal((96, 8, 4, 4)), -0.2)
    np.savez(inputs, x=x.astype(np.float32))
    calibrate(path, inputs, tmp_path / "calibration.npz")
    errors = {}
    for method in ("rtn", "gptq"):
        given = None if method == "rtn" else tmp_path / "calibration.npz"
        report = evaluate_scheme(path, "W3A8", inputs, method=method, calibration=given)
        errors[method] = report["outputs"]["y"]["relative_error"]
    assert errors["gptq"] < errors["rtn"] < 0.5

"""Files that ONNX Runtime saved behind its optimizer: every attribute, layouts of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx

MS = "com.microsoft."


def test_images_of_codes_with_channels_last(tmp_path: Path) -> None:
    """As its last level leaves convolutions and averages of integers; by one step at most."""
    rng = np.random.default_rng(0)
    window = {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "strides": [2, 1], "channels_last": 1}
    nodes: list[Any] = [
        ("QuantizeLinear", "x s z", "q"),
        (MS + "QLinearConv", "q s z w ws wz t z b", "c", window),
        (MS + "QLinearAveragePool", "c t z t z", "a", {"kernel_shape": [2, 2], "channels_last": 1}),
        (MS + "QLinearGlobalAveragePool", "c t z t z", "g", {"channels_last": 1}),
        *[("DequantizeLinear", f"{name} t z", f"{name}_y") for name in "cag"],
    ]
    weights: dict[str, Any] = {"s": np.float32(0.05), "t": np.float32(0.04), "z": np.uint8(118)}
    weights |= {"w": rng.integers(-127, 128, (8, 5, 3, 3)).astype(np.int8)}
    weights |= {"ws": rng.uniform(0.001, 0.002, 8).astype(np.float32), "wz": np.zeros(8, np.int8)}
    weights |= {"b": rng.integers(-900, 900, 8).astype(np.int32)}
    model = build(nodes, {"x": ("float32", ["b", 9, 7, 5])}, "c_y a_y g_y", weights, 17,
                  {"com.microsoft": 1})  # fmt: skip
    path, feeds = save(model, tmp_path), {"x": rand(2, 9, 7, 5)}
    apq_tvm.compile(path, tmp_path / "saved", scheme="float")
    got = load_module(tmp_path / "saved").run(feeds)
    for name, value in run_onnx(path, feeds).items():
        assert got[name].shape == value.shape
        assert np.abs(got[name] - value).max() <= 0.0401, name


def test_an_axis_that_one_scale_leaves_without_a_meaning(tmp_path: Path) -> None:
    """A bias in codes, with ``axis`` at its default written out."""
    nodes = [("DequantizeLinear", "b s", "bias", {"axis": 1}), ("Add", "x bias", "y")]
    weights = {"b": np.arange(-3, 5, dtype=np.int32), "s": np.full(1, 0.25, np.float32)}
    path = save(build(nodes, {"x": ("float32", ["n", 8])}, "y", weights, 17), tmp_path)
    apq_tvm.compile(path, tmp_path / "saved", scheme="float")
    feeds = {"x": rand(3, 8)}
    got = load_module(tmp_path / "saved").run(feeds)["y"]
    np.testing.assert_array_equal(got, run_onnx(path, feeds)["y"])


def test_blocks_of_channels_are_refused_with_what_to_do(tmp_path: Path) -> None:
    nodes = [("com.microsoft.nchwc.Conv", "x w", "y", {"kernel_shape": [1, 1]})]
    weights, inputs = {"w": rand(16, 3, 1, 1)}, {"x": ("float32", [1, 3, 4, 4])}
    domains = {"com.microsoft.nchwc": 1}
    path = save(build(nodes, inputs, "y", weights, 17, domains), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"for one processor .* ORT_ENABLE_EXTENDED"):
        apq_tvm.compile(path, tmp_path / "no")


def test_a_scale_that_is_broadcast(tmp_path: Path) -> None:
    """What its optimizer makes of a norm over channels."""
    nodes = [("SimplifiedLayerNormalization", "x g", "y", {"axis": 1, "epsilon": 1e-6})]
    inputs = {"x": ("float32", ["b", 4, 3, 5])}
    path = save(build(nodes, inputs, "y", {"g": rand(4, 1, 1)}, 17), tmp_path)
    apq_tvm.compile(path, tmp_path / "saved", scheme="float")
    feeds = {"x": rand(2, 4, 3, 5, seed=1)}
    got = load_module(tmp_path / "saved").run(feeds)["y"]
    np.testing.assert_allclose(got, run_onnx(path, feeds)["y"], 1e-5, 1e-5)


@pytest.mark.parametrize("other", [False, True])
def test_weights_that_are_there_twice(tmp_path: Path, other: bool) -> None:
    model = build([("Add", "x w", "y")], {"x": ("float32", ["n", 3])}, "y", {"w": rand(3)}, 17)
    again = onnx.TensorProto()
    again.CopyFrom(model.graph.initializer[0])
    if other:
        again.raw_data = bytes(12)
    model.graph.initializer.append(again)
    path = tmp_path / "twice.onnx"
    path.write_bytes(model.SerializeToString())
    if other:
        with pytest.raises(ImportFailed, match="weight names must be unique: 'w'"):
            import_onnx(path)
        return
    assert import_onnx(path).weights["w"].shape == (3,)


def test_codes_of_four_bits_in_a_file_of_an_earlier_opset(tmp_path: Path) -> None:
    """As its quantizer leaves weights; opset 21 is the first that has the type."""
    nodes = [("DequantizeLinear", "w s z", "wf", {"axis": 1}), ("MatMul", "x wf", "y")]
    codes = np.arange(-8, 8).reshape(4, 4).repeat(8, 0).astype(ml_dtypes.int4)
    weights = {"w": codes, "s": np.full(4, 0.1, np.float32), "z": np.zeros(4, ml_dtypes.int4)}
    model = build(nodes, {"x": ("float32", ["n", 32])}, "y", weights, 17)
    path, x = save(model, tmp_path), rand(3, 32)
    apq_tvm.compile(path, tmp_path / "saved", scheme="float")
    got = load_module(tmp_path / "saved").run({"x": x})["y"]
    np.testing.assert_allclose(got, x @ (codes.astype(np.float32) * 0.1), 1e-5, 1e-5)

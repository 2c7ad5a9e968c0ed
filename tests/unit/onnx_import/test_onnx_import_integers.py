"""Products of integers and rounded activations become layers with the file's codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import build, check, feeds_for, only, ops, rand, run_node, run_onnx, save
from onnx_reference import run_reference
from quantized_onnx import MS, integers, kept

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from apq_tvm.types import ImportedModel


def near(path: Path, tolerance: float, rows: int = 5) -> ImportedModel:
    """Import; the float result is near ONNX Runtime's, which rounds activations."""
    model = import_onnx(path)
    feeds = feeds_for(model, {"b": rows, "s": 3})
    want, got = run_onnx(path, feeds), run_reference(model, feeds, run_node)
    for name, value in want.items():
        wide = value.astype(np.float64)
        error = np.sqrt(((got[name] - wide) ** 2).mean() / (wide**2).mean())
        assert error < tolerance, (name, error)
    return model


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_quantize_dynamic_of_onnxruntime(tmp_path: Path, per_channel: bool, kind: str) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    nodes = [
        ("Gather", "t ids", "x"),
        ("MatMul", "x w", "h"),
        ("Add", "h c", "r"),
        ("Relu", "r", "g"),
        ("MatMul", "g v", "y"),
    ]
    weights = {"t": rand(40, 32), "w": rand(32, 24, seed=1), "c": rand(24), "v": rand(24, 32)}
    source = save(build(nodes, {"ids": ("int64", ["b", "s"])}, "y", weights, 13), tmp_path)
    path = tmp_path / "quantized.onnx"
    quantize_dynamic(source, path, weight_type=QuantType[kind], per_channel=per_channel)
    assert "MatMulInteger" in {n.op_type for n in onnx.load(path).graph.node}
    model = near(path, 0.03)
    assert ops(model) == {"apq.Embedding": 1, "apq.Linear": 2} and len(model.quantized) == 3
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}
    offset = 128 if kind == "QInt8" else 0
    for node in model.nodes:
        if node.op == "apq.Linear":
            letter = "w" if model.weights[node.inputs[1]].shape == (24, 32) else "v"
            codes = stored[f"{letter}_quantized"].astype(np.int32) + offset
            np.testing.assert_array_equal(model.quantized[node.inputs[1]].codes, codes.T)
    assert sum("activations are rounded by the scheme" in n for n in model.notes.values()) == 1


def test_scales_multiplied_one_after_the_other(tmp_path: Path) -> None:
    nodes = [
        ("DynamicQuantizeLinear", "x", "a s z"),
        ("MatMulInteger", "a q z", "i"),
        ("Cast", "i", "f", {"to": 1}),
        ("Mul", "ws f", "g"),
        ("Mul", "g s", "y"),
    ]
    values, codes = integers("int8", 32, 6, small=True)
    inputs = {"x": ("float32", ["b", 32])}
    path = save(build(nodes, inputs, "y", {"q": values, "ws": np.abs(rand(6)) + 0.1}), tmp_path)
    model = near(path, 0.03)
    assert ops(model) == {"apq.Linear": 1}
    np.testing.assert_array_equal(kept(model).codes, codes.T)


def test_an_integer_product_of_other_integers_stays(tmp_path: Path) -> None:
    nodes = [("MatMulInteger", "a q", "y")]
    weights = {"q": integers("int8", 32, 6)[0]}
    path = save(build(nodes, {"a": ("uint8", ["b", 32])}, "y", weights), tmp_path)
    assert ops(check(path, {"b": 3})) == {"MatMulInteger": 1}


@pytest.mark.parametrize("op", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_integer_products(tmp_path: Path, op: str, bias: bool) -> None:
    values, codes = integers("uint8", 32, 6)
    weights = {"q": values, "ws": np.abs(rand(6)) + 0.1, "wz": np.full(6, 125, np.uint8)}
    weights |= {"c": rand(6)} if bias else {}
    end = "c" if bias else ""
    if op == "DynamicQuantizeMatMul":
        nodes = [(f"com.microsoft.{op}", f"x q ws wz {end}", "y")]
    else:
        nodes = [
            ("DynamicQuantizeLinear", "x", "a s z"),
            (f"com.microsoft.{op}", f"a q s ws z wz {end}", "y"),
        ]
    inputs = {"x": ("float32", ["b", 32])}
    path = save(build(nodes, inputs, "y", weights, domains=MS), tmp_path)
    model = near(path, 0.03)
    assert ops(model) == {"apq.Linear": 1}
    np.testing.assert_array_equal(kept(model).codes, codes.T)


SCALES = {"xs": np.float32(0.02), "xz": np.uint8(130), "s": np.abs(rand(6)) + 0.1}


def test_rounded_activations_become_clipped(tmp_path: Path) -> None:
    values, codes = integers("int8", 32, 6)
    nodes = [
        ("QuantizeLinear", "x xs xz", "a"),
        ("DequantizeLinear", "a xs xz", "d"),
        ("DequantizeLinear", "q s", "w", {"axis": 1}),
        ("MatMul", "d w", "y"),
        ("Neg", "d", "z"),
    ]
    path = save(
        build(nodes, {"x": ("float32", ["b", 32])}, "y z", {**SCALES, "q": values}), tmp_path
    )
    model = near(path, 0.03)
    np.testing.assert_array_equal(kept(model).codes, codes.T)
    found = ops(model)
    assert found["Clip"] == found["QuantizeLinear"] == found["DequantizeLinear"] == 1
    assert "range -2.6 .. 2.5" in model.notes["n_y"]
    clip = only(model, "Clip")
    assert [float(model.weights[v]) for v in clip.inputs[1:]] == pytest.approx([-2.6, 2.5])


@pytest.mark.parametrize("columns", [1, 6])
def test_qlinear_matmul_rounds_its_output(tmp_path: Path, columns: int) -> None:
    values, codes = integers("int8", 32, 6, small=True)
    nodes = [
        ("QuantizeLinear", "x xs xz", "a"),
        ("QLinearMatMul", "a xs xz q s wz ys yz", "b"),
        ("DequantizeLinear", "b ys yz", "y"),
    ]
    weights = {
        **{name: SCALES[name] for name in ("xs", "xz")},
        "s": (np.abs(rand(columns)) + 0.1) / 100,
        "wz": np.zeros(columns, np.int8),
        "q": values,
        "ys": np.float32(0.1),
        "yz": np.uint8(128),
    }
    path = save(build(nodes, {"x": ("float32", ["b", 32])}, "y", weights), tmp_path)
    model = near(path, 0.05)
    assert ops(model) == dict.fromkeys(
        ("Clip", "apq.Linear", "QuantizeLinear", "DequantizeLinear"), 1
    )
    np.testing.assert_array_equal(kept(model).codes, codes.T)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QDQ", "QOperator"])
def test_quantize_static_of_onnxruntime(tmp_path: Path, per_channel: bool, kind: str) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Samples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"x": rand(8, 32, seed=i)} for i in range(4)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    nodes = [
        ("MatMul", "x w", "h"),
        ("Add", "h c", "r"),
        ("Relu", "r", "g"),
        ("LayerNormalization", "g s b", "n"),
        ("Gemm", "n v d", "m", {"transB": 1}),
        ("Sigmoid", "m", "e"),
        ("Mul", "m e", "f"),
        ("Softmax", "f", "y", {"axis": -1}),
    ]
    weights = {
        **{"w": rand(32, 48) / 6, "c": rand(48), "s": rand(48), "b": rand(48, seed=2)},
        **{"v": rand(16, 48, seed=3) / 7, "d": rand(16)},
    }
    source = save(build(nodes, {"x": ("float32", ["b", 32])}, "y", weights), tmp_path)
    path = tmp_path / "quantized.onnx"
    quantize_static(source, path, Samples(), QuantFormat[kind], per_channel=per_channel)
    model = import_onnx(path)
    assert ops(model)["apq.Linear"] == 2 and len(model.quantized) == 2
    feeds = {"x": rand(16, 32, seed=9)}
    want, exact = run_onnx(path, feeds)["y"], run_onnx(source, feeds)["y"]
    got = run_reference(model, feeds, run_node)["y"]
    # Within what the file's own rounding costs; outputs are rounded to 1/256.
    assert np.abs(got - want).max() < 0.04 and np.abs(got - exact).max() < 0.04
    stored = {i.name: i for i in onnx.load(path).graph.initializer}
    for name, side in (("w", (48, 32)), ("v", (16, 48))):
        codes = onnx.numpy_helper.to_array(stored[f"{name}_quantized"]).astype(np.int16) + 128
        (tensor,) = (t for t in model.quantized.values() if t.codes.shape == side)
        np.testing.assert_array_equal(tensor.codes, codes.reshape(side) if name == "v" else codes.T)


def test_qlinear_matmul_with_rows_of_scales_is_refused(tmp_path: Path) -> None:
    nodes = [("QLinearMatMul", "a s z q s1 z1 s1 z", "y")]
    weights = {
        "s": np.ones(3, np.float32),
        "z": np.zeros((), np.uint8),
        "q": integers("uint8", 32, 6)[0],
        "s1": np.float32(1),
        "z1": np.uint8(0),
    }
    path = save(build(nodes, {"a": ("uint8", [3, 32])}, "y", weights), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"QLinearMatMul 'n_y'.*'s' float32\[3\]"):
        import_onnx(path)


def test_qlinear_reduce_mean(tmp_path: Path) -> None:
    """Its axes are an attribute, those of ReduceMean no longer; ONNX Runtime has no kernel."""
    nodes = [
        ("com.microsoft.QLinearReduceMean", "q s z t z", "r", {"axes": [1], "keepdims": 0}),
        ("DequantizeLinear", "r t z", "y"),
    ]
    weights = {"s": np.float32(0.5), "t": np.float32(0.25), "z": np.uint8(120)}
    inputs = {"q": ("uint8", ["b", 5])}
    path = save(build(nodes, inputs, "y", weights, opset=20, domains=MS), tmp_path)
    q = np.random.default_rng(0).integers(0, 256, (4, 5), np.uint8)
    mean = (q.astype(np.float32) - 120).mean(1) * 0.5
    wanted = (np.clip(np.rint(mean / 0.25) + 120, 0, 255) - 120) * 0.25
    np.testing.assert_allclose(run_reference(import_onnx(path), {"q": q})["y"], wanted)

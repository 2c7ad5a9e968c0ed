"""Integer products as the file writes them: `apq_tvm.onnx_import.integers.written`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, feeds_for, ops, run_node, run_onnx, save
from onnx_reference import run_reference

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.integers.written import EXACT, MOST

RNG = np.random.default_rng(7)


def codes(*shape: int, dtype: str = "int8") -> Any:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


def exactly(path: Path, feeds: dict[str, Any], as_written: bool = False) -> Any:
    """Import; the result is ONNX Runtime's, bit for bit."""
    model = import_onnx(path, as_written=as_written)
    got = run_reference(model, feeds, run_node)
    for name, value in run_onnx(path, feeds).items():
        np.testing.assert_array_equal(got[name], value)
    return model


def convolution(
    tmp_path: Path, shape: tuple[int, ...], weights: dict[str, Any], **attrs: Any
) -> Path:
    names = "x w xz wz" if "wz" in weights else "x w xz"
    model = build(
        [("ConvInteger", names, "y", attrs)],
        {"x": ("uint8", list(shape))},
        "y",
        {"xz": np.uint8(131), **weights},
    )
    return save(model, tmp_path)


@pytest.mark.parametrize(("group", "dtype"), [(1, "int8"), (3, "uint8")])
def test_convolutions_of_integers(tmp_path: Path, group: int, dtype: str) -> None:
    weights = {"w": codes(6, 9 // group, 3, 2, dtype=dtype), "wz": np.asarray(3, dtype)}
    path = convolution(tmp_path, (2, 9, 7, 8), weights, group=group, pads=[1, 0, 1, 1])
    model = exactly(path, {"x": codes(2, 9, 7, 8, dtype="uint8")})
    assert "ConvInteger" not in ops(model)


def test_sums_beyond_what_floats_hold_are_cut(tmp_path: Path) -> None:
    """Of 900 products of 127 by 124, in two pieces; the reference's sums of floats are exact, too,
    where each piece's are."""
    w = np.full((2, 100, 3, 3), 127, np.int8)
    assert MOST * 127 * 900 > EXACT
    for group in (1, 2):
        shape = (1, 100 * group, 4, 4)
        path = convolution(tmp_path, shape, {"w": w, "xz": np.uint8(0)}, group=group)
        model = exactly(path, {"x": np.full(shape, 255, np.uint8)})
        assert sum("integers" in name for name in model.weights) == 2


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    large = {"w": np.full((1, 1, 40, 40), 127, np.int8)}
    with pytest.raises(UnsupportedModel, match=r"ConvInteger .* may exceed 16777216"):
        import_onnx(convolution(tmp_path, (1, 1, 50, 50), large))
    inputs: Any = {"x": ("uint8", [1, 100, 4, 4]), "w": ("int8", [2, 100, 3, 3])}
    path = save(build([("ConvInteger", "x w", "y")], inputs, "y"), tmp_path)
    with pytest.raises(UnsupportedModel, match="make it a constant"):
        import_onnx(path)


def dynamic(tmp_path: Path, k: int = 64) -> Path:
    nodes = [
        ("DynamicQuantizeLinear", "x", "a s z"),
        ("MatMulInteger", "a w z wz", "i"),
        ("Cast", "i", "f", {"to": 1}),
        ("Mul", "s ws", "both"),
        ("Mul", "f both", "h"),
        ("Sigmoid", "h", "g"),
        ("Add", "h g", "y"),
    ]
    weights = {"w": codes(k, 8), "wz": np.int8(-3), "ws": np.float32(0.001)}
    return save(build(nodes, {"x": ("float32", ["b", k])}, "y", weights), tmp_path)


def test_roundings_of_the_file_are_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    path = dynamic(tmp_path)
    kept = import_onnx(path, as_written=True)
    assert ops(kept)["DynamicQuantizeLinear"] == ops(kept)["apq.Product"] == 1
    assert not any("by the scheme" in note for note in kept.notes.values())
    dropped = import_onnx(path)
    assert "DynamicQuantizeLinear" not in ops(dropped) and "apq.Product" not in ops(dropped)
    assert any("by the scheme" in note for note in dropped.notes.values())
    feeds = feeds_for(kept, {"b": 5})
    want = run_onnx(path, feeds)["y"]
    errors = [np.abs(run_reference(m, feeds, run_node)["y"] - want).max() for m in (kept, dropped)]
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


def test_products_of_many_columns_are_cut(tmp_path: Path) -> None:
    model = import_onnx(dynamic(tmp_path, 1500), as_written=True)
    assert ops(model)["apq.Linear"] == 2


def test_static_roundings_are_kept(tmp_path: Path) -> None:
    nodes = [
        ("QuantizeLinear", "x s z", "q"),
        ("DequantizeLinear", "q s z", "d"),
        ("DequantizeLinear", "w ws", "v"),
        ("MatMul", "d v", "y"),
    ]
    weights = {"w": codes(16, 8), "ws": np.float32(0.01), "s": np.float32(0.1), "z": np.uint8(128)}
    path = save(build(nodes, {"x": ("float32", ["b", 16])}, "y", weights), tmp_path)
    assert ops(import_onnx(path, as_written=True)) == {
        "QuantizeLinear": 1,
        "DequantizeLinear": 1,
        "apq.Linear": 1,
    }
    assert "QuantizeLinear" not in ops(import_onnx(path))


@pytest.mark.parametrize("op", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
def test_what_onnxruntime_joins_is_a_product_of_integers(tmp_path: Path, op: str) -> None:
    nodes: list[Any] = [(f"com.microsoft.{op}", "x w ws wz c", "y")]
    if op == "MatMulIntegerToFloat":
        nodes = [
            ("DynamicQuantizeLinear", "x", "a s z"),
            (f"com.microsoft.{op}", "a w s ws z wz c", "y"),
        ]
    weights = {
        "w": codes(24, 8),
        "ws": RNG.uniform(0.01, 0.02, 8).astype(np.float32),
        "wz": codes(8),
        "c": RNG.standard_normal(8).astype(np.float32),
    }
    inputs: Any = {"x": ("float32", ["b", 24])}
    path = save(build(nodes, inputs, "y", weights, domains={"com.microsoft": 1}), tmp_path)
    model = import_onnx(path, as_written=True)
    assert ops(model)["DynamicQuantizeLinear"] == ops(model)["apq.Product"] == 1
    feeds = feeds_for(model, {"b": 3})
    exactly(path, feeds, as_written=True)

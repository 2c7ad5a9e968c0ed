"""Convolutions become layers channels last, and layout changes between them go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, check, rand, run_onnx, save
from onnx_reference import run_reference

from apq_tvm.errors import ImportFailed
from apq_tvm.manifest import describe_products
from apq_tvm.onnx_import import import_onnx

IMAGE = {"x": ("float32", ["b", 8, 9, 7])}


def imported(tmp_path: Path, nodes: Any, outputs: str, weights: Any, opset: int = 20) -> Any:
    path = save(build(nodes, IMAGE, outputs, weights, opset=opset), tmp_path)
    return check(path, {"b": 1}, {"b": 2})


def ops(model: Any) -> Counter[str]:
    return Counter(node.op for node in model.nodes)


def test_layout_changes_between_layers_cancel(tmp_path: Path) -> None:
    """One before the first convolution, one behind the last; everything between moves along."""
    model = imported(
        tmp_path,
        [
            ("Conv", "x w b", "c", {"pads": [1] * 4}),
            ("BatchNormalization", "c b b b v", "n"),
            ("Relu", "n", "r"),
            ("Conv", "r d", "e", {"group": 24, "pads": [1] * 4}),
            ("Clip", "e low six", "k"),
            ("Conv", "k u", "f"),
            ("Add", "f r", "s"),
            ("Relu", "s", "t"),
            ("MaxPool", "t", "p", {"kernel_shape": [2, 2]}),
            ("GlobalAveragePool", "p", "g"),
            ("Mul", "p g", "m"),
            ("Concat", "m p", "j", {"axis": 1}),
            ("Conv", "j h", "y"),
        ],
        "y",
        {
            **{"w": rand(24, 8, 3, 3), "b": rand(24), "v": np.abs(rand(24)) + 1},
            **{"d": rand(24, 1, 3, 3), "u": rand(24, 24, 1, 1), "h": rand(4, 48, 1, 1)},
            **{"low": np.float32(0), "six": np.float32(6)},
        },
    )
    assert ops(model) == {
        **{"Transpose": 2, "apq.Windows": 1, "apq.Linear": 3, "apq.Depthwise": 1, "apq.Pool": 1},
        **{"ReduceMean": 1, "Mul": 1, "Concat": 1},
    }
    layers = [n for n in model.nodes if n.op in ("apq.Linear", "apq.Depthwise")]
    assert [n.attrs["activation"] for n in layers] == ["relu", "relu6", "relu", ""]
    assert [bool(n.attrs.get("after")) for n in layers] == [False, False, True, False]
    assert [bool(n.inputs[2]) for n in layers] == [True, False, False, False]


def test_a_head_on_single_pixels_needs_no_transpose(tmp_path: Path) -> None:
    model = imported(
        tmp_path,
        [
            ("Conv", "x w", "c"),
            ("GlobalAveragePool", "c", "g"),
            ("Flatten", "g", "f"),
            ("Gemm", "f v", "y", {"transB": 1}),
        ],
        "y",
        {"w": rand(16, 8, 1, 1), "v": rand(5, 16)},
    )
    assert ops(model)["Transpose"] == 1


@pytest.mark.parametrize(("group", "layers"), [(2, 2), (4, 0), (8, 1)])
def test_groups(tmp_path: Path, group: int, layers: int) -> None:
    """Groups of few outputs are joined until a layer has 16, but where they fill short vectors."""
    nodes = [("Conv", "x w b", "y", {"group": group, "pads": [1] * 4})]
    outputs = {2: 32, 4: 32, 8: 16}[group]
    weights = {"w": rand(outputs, 8 // group, 3, 3), "b": rand(outputs)}
    assert ops(imported(tmp_path, nodes, "y", weights))["apq.Linear"] == layers


@pytest.mark.parametrize(
    ("outputs", "kernel", "sums"), [(3, 3, 1), (1, 7, 1), (3, 1, 0), (5, 3, 0)]
)
def test_few_outputs_are_sums_of_windows(
    tmp_path: Path, outputs: int, kernel: int, sums: int
) -> None:
    """A product by all taps, as wide as a tile, in the place of one by 3 of a tile's columns."""
    nodes = [("Conv", "x w", "c"), ("Conv", "c v b", "y", {"pads": [kernel, 0, kernel // 2, 1]})]
    weights = {"w": rand(16, 8, 1, 1), "v": rand(outputs, 16, kernel, kernel), "b": rand(outputs)}
    found = ops(imported(tmp_path, nodes, "y", weights))
    assert found["apq.Fold"] == sums and found["apq.Linear"] == 2
    assert found["apq.Windows"] == 1 - sums


LARGE = {"kernel_shape": [5, 6], "pads": [2, 1, 0, 3]}


@pytest.mark.parametrize(
    ("op", "attrs", "parts"),
    [
        ("MaxPool", LARGE, 2),
        ("MaxPool", {"kernel_shape": [3, 3]}, 1),
        ("MaxPool", {**LARGE, "strides": [5, 6]}, 1),
        ("MaxPool", {**LARGE, "dilations": [2, 1], "ceil_mode": 1, "strides": [2, 1]}, 2),
        ("MaxPool", {"kernel_shape": [7, 4], "auto_pad": "SAME_LOWER", "strides": [2, 1]}, 2),
        ("MaxPool", {"kernel_shape": [7, 1], "strides": [2, 3]}, 1),
        ("MaxPool", {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}, 1),
        ("AveragePool", LARGE, 2),
        ("AveragePool", {**LARGE, "count_include_pad": 1, "ceil_mode": 1, "strides": [2, 1]}, 2),
        ("AveragePool", {"kernel_shape": [4, 5], "auto_pad": "SAME_UPPER"}, 2),
    ],
)
def test_large_windows_are_pooled_axis_by_axis(
    tmp_path: Path, op: str, attrs: dict[str, Any], parts: int
) -> None:
    model = imported(tmp_path, [(op, "x", "y", attrs)], "y", {})
    assert ops(model) == {"apq.Pool": parts, "Transpose": 2}


def test_few_channels_are_pooled_where_they_lie(tmp_path: Path) -> None:
    image = {"x": ("float32", ["b", 2, 9, 7])}
    path = save(build([("MaxPool", "x", "y", LARGE)], image, "y", {}), tmp_path)
    assert ops(check(path, {"b": 1}, {"b": 2})) == {"apq.PoolFirst": 2}


@pytest.mark.parametrize("kernel", [[-3, -7], [0, 9], [9, 9, 9]])
def test_windows_that_there_cannot_be(tmp_path: Path, kernel: list[int]) -> None:
    nodes = [("MaxPool", "x", "y", {"kernel_shape": kernel})]
    with pytest.raises(ImportFailed, match=r"MaxPool|kernel_shape"):
        import_onnx(save(build(nodes, IMAGE, "y", {}), tmp_path))


def test_what_stays_float_says_why(tmp_path: Path) -> None:
    nodes = [
        ("Conv", "x d", "e", {"group": 8}),
        ("Conv", "e g", "f", {"group": 2}),
        ("Conv", "f v", "y"),
        ("ConvTranspose", "f t", "z", {"group": 2}),
        ("Conv", "f m", "l"),
    ]
    inputs = {**IMAGE, "v": ("float32", [4, 8, 1, 1])}
    weights = {"d": rand(8, 1, 3, 3), "g": rand(8, 4, 1, 1), "t": rand(8, 2, 2, 2)}
    path = save(build(nodes, inputs, "y z l", {**weights, "m": rand(16, 8, 1, 1)}), tmp_path)
    assert describe_products(check(path, {"b": 1})) == {
        "n_e": "groups of one channel are a kernel of their own, in float",
        "n_f": "groups of 4 inputs and 4 outputs are a kernel of their own, in float",
        "n_y": "its weight or bias is no constant",
        "n_z": "transposed convolutions of groups are no layers",
    }


def test_convolutions_keep_their_codes(tmp_path: Path) -> None:
    """Weights behind DequantizeLinear, one scale an output channel, their taps first."""
    codes = np.random.default_rng(0).integers(-128, 128, (16, 8, 3, 3), np.int8)
    scales = (np.random.default_rng(1).integers(1, 9, 16) / 1024).astype(np.float32)
    model = imported(
        tmp_path,
        [("DequantizeLinear", "q s", "w", {"axis": 0}), ("Conv", "x w", "c"), ("Mul", "c t", "y")],
        "y",
        {"q": codes, "s": scales, "t": (np.arange(16, dtype=np.float32) + 1).reshape(16, 1, 1)},
    )
    (tensor,) = model.quantized.values()
    expected = codes.transpose(0, 2, 3, 1).reshape(16, -1).astype(np.int16) + 128
    assert np.array_equal(tensor.codes, expected.astype(np.uint8))
    assert np.allclose(tensor.scales[:, 0], scales * (np.arange(16) + 1), rtol=1e-3)


def test_qlinear_conv(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = imported(
        tmp_path,
        [
            ("QuantizeLinear", "x xs xz", "q"),
            ("QLinearConv", "q xs xz w ws wz ys yz b", "r", {"pads": [1] * 4}),
            ("DequantizeLinear", "r ys yz", "y"),
        ],
        "y",
        {
            **{
                "xs": np.float32(1 / 32),
                "xz": np.uint8(128),
                "w": rng.integers(-99, 99, (16, 8, 3, 3), np.int8),
            },
            **{"ws": np.full(16, 1 / 64, np.float32), "wz": np.zeros(16, np.int8)},
            **{
                "ys": np.float32(64.0),
                "yz": np.uint8(128),
                "b": rng.integers(-99, 99, 16, np.int32),
            },
        },
    )
    assert len(model.quantized) == 1 and ops(model)["Conv"] == 0


@pytest.mark.parametrize("width", [7, "w"])
def test_dynamic_quantization_is_left_to_the_scheme(tmp_path: Path, width: int | str) -> None:
    """``ConvInteger`` behind DynamicQuantizeLinear, its bias among the integers or behind them."""
    rng = np.random.default_rng(0)
    model = import_onnx(
        save(
            build(
                [
                    ("DynamicQuantizeLinear", "x", "q s z"),
                    ("Mul", "s t", "p"),
                    ("ConvInteger", "q w z", "i", {"pads": [1] * 4}),
                    ("Div", "b p", "d"),
                    ("Floor", "d", "f"),
                    ("Cast", "f", "h", {"to": 6}),
                    ("Reshape", "h shape", "k"),
                    ("Add", "i k", "l"),
                    ("Cast", "l", "m", {"to": 1}),
                    ("Mul", "m p", "y"),
                    ("ConvInteger", "q w z", "j"),
                    ("Cast", "j", "n", {"to": 1}),
                    ("Mul", "n p", "o"),
                    ("Add", "o c", "v"),
                ],
                {"x": ("float32", ["b", 8, 9, width])},
                "y v",
                {
                    **{"t": np.float32(1 / 64), "w": rng.integers(-99, 99, (16, 8, 3, 3), np.int8)},
                    **{"b": rand(16), "c": rand(16).reshape(16, 1, 1)},
                    "shape": np.array([1, 16, 1, 1]),
                },
            ),
            tmp_path,
        )
    )
    layers = [node for node in model.nodes if node.op == "apq.Linear"]
    assert len(layers) == 2 and all(node.inputs[2] for node in layers) and model.quantized
    feeds = {"x": rand(2, 8, 9, 7)}
    expected, got = run_onnx(tmp_path / "model.onnx", feeds), run_reference(model, feeds)
    for name in ("y", "v"):
        error = np.abs(got[name] - expected[name]).max()
        assert error < 0.05 * np.abs(expected[name]).max(), (name, error)

"""``float`` computes what a file rounds while it runs as ONNX Runtime does: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from apq_tvm.schedules.devices import find_profile
from tests.onnx_models import build, run_onnx, save

RNG = np.random.default_rng(11)
CHANNELS, HIDDEN = 12, 40


def codes(*shape: int) -> Any:
    return RNG.integers(-127, 128, shape).astype(np.int8)


def number(value: float) -> Any:
    return np.float32(value)


def convolved(x: str, name: str, **attrs: Any) -> list[Any]:
    """A convolution of rounded activations with a bias of integers, as version 1.5 wrote it."""
    return [
        ("DynamicQuantizeLinear", x, f"{name}q {name}s {name}z"),
        ("ConvInteger", f"{name}q {name}w {name}z", f"{name}i", attrs),
        ("Mul", f"{name}s {name}ws", f"{name}both"),
        ("Div", f"{name}b {name}both", f"{name}bd"),
        ("Floor", f"{name}bd", f"{name}bf"),
        ("Cast", f"{name}bf", f"{name}bi", {"to": 6}),
        ("Reshape", f"{name}bi channels", f"{name}br"),
        ("Add", f"{name}i {name}br", f"{name}sum"),
        ("Cast", f"{name}sum", f"{name}f", {"to": 1}),
        ("Mul", f"{name}f {name}both", name),
    ]


def model(tmp_path: Path) -> Path:
    """Two convolutions, the second with a residual, an LSTM in both directions and a product."""
    weights: dict[str, Any] = {"channels": np.asarray([1, -1, 1, 1])}
    for name, inputs in (("c", 1), ("d", CHANNELS)):
        weights |= {
            f"{name}w": codes(CHANNELS, inputs, 3, 3),
            f"{name}ws": number(0.0031),
            f"{name}b": RNG.standard_normal(CHANNELS).astype(np.float32),
        }
    weights |= {
        "rows": np.asarray([0, 0, -1]),
        "flat": np.asarray([0, -1]),
        "lw": codes(2, CHANNELS * 6, 4 * HIDDEN),
        "lr": codes(2, HIDDEN, 4 * HIDDEN),
        "lws": RNG.uniform(1e-3, 2e-3, 2).astype(np.float32),
        "lz": np.zeros(2, np.int8),
        "lb": RNG.standard_normal((2, 8 * HIDDEN)).astype(np.float32),
        "h0": np.zeros((2, 1, HIDDEN), np.float32),
        "v": codes(2 * HIDDEN, 30),
        "vs": number(0.0007),
        "vz": np.int8(0),
        "vb": RNG.standard_normal(30).astype(np.float32),
    }
    lstm = "steps lw lr lb _ h0 h0 _ lws lz lws lz"
    nodes = [
        *convolved("x", "c", pads=[1, 1, 1, 1]),
        ("Sigmoid", "c", "cg"),
        ("Mul", "c cg", "ca"),
        *convolved("ca", "d", pads=[1, 1, 1, 1]),
        ("Add", "ca d", "r"),
        ("Transpose", "r", "t", {"perm": [3, 0, 1, 2]}),
        ("Reshape", "t rows", "steps"),
        (
            "com.microsoft.DynamicQuantizeLSTM",
            lstm,
            "l",
            {"hidden_size": HIDDEN, "direction": "bidirectional"},
        ),
        ("Transpose", "l", "lt", {"perm": [0, 2, 1, 3]}),
        ("Reshape", "lt flat", "lf"),
        ("DynamicQuantizeLinear", "lf", "lq ls lzero"),
        ("MatMulInteger", "lq v lzero vz", "p"),
        ("Cast", "p", "pf", {"to": 1}),
        ("Mul", "ls vs", "pboth"),
        ("Mul", "pf pboth", "ps"),
        ("Add", "ps vb", "y"),
    ]
    inputs = {"x": ("float32", [1, 1, 6, "width"])}
    return save(build(nodes, inputs, "y r", weights, domains={"com.microsoft": 1}), tmp_path)


@pytest.mark.skipif(
    "avx2" not in find_profile("host").features,
    reason="ONNX Runtime's sigmoids of processors without fused multiply-add are others",
)
def test_float_is_the_file_bit_for_bit(tmp_path: Path) -> None:
    path, out = model(tmp_path), tmp_path / "module"
    apq_tvm.compile(path, out, scheme="float")
    module = load_module(out)
    assert {layer["scheme"] for layer in module.manifest["layers"]} == {"W8A32"}
    for width in (1, 9, 40):
        feeds = {"x": RNG.standard_normal((1, 1, 6, width)).astype(np.float32)}
        got = module.run(feeds)
        for name, value in run_onnx(path, feeds).items():
            np.testing.assert_array_equal(got[name], value)

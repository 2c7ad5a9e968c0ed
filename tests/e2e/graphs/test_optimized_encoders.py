"""An encoder as ONNX Runtime's tool for transformers writes it, and its attention by itself."""

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


def test_embeddings_and_attention_of_one_layer(tmp_path: Path) -> None:
    """Lengths and masks as padding; a past and the present; values of another width."""
    plain = {"num_heads": 2}
    nodes = [
        (MS + "EmbedLayerNormalization", "ids kinds words places types g b mask", "e lengths sum"),
        (MS + "Attention", "e w c lengths", "first", plain),
        (MS + "SkipLayerNormalization", "first e g b", "n"),
        (MS + "Attention", "n w c mask", "y", {**plain, "unidirectional": 1, "scale": 0.4}),
        (MS + "Attention", "n w c _ past", "z present", {**plain, "unidirectional": 1}),
        (MS + "Attention", "n v c2 _ _ bias", "t", {**plain, "qkv_hidden_sizes": [8, 8, 4]}),
        (MS + "EmbedLayerNormalization", "ids _ words places _ g b _ at", "e2 none"),
    ]
    inputs: dict[str, Any] = dict.fromkeys(("ids", "kinds", "mask", "at"), ("int32", ["b", "s"]))
    inputs |= {"past": ("float32", [2, "b", 2, "p", 4]), "bias": ("float32", [1, 2, "s", "s"])}
    weights = {"words": rand(20, 8), "places": rand(12, 8, seed=1), "types": rand(2, 8, seed=2)}
    weights |= {"g": np.abs(rand(8, seed=3)) + 0.5, "b": rand(8, seed=4), "w": rand(8, 24, seed=5)}
    weights |= {"c": rand(24, seed=6), "v": rand(8, 20, seed=7), "c2": rand(20, seed=8)}
    outputs = "e lengths sum first y z present t e2 none"
    path = save(build(nodes, inputs, outputs, weights, 17, {"com.microsoft": 1}), tmp_path)
    apq_tvm.compile(path, tmp_path / "encoder", scheme="float")
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {"ids": rng.integers(0, 20, (3, 7)), "kinds": np.ones((3, 7))}
    feeds |= {"mask": np.arange(7) < np.array([[7], [3], [5]]), "at": rng.integers(0, 12, (3, 7))}
    feeds = {name: array.astype(np.int32) for name, array in feeds.items()}
    feeds |= {"past": rand(2, 3, 2, 5, 4), "bias": rand(1, 2, 7, 7)}
    got, want = load_module(tmp_path / "encoder").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype
        np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def codes(*shape: int, seed: int = 0, dtype: str = "uint8") -> np.ndarray:
    low = 0 if dtype == "uint8" else -128
    return np.random.default_rng(seed).integers(low, low + 256, shape).astype(dtype)


def test_the_same_encoder_quantized(tmp_path: Path) -> None:
    """As `quantize_dynamic` writes what the tool for transformers made; integers that are given."""
    plain = {"num_heads": 2}
    tables = "words places types g b"
    nodes = [
        (
            MS + "QEmbedLayerNormalization",
            f"ids kinds {tables} mask {' '.join(f's{i}' for i in range(5))}"
            f" {' '.join(f'z{i}' for i in range(5))}",
            "e lengths",
        ),
        ("DynamicQuantizeLinear", "e", "a as az"),
        (MS + "QAttention", "a w c as ws lengths az wz", "y", plain),
        (MS + "QAttention", "x w8 c xs ws8 _ xz wz8", "t", {**plain, "unidirectional": 1}),
        (MS + "QAttention", "x w8 c xs ws8 _ xz wz8 past", "u present", plain),
    ]
    inputs: dict[str, Any] = dict.fromkeys(("ids", "kinds", "mask"), ("int32", ["b", "s"]))
    inputs |= {"x": ("uint8", ["b", "s", 8]), "past": ("float32", [2, "b", 2, "p", 4])}
    weights: dict[str, Any] = {"words": codes(20, 8), "places": codes(12, 8, seed=1)}
    weights |= {"types": codes(2, 8, seed=2), "g": codes(8, seed=3), "b": codes(8, seed=4)}
    weights |= {f"s{i}": np.float32(0.01 + 0.001 * i) for i in range(5)}
    weights |= {f"z{i}": np.uint8(120 + i if i != 3 else 0) for i in range(5)}
    weights |= {"w": codes(8, 24, seed=5), "ws": np.float32(0.002), "wz": np.uint8(128)}
    weights |= {"w8": codes(8, 24, seed=6, dtype="int8"), "wz8": np.zeros(24, np.int8)}
    weights |= {"ws8": np.abs(rand(24, seed=8)) / 100, "c": rand(24, seed=7)}
    weights |= {"xs": np.float32(0.02), "xz": np.uint8(130)}
    outputs = "e lengths y t u present"
    path = save(build(nodes, inputs, outputs, weights, 17, {"com.microsoft": 1}), tmp_path)
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {"ids": rng.integers(0, 20, (3, 7)), "kinds": np.ones((3, 7))}
    feeds |= {"mask": np.arange(7) < np.array([[7], [3], [5]])}
    feeds = {name: array.astype(np.int32) for name, array in feeds.items()}
    feeds |= {"x": codes(3, 7, 8, seed=9), "past": rand(2, 3, 2, 5, 4)}
    apq_tvm.compile(path, tmp_path / "encoder", scheme="float")
    got, want = load_module(tmp_path / "encoder").run(feeds), run_onnx(path, feeds)
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype
        rounded = 0.05 if name == "y" else 1e-4  # onnxruntime rounds its input to 8 bits
        np.testing.assert_allclose(got[name], expected, rounded, rounded, err_msg=name)


def test_weights_that_are_no_constants_are_refused(tmp_path: Path) -> None:
    nodes = [(MS + "QAttention", "x w c s s", "y", {"num_heads": 2})]
    inputs = {"x": ("uint8", ["b", "s", 8]), "w": ("uint8", [8, 24])}
    weights = {"c": rand(24), "s": np.float32(0.1)}
    path = save(build(nodes, inputs, "y", weights, 17, {"com.microsoft": 1}), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"QAttention .* must be a constant matrix"):
        apq_tvm.compile(path, tmp_path / "no")


@pytest.mark.parametrize(("given", "attrs"), [("", {"do_rotary": 1}), (" past _ length", {})])
def test_attention_of_decoders_is_refused(
    given: str, attrs: dict[str, int], tmp_path: Path
) -> None:
    nodes = [(MS + "Attention", f"x w c _{given}", "y present", {"num_heads": 2, **attrs})]
    inputs: dict[str, Any] = {"x": ("float32", ["b", "s", 8])}
    inputs |= {"past": ("float32", [2, "b", 2, 16, 4]), "length": ("int32", [1])}
    weights = {"w": rand(8, 24), "c": rand(24)}
    path = save(build(nodes, inputs, "y", weights, 17, {"com.microsoft": 1}), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"Attention .* rotary positions, and a past that"):
        apq_tvm.compile(path, tmp_path / "no")

"""Models that come quantized, and the operators they come with, beside ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests import tiny_decoder
from tests.onnx_models import build, rand, run_onnx, save
from tests.tiny_decoder import KV, MS, SIZE

RNG = np.random.default_rng(0)


def compiled(path: Path, scheme: str) -> Any:
    out = path.parent / f"module_{scheme}"
    apq_tvm.compile(path, out, scheme=scheme)
    return load_module(out)


def compare(module: Any, path: Path, feeds: Mapping[str, Any], tolerance: float) -> None:
    """Every output beside ONNX Runtime's: error relative to the result's root mean square."""
    want, got = run_onnx(path, feeds), module.run(dict(feeds))
    assert list(want) == list(got)
    for name, value in want.items():
        assert got[name].shape == value.shape and got[name].dtype == value.dtype, name
        wide = value.astype(np.float64)
        error = np.sqrt(((got[name] - wide) ** 2).mean() / (wide**2).mean())
        assert error < tolerance, (name, error)


def step(ids: np.ndarray, total: int, past: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_ids": ids, "mask": np.ones((ids.shape[0], total), np.int64), **past}


@pytest.mark.all_cases
def test_a_quantized_decoder_generates(tmp_path: Path) -> None:
    """The first prompt has no past; then token by token, each side with its own cache."""
    path = tiny_decoder.write(tmp_path)
    module = compiled(path, "W4A32g32")
    schemes = {layer["name"]: layer["scheme"] for layer in module.manifest["layers"]}
    assert set(schemes.values()) == {"W4A32g32"}
    assert sum(len(name.split("+")) for name in schemes) == 7  # layers of one x are one
    empty = np.zeros((1, KV, 0, SIZE), np.float32)
    ours = theirs = {"pk": empty, "pv": empty}
    ids = RNG.integers(0, 50, (1, 9))
    for start, end in ((0, 6), (6, 7), (7, 9)):
        part = ids[:, start:end]
        want = run_onnx(path, step(part, end, theirs))
        got = module.run(step(part, end, ours))
        wide = want["logits"].astype(np.float64)
        error = np.sqrt(((got["logits"] - wide) ** 2).mean() / (wide**2).mean())
        assert error < 1e-3, (start, error)
        assert got["ok"].shape == want["ok"].shape == (1, KV, end, SIZE)
        ours = {"pk": got["ok"], "pv": got["ov"]}
        theirs = {"pk": want["ok"], "pv": want["ov"]}


def test_attention_with_projected_biases_masks_and_half_precision_pasts(tmp_path: Path) -> None:
    inputs = {
        "x": ("float32", ["b", "s", 32]),
        "mask": ("int32", ["b", "t"]),
        "ids": ("int64", ["b", "s"]),
        "pk": ("float16", ["b", 2, "p", 16]),
        "pv": ("float16", ["b", 2, "p", 16]),
    }
    angles = np.outer(np.arange(16), np.linspace(0.1, 1, 8))
    weights = {
        "w": rand(32, 32),
        "bias": rand(96),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "g": rand(32),
    }
    nodes = [
        ("MatMul", "x w", "h"),
        ("com.microsoft.RotaryEmbedding", "h ids cos sin", "q", {"num_heads": 2}),
        ("Cast", "pk", "pkw", {"to": 1}),
        ("Cast", "pv", "pvw", {"to": 1}),
        (
            "com.microsoft.MultiHeadAttention",
            "q h x bias mask _ pkw pvw",
            "a ok ov",
            {"num_heads": 2, "unidirectional": 1},
        ),
        ("com.microsoft.FastGelu", "a g", "y"),
    ]
    path = save(build(nodes, inputs, "y ok ov", weights, domains=MS), tmp_path)
    module = compiled(path, "float")
    for s, p in ((5, 0), (3, 4), (1, 7)):
        mask = np.ones((2, s + p), np.int32)
        mask[1, 0] = 0
        feeds = {
            "x": rand(2, s, 32),
            "mask": mask,
            "ids": np.tile(np.arange(p, p + s), (2, 1)),
            "pk": rand(2, 2, p, 16).astype(np.float16),
            "pv": rand(2, 2, p, 16, seed=1).astype(np.float16),
        }
        compare(module, path, feeds, 1e-5)


def test_attention_and_rotary_positions_of_onnx(tmp_path: Path) -> None:
    inputs = {
        "x": ("float32", ["b", "s", 64]),
        "ids": ("int64", ["b", "s"]),
        "mask": ("bool", ["s", "t"]),
        "pk": ("float32", ["b", 2, "p", 16]),
        "pv": ("float32", ["b", 2, "p", 16]),
    }
    angles = np.outer(np.arange(16), np.linspace(0.1, 1, 8))
    weights = {
        "wk": rand(64, 32) / 8,
        "wv": rand(64, 32, seed=1) / 8,
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "g": rand(64),
    }
    nodes = [
        ("RMSNormalization", "x g", "n", {"axis": -1}),
        ("MatMul", "n wk", "k"),
        ("MatMul", "n wv", "v"),
        ("RotaryEmbedding", "n cos sin ids", "qr", {"num_heads": 4, "interleaved": 1}),
        ("RotaryEmbedding", "k cos sin ids", "kr", {"num_heads": 2, "interleaved": 1}),
        (
            "Attention",
            "qr kr v mask pk pv",
            "y ok ov",
            {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1, "softcap": 4.0},
        ),
    ]
    path = save(build(nodes, inputs, "y ok ov", weights, opset=23), tmp_path)
    module = compiled(path, "float")
    for s, p in ((5, 0), (3, 4)):
        mask = np.ones((s, s + p), bool)
        mask[:, 1:2] = False
        feeds = {
            "x": rand(2, s, 64),
            "ids": np.tile(np.arange(p, p + s), (2, 1)),
            "mask": mask,
            "pk": rand(2, 2, p, 16),
            "pv": rand(2, 2, p, 16, seed=1),
        }
        compare(module, path, feeds, 1e-5)


def test_integer_products_and_rounded_activations(tmp_path: Path) -> None:
    """QuantizeLinear and DequantizeLinear in all their places, and what tools make of them."""
    weights = {
        "q": RNG.integers(-128, 128, (64, 48)).astype(np.int8),
        "s": RNG.uniform(0.5, 1.5, 48).astype(np.float32) / 500,
        "xs": np.float32(0.03),
        "xz": np.uint8(128),
        "v": RNG.integers(0, 256, (48, 32)).astype(np.uint8),
        "vs": np.float32(0.002),
        "vz": np.uint8(127),
        "ys": np.float32(0.05),
        "yz": np.uint8(120),
    }
    nodes = [
        ("QuantizeLinear", "x xs xz", "a"),
        ("DequantizeLinear", "a xs xz", "d"),
        ("DequantizeLinear", "q s", "w", {"axis": 1}),
        ("MatMul", "d w", "h"),
        ("DynamicQuantizeLinear", "h", "hq hs hz"),
        ("MatMulInteger", "hq v hz vz", "i"),
        ("Cast", "i", "f", {"to": 1}),
        ("Mul", "hs vs", "both"),
        ("Mul", "f both", "y"),
        ("QuantizeLinear", "h ys yz", "hb"),
        ("QLinearMatMul", "hb ys yz v vs vz ys yz", "zq"),
        ("DequantizeLinear", "zq ys yz", "z"),
    ]
    inputs = {"x": ("float32", ["b", 64])}
    path = save(build(nodes, inputs, "y z", weights), tmp_path)
    module = compiled(path, "W4A8")
    assert [layer["scheme"] for layer in module.manifest["layers"]] == ["W8A8", "W8zA8", "W8zA8"]
    assert all("codes of the file" in layer["note"] for layer in module.manifest["layers"])
    for rows in (1, 7, 33):
        compare(module, path, {"x": rand(rows, 64)}, 0.05)


def test_operators_on_integers_of_onnxruntime_match_it(tmp_path: Path) -> None:
    """What its QOperator format writes beside layers: one step of rounding at most."""
    quantized = {"s": np.float32(0.05), "z": np.uint8(120), "t": np.float32(0.08)}
    nodes: list[Any] = [
        ("QuantizeLinear", "x s z", "q"),
        ("com.microsoft.QLinearConcat", "t z q s z q t z", "c", {"axis": 1}),
        (
            "com.microsoft.QLinearAveragePool",
            "c t z s z",
            "a",
            {"kernel_shape": [2, 2], "strides": [2, 2]},
        ),
        ("com.microsoft.QLinearGlobalAveragePool", "c t z s z", "g", {"channels_last": 0}),
        ("Greater", "x zero", "k"),
        ("com.microsoft.QLinearWhere", "k q s z q t z s z", "w"),
        ("DequantizeLinear", "a s z", "y"),
        ("DequantizeLinear", "g s z", "mean"),
        ("DequantizeLinear", "w s z", "chosen"),
    ]
    weights = {**{k: np.asarray(v) for k, v in quantized.items()}, "zero": np.zeros((), np.float32)}
    inputs = {"x": ("float32", ["b", 3, 8, 6])}
    model = build(nodes, inputs, "y mean chosen", weights, domains={"com.microsoft": 1})
    path = save(model, tmp_path)
    module, given = compiled(path, "float"), {"x": rand(2, 3, 8, 6)}
    got = module.run(given)
    for name, value in run_onnx(path, given).items():
        assert np.abs(got[name] - value).max() <= 0.0501, name

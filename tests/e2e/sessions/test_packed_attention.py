"""Attention over packed keys in modules: grouped heads as operators and as repeated keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.explain import explain
from apq_tvm.module import load_module
from tests import tiny_decoder
from tests.onnx_models import build, rand, save

ort = pytest.importorskip("onnxruntime")

N, KV, H = 6, 2, 16


def repeated(folder: Path) -> Path:
    """A layer's attention as torch writes it: keys are put behind a past, and repeated."""
    group, scale = np.array([1, 1, N // KV, 1, 1]), np.array(H**-0.5, np.float32)
    weights: dict[str, Any] = {"two": [2], "group": group, "scale": scale, "heads": [0, N, -1, H]}
    nodes: list[tuple[Any, ...]] = [("Transpose", "q", "qt", {"perm": (0, 2, 1, 3)})]
    for name in "kv":
        nodes += [
            ("Concat", f"past_{name} {name}", f"{name}_all", {"axis": 2}),
            ("Unsqueeze", f"{name}_all two", f"{name}1"),
            ("Expand", f"{name}1 group", f"{name}2"),
            ("Reshape", f"{name}2 heads", f"{name}3"),
        ]
    nodes += [
        ("Transpose", "k3", "kt", {"perm": (0, 1, 3, 2)}),
        ("MatMul", "qt kt", "a"),
        ("Mul", "a scale", "a1"),
        ("Add", "a1 mask", "a2"),
        ("Softmax", "a2", "p", {"axis": -1}),
        ("MatMul", "p v3", "o"),
        ("Transpose", "o", "y", {"perm": (0, 2, 1, 3)}),
    ]
    inputs = {"q": ("float32", ["b", "s", N, H]), "mask": ("float32", ["b", 1, "s", "t"])}
    for name in "kv":
        inputs[name] = ("float32", ["b", KV, "s", H])
        inputs[f"past_{name}"] = ("float32", ["b", KV, "p", H])
    return save(build(nodes, inputs, "y k_all v_all", weights), folder)


def compare(path: Path, module: Any, feeds: dict[str, Any], names: str, tolerance: float) -> None:
    session = ort.InferenceSession(str(path))
    got = module.run(feeds)
    for name, want in zip(names.split(), session.run(names.split(), feeds), strict=True):
        np.testing.assert_allclose(got[name], want, rtol=tolerance, atol=tolerance)


def test_repeated_keys_behind_a_past(tmp_path: Path) -> None:
    path = repeated(tmp_path)
    apq_tvm.compile(path, output=tmp_path / "repeated")
    module: Any = load_module(tmp_path / "repeated")
    assert explain(tmp_path / "repeated")["attention"] == {"kernels": 1, "apart": {}}
    for b, s, p in ((1, 1, 40), (2, 7, 3), (1, 20, 0)):
        hidden = np.arange(p + s)[None, :] > np.arange(s)[:, None] + p
        mask = np.where(hidden, np.finfo(np.float32).min, np.float32(0))
        feeds = {"q": rand(b, s, N, H), "mask": np.broadcast_to(mask, (b, 1, s, p + s)).copy()}
        for seed, name in enumerate("kv"):
            feeds[name] = rand(b, KV, s, H, seed=seed)
            feeds[f"past_{name}"] = rand(b, KV, p, H, seed=seed + 2)
        compare(path, module, feeds, "y k_all v_all", 1e-5)


def test_a_decoder_of_groups_is_as_onnx_runtime_has_it(tmp_path: Path) -> None:
    path = tiny_decoder.write(tmp_path)
    apq_tvm.compile(path, output=tmp_path / "tiny", scheme="W4A32g32")
    module: Any = load_module(tmp_path / "tiny")
    outputs = []
    for threads in (1, 2):
        module.set_num_threads(threads)
        for batch, new, past in ((1, 9, 0), (1, 3, 5), (2, 1, 6)):
            feeds = tiny_decoder.feeds(batch, new, past)
            compare(path, module, feeds, "logits ok ov", 2e-3)
            outputs.append(module.run(feeds)["logits"])
    for one, two in zip(outputs[:3], outputs[3:], strict=True):
        np.testing.assert_array_equal(one, two)


def test_sinks_take_their_share(tmp_path: Path) -> None:
    """Scores of heads that have no value, behind a softcap and a mask."""
    weights = {
        "sinks": rand(1, N, 1, 1, seed=8) * 3, "cap": np.float32(4), "zero": [0], "minus": [-1],
        "last": [3], "one": [1],
    }  # fmt: skip
    nodes: list[tuple[Any, ...]] = [
        ("Transpose", "k", "kt", {"perm": (0, 1, 3, 2)}),
        ("MatMul", "q kt", "a"),
        ("Div", "a cap", "a1"),
        ("Tanh", "a1", "a2"),
        ("Mul", "a2 cap", "a3"),
        ("Add", "a3 mask", "a4"),
        ("Shape", "q", "q_shape"),
        ("Slice", "q_shape zero last", "lead"),
        ("Concat", "lead one", "wide", {"axis": 0}),
        ("Expand", "sinks wide", "column"),
        ("Concat", "a4 column", "a5", {"axis": -1}),
        ("ReduceMax", "a5 last", "top", {"keepdims": 1}),
        ("Sub", "a5 top", "a6"),
        ("Softmax", "a6", "p", {"axis": -1}),
        ("Slice", "p zero minus last", "p1"),
        ("MatMul", "p1 v", "y"),
    ]
    inputs = {"q": ("float32", ["b", N, "s", H]), "mask": ("float32", [1, 1, "s", "t"])}
    inputs |= {name: ("float32", ["b", N, "t", H]) for name in "kv"}
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    path = save(build(nodes, inputs, "y", arrays, opset=18), tmp_path)
    apq_tvm.compile(path, output=tmp_path / "sunk")
    module: Any = load_module(tmp_path / "sunk")
    assert explain(tmp_path / "sunk")["attention"] == {"kernels": 1, "apart": {}}
    for b, s, t in ((1, 1, 40), (2, 7, 70), (1, 30, 600)):
        hidden = np.arange(t)[None, :] > np.arange(s)[:, None] + t - s
        mask = np.where(hidden, -np.inf, 0).astype(np.float32)[None, None]
        feeds = {"q": rand(b, N, s, H), "mask": mask}
        feeds |= {name: rand(b, N, t, H, seed=i) for i, name in enumerate("kv")}
        compare(path, module, feeds, "y", 1e-5)

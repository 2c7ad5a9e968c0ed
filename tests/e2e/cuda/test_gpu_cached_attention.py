"""Attention over packed keys on a GPU, checked for races, against numpy: keys whole, and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu_attention import CASES, expected, feeds_of, model

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.launches import join, settle
from apq_tvm.module import load_module
from apq_tvm.schedules.devices import cached_operators
from tests.onnx_models import build, save

LOWEST = float(np.finfo(np.float32).min)
GROUPS = {"three": (3, 1, 16), "seven": (14, 2, 32), "twelve": (12, 1, 8)}
"""name: heads, heads of keys, columns"""


def packed(quantized: Any, profile: Any, kv: str) -> Any:
    """As decoders have it, of a model that is none."""
    return settle(join(quantized, cached_operators(profile)))


def compiled(monkeypatch: Any, onnx: Path, folder: Path) -> Any:
    monkeypatch.setattr(pipeline, "_joined", packed)
    options = {"target": "rtx-3090", "scheme": "float", "images": Simulator(checked=True)}
    module = pipeline.compile(onnx, folder, **options)
    kinds = [entry["schedule"] for entry in module.manifest["functions"]]
    assert "cuda_attention" not in kinds
    return kinds.count("cuda_cached_attention")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    with pytest.MonkeyPatch.context() as patch:
        assert compiled(patch, model(folder), folder / "cached") == len(CASES)
    return folder


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (2, 3, 5), (1, 8, 32), (1, 9, 129), (2, 17, 300), (1, 1, 700)]
)
def test_agrees_with_numpy(folder: Path, gpu: None, sizes: tuple[int, int, int]) -> None:
    feeds = feeds_of(*sizes)
    found = load_module(folder / "cached").run(feeds)
    for name in CASES:
        np.testing.assert_allclose(found[f"{name}_y"], expected(feeds, name), atol=1e-5)


def test_rows_without_a_key(folder: Path, gpu: None) -> None:
    """NaN behind a mask of -inf, as in ONNX Runtime; alike weights behind one of the least float,
    wherever its row's other keys are.
    """
    feeds = feeds_of(1, 9, 300)
    feeds["causal_mask"][..., 3, :] = -np.inf
    feeds["whole_mask"][..., 5, :] = LOWEST
    feeds["padding_mask"][...] = LOWEST
    feeds["padding_mask"][..., 290] = 0.0
    feeds["causal_q"][0, 1, 5, 0] = np.nan
    found = load_module(folder / "cached").run(feeds)
    assert np.isnan(found["causal_y"][0, 3]).all() and np.isnan(found["causal_y"][0, 5, 1]).all()
    for name in CASES:
        np.testing.assert_allclose(found[f"{name}_y"], expected(feeds, name), atol=1e-5)


def grouped(folder: Path) -> Path:
    """Heads that share keys, a softcap, and a causal mask of the least float."""
    nodes: list[Any] = []
    inputs: dict[str, Any] = {"mask": ("float32", [1, 1, "s", "t"])}
    weights = {"cap": np.array(5.0, np.float32), "scale": np.array(0.3, np.float32)}
    for name, (heads, shared, width) in GROUPS.items():
        group = heads // shared
        inputs[f"{name}_q"] = ("float32", ["b", heads, "s", width])
        weights[f"{name}_one"] = np.array([2], np.int64)
        weights[f"{name}_wide"] = np.array([1, shared, group, 1, width], np.int64)
        weights[f"{name}_heads"] = np.array([0, heads, -1, width], np.int64)
        for letter in "kv":
            inputs[f"{name}_{letter}"] = ("float32", ["b", shared, "t", width])
            nodes.append(("Unsqueeze", f"{name}_{letter} {name}_one", f"{name}_{letter}1"))
            nodes.append(("Expand", f"{name}_{letter}1 {name}_wide", f"{name}_{letter}2"))
            nodes.append(("Reshape", f"{name}_{letter}2 {name}_heads", f"{name}_{letter}3"))
        nodes.append(("Transpose", f"{name}_k3", f"{name}_kt", {"perm": (0, 1, 3, 2)}))
        nodes.append(("MatMul", f"{name}_q {name}_kt", f"{name}_raw"))
        nodes.append(("Mul", f"{name}_raw scale", f"{name}_scaled"))
        nodes.append(("Div", f"{name}_scaled cap", f"{name}_small"))
        nodes.append(("Tanh", f"{name}_small", f"{name}_flat"))
        nodes.append(("Mul", f"{name}_flat cap", f"{name}_capped"))
        nodes.append(("Add", f"{name}_capped mask", f"{name}_masked"))
        nodes.append(("Softmax", f"{name}_masked", f"{name}_p", {"axis": -1}))
        nodes.append(("MatMul", f"{name}_p {name}_v3", f"{name}_y"))
    return save(build(nodes, inputs, " ".join(f"{n}_y" for n in GROUPS), weights), folder)


def wanted(feeds: dict[str, Any], name: str) -> Any:
    heads, shared, _ = GROUPS[name]
    q, k, v = (feeds[f"{name}_{x}"].astype(np.float64) for x in "qkv")
    k, v = (np.repeat(x, heads // shared, axis=1) for x in (k, v))
    scores = 5 * np.tanh(q @ k.swapaxes(-1, -2) * 0.3 / 5) + feeds["mask"]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        assert compiled(patch, grouped(folder), folder / "shared") == len(GROUPS)
    return folder


@pytest.mark.parametrize("sizes", [(1, 1, 40), (2, 1, 513), (1, 5, 300), (1, 40, 140)])
def test_heads_share_keys(shared: Path, gpu: None, sizes: tuple[int, int, int]) -> None:
    batch, queries, tokens = sizes
    rng = np.random.default_rng(tokens)
    hidden = np.arange(tokens) > np.arange(queries)[:, None] + tokens - queries
    feeds: dict[str, Any] = {"mask": np.where(hidden, LOWEST, 0).astype(np.float32)[None, None]}
    for name, (heads, few, width) in GROUPS.items():
        for letter, of in (("q", heads), ("k", few), ("v", few)):
            length = queries if letter == "q" else tokens
            shape = (batch, of, length, width)
            feeds[f"{name}_{letter}"] = rng.standard_normal(shape).astype(np.float32)
    found = load_module(shared / "shared").run(feeds)
    for name in GROUPS:
        np.testing.assert_allclose(found[f"{name}_y"], wanted(feeds, name), atol=1e-5)

"""A small Llama with a cache of keys and values, compiled: decoding, and scores as simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import smollm2
from safetensors import safe_open

import apq_tvm
from apq_tvm.evaluate import evaluate, evaluate_scheme
from apq_tvm.evaluation.language import Language
from apq_tvm.module import load_module

ort = pytest.importorskip("onnxruntime")

CONFIG = smollm2.Config(
    layers=1, width=32, hidden=48, vocabulary=40, heads=2, kv_heads=1, rope_base=1e4, epsilon=1e-5
)
SCHEME = "W4A8g32"
PAST = (1, CONFIG.kv_heads, 3, CONFIG.head_width)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The ONNX file and the compiled module."""
    rng = np.random.default_rng(0)
    c = CONFIG
    shapes = {
        "q_proj": (c.width, c.width), "k_proj": (16, c.width), "v_proj": (16, c.width),
        "o_proj": (c.width, c.width), "gate_proj": (c.hidden, c.width),
        "up_proj": (c.hidden, c.width), "down_proj": (c.width, c.hidden),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": rng.standard_normal((c.vocabulary, c.width))}
    for name in smollm2.LAYER_WEIGHTS:
        shape = shapes.get(name.rpartition(".")[2])
        weight = np.ones(c.width) if shape is None else rng.standard_normal(shape) / 5
        weights[f"model.layers.0.{name}.weight"] = weight
    weights["model.norm.weight"] = np.ones(c.width)
    folder = tmp_path_factory.mktemp("llama")
    path, module = folder / "llama.onnx", folder / "llama_w4"
    float32 = {name: weight.astype(np.float32) for name, weight in weights.items()}
    onnx.save(smollm2.build(CONFIG, float32, cache=True), path)
    apq_tvm.compile(path, output=module, scheme=SCHEME)
    return path, module


def inputs(tokens: int, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, CONFIG.vocabulary, (1, tokens)),
        "past_key_values.0.key": rng.standard_normal(PAST).astype(np.float32),
        "past_key_values.0.value": rng.standard_normal(PAST).astype(np.float32),
    }


def test_head_and_embedding_are_stored_once(paths: tuple[Path, Path]) -> None:
    layers = {layer["name"]: layer for layer in load_module(paths[1]).manifest["layers"]}
    assert layers["model.embed_tokens"]["layout"] == layers["lm_head"]["layout"]
    with safe_open(paths[1] / "weights.safetensors", "np") as file:
        stored = [name for name in file.keys() if "embed_tokens" in name or "lm_head" in name]
        assert sorted(name.rpartition(".")[2] for name in stored) == ["codes", "scales"]


def test_decoding_token_by_token_gives_the_same(paths: tuple[Path, Path]) -> None:
    module: Any = load_module(paths[1])
    feeds = inputs(6)
    whole = module.run(feeds)
    past = {name: value for name, value in feeds.items() if name != "input_ids"}
    for at in range(6):
        step = module.run({"input_ids": feeds["input_ids"][:, at : at + 1], **past})
        np.testing.assert_allclose(step["logits"][0, 0], whole["logits"][0, at], atol=1e-3)
        past = {name: step[name.replace("past_key_values", "present")] for name in past}
    np.testing.assert_allclose(past["past_key_values.0.key"], whole["present.0.key"], atol=1e-4)


def test_the_module_scores_as_simulated(paths: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, module = paths
    np.savez(tmp_path / "in.npz", **inputs(33))
    language = Language(window=33)
    compiled = evaluate(module, model, tmp_path / "in.npz", language=language)
    simulated = evaluate_scheme(model, SCHEME, tmp_path / "in.npz", language=language)
    ours, theirs = compiled["language"], simulated["language"]
    assert ours["tokens"] == theirs["tokens"] == 32
    assert ours["logits"] == "logits"
    assert ours["float_perplexity"] == pytest.approx(theirs["float_perplexity"], rel=1e-4)
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=2e-3)
    assert ours["kl_mean"] == pytest.approx(theirs["kl_mean"], rel=2e-2)
    assert theirs["kl_mean"] > 1e-4
    assert set(compiled["outputs"]) == {"present.0.key", "present.0.value"}

"""A small Llama with a cache of keys and values, compiled: decoding, and scores as simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import apq_tvm
from apq_tvm.evaluate import evaluate, evaluate_scheme
from apq_tvm.evaluation.language import Language
from apq_tvm.module import load_module
from tests.small_llama import inputs, small_llama

ort = pytest.importorskip("onnxruntime")

SCHEME = "W4A8g32"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The ONNX file and the compiled module."""
    folder = tmp_path_factory.mktemp("llama")
    path, module = small_llama(folder / "llama.onnx"), folder / "llama_w4"
    apq_tvm.compile(path, output=module, scheme=SCHEME)
    return path, module


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

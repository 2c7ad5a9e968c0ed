"""A batch of sentences: parts of a run, on several threads, and what is wrong with one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, save

RNG = np.random.default_rng(3)
WIDTH, WORDS = 32, 60


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def encoder(folder: Path) -> Path:
    """Two heads of one attention, with what every encoder has around it."""
    heads = {"perm": [0, 2, 1, 3]}
    nodes = [
        ("Gather", "table ids", "x"),
        ("Unsqueeze", "mask axes", "far"),
        *[("MatMul", f"x {name}", f"{name}_flat") for name in ("q", "k", "v")],
        *[("Reshape", f"{name}_flat split", f"{name}_heads") for name in ("q", "k", "v")],
        *[("Transpose", f"{name}_heads", f"{name}_first", heads) for name in ("q", "v")],
        ("Transpose", "k_heads", "k_first", {"perm": [0, 2, 3, 1]}),
        ("MatMul", "q_first k_first", "products"),
        ("Add", "products far", "scores"),
        ("Softmax", "scores", "weights", {"axis": -1}),
        ("MatMul", "weights v_first", "weighed"),
        ("Transpose", "weighed", "tokens", heads),
        ("Reshape", "tokens whole", "flat"),
        ("MatMul", "flat o", "projected"),
        ("Add", "projected x", "sum"),
        ("LayerNormalization", "sum scale", "normed", {"axis": -1}),
        ("ReduceMean", "normed one", "y", {"keepdims": 0}),
    ]
    inputs = {"ids": ("int64", ["b", "t"]), "mask": ("float32", ["b", "t"])}
    weights = {
        "table": weight(WORDS, WIDTH),
        "axes": np.array([1, 2]),
        "one": np.array([1]),
        "split": np.array([0, 0, 2, WIDTH // 2]),
        "whole": np.array([0, 0, WIDTH]),
        "scale": np.ones(WIDTH, np.float32),
        **{name: weight(WIDTH, WIDTH) for name in "qkvo"},
    }
    return save(build(nodes, inputs, "y", weights, opset=18), folder)


@pytest.mark.parametrize("near", [0, 20000])
def test_a_batch_of_sentences_is_its_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: int
) -> None:
    """Whatever part of it is near the processor, on every number of threads."""
    monkeypatch.setattr("apq_tvm.codegen.emit.NEAR_CACHES", near)
    apq_tvm.compile(encoder(tmp_path), tmp_path / "encoder", scheme="W8A8")
    module = load_module(tmp_path / "encoder")
    assert module.manifest["batch"]["dimension"] == "b"
    ids, mask = RNG.integers(0, WORDS, (7, 9)), np.zeros((7, 9), np.float32)
    mask[2:4, 5:] = -1e9
    one = [module.run(ids=ids[i : i + 1], mask=mask[i : i + 1])["y"] for i in range(7)]
    for threads in (1, 2, 3, 8):
        module.set_num_threads(threads)
        for count in (7, 5, 1):
            got = module.run(ids=ids[:count], mask=mask[:count])["y"]
            np.testing.assert_allclose(got, np.concatenate(one[:count]), rtol=1e-5, atol=1e-6)
    ids[6, 4] = WORDS
    module.set_num_threads(2)
    with pytest.raises(ValueError, match=rf"id {WORDS} \(element {6 * 9 + 4}\)"):
        module.run(ids=ids, mask=mask)

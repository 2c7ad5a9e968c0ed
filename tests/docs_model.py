"""The models and inputs that commands of the README and docs/ are tried on, under the names there.

``model.onnx`` is an encoder whose layers are called as in the demo model; they are all alike, so
that compiling it takes few kernels. ``lm.onnx`` is a Llama of two blocks, of which ``lm.gguf`` has
codes, ``decoder.onnx`` one with a cache, ``detector.onnx`` one convolution of images.
``sentences.npz``, ``data.npz`` and ``tokens.npz`` are inputs for them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.cases import gguf_files
from tests.onnx_models import build, rand
from tests.small_llama import CONFIG, small_llama
from tests.unit import tiny_llama

WIDTH, BLOCKS = 64, 3
LAYERS = ("attention/self/query", "attention/output/dense")
DECODER = replace(CONFIG, hidden=32, vocabulary=32, kv_heads=2)
"""Layers of one shape: each of a shape has kernels of its own, at every width."""

WORDS = 1000
"""`apq-tvm bench` makes up ids below this."""


def write_folder(folder: Path) -> None:
    """Write the models and their inputs."""
    onnx.save(encoder(), folder / "model.onnx")
    tiny_llama.write(folder).rename(folder / "lm.onnx")
    small_llama(folder / "decoder.onnx", DECODER)
    heads = tiny_llama.CONFIG.heads, tiny_llama.CONFIG.kv_heads
    gguf_files.llama(folder / "lm.gguf", tiny_llama.weights(), *heads, "Q4_1")
    onnx.save(detector(), folder / "detector.onnx")
    rng = np.random.default_rng(0)
    for name, rows in (("sentences", 6), ("data", 12)):
        ids = rng.integers(0, WORDS, (rows, 8))
        np.savez(folder / f"{name}.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    np.savez(folder / "tokens.npz", input_ids=tiny_llama.ids(4, 16))


def detector() -> onnx.ModelProto:
    """``scores`` of ``image``, of any batch, height and width."""
    image = {"image": ("float32", ["batch", 3, "height", "width"])}
    weights = {"w": rand(24, 3, 3, 3, seed=1)}
    return build([("Conv", "image w", "scores", {"strides": [2, 2]})], image, "scores", weights)


def encoder() -> onnx.ModelProto:
    """``last_hidden_state`` of ``input_ids`` and ``attention_mask``."""
    weights: dict[str, Any] = {"words": rand(WORDS, WIDTH, seed=1), "last": np.array([-1])}
    nodes: list[tuple[Any, ...]] = [
        ("Gather", "words input_ids", "/embeddings/word_embeddings/Gather"),
        ("Cast", "attention_mask", "seen", {"to": 1}),
        ("Unsqueeze", "seen last", "wide"),
    ]
    x = "/embeddings/word_embeddings/Gather"
    for number in range(BLOCKS):
        for layer in LAYERS:
            at = f"/encoder/layer.{number}/{layer}"
            weights[f"{at}/w"] = rand(WIDTH, WIDTH, seed=len(weights)) / WIDTH**0.5
            nodes.append(("MatMul", f"{x} {at}/w", f"{at}/MatMul"))
            nodes.append(("Add", f"{at}/MatMul {x}", f"{at}/Add"))
            x = f"{at}/Add"
    nodes.append(("Mul", f"{x} wide", "last_hidden_state"))
    inputs = {name: ("int64", ["batch", "seq"]) for name in ("input_ids", "attention_mask")}
    model = build(nodes, inputs, "last_hidden_state", weights)
    for node in model.graph.node:
        node.name = node.name.removeprefix("n_")
    return model

"""A small Llama with random weights and a cache of keys and values, as an ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import smollm2

CONFIG = smollm2.Config(
    layers=1, width=32, hidden=48, vocabulary=40, heads=2, kv_heads=1, rope_base=1e4, epsilon=1e-5
)
PAST = (1, CONFIG.kv_heads, 3, CONFIG.head_width)


def small_llama(path: Path, config: smollm2.Config = CONFIG, lift: float = 0.0) -> Path:
    """Write the model and return its path; all embeddings have `lift` in common, and so have keys,
    but not values."""
    rng = np.random.default_rng(0)
    c = config
    keys = c.kv_heads * c.head_width
    shapes = {
        "q_proj": (c.width, c.width), "k_proj": (keys, c.width), "v_proj": (keys, c.width),
        "o_proj": (c.width, c.width), "gate_proj": (c.hidden, c.width),
        "up_proj": (c.hidden, c.width), "down_proj": (c.width, c.hidden),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": lift + rng.standard_normal((c.vocabulary, c.width))}
    for name in smollm2.LAYER_WEIGHTS:
        shape = shapes.get(name.rpartition(".")[2])
        weight = np.ones(c.width) if shape is None else rng.standard_normal(shape) / 5
        if lift and name.endswith("v_proj"):
            weight = weight - weight.mean(1, keepdims=True)
        weights[f"model.layers.0.{name}.weight"] = weight
    weights["model.norm.weight"] = np.ones(c.width)
    float32 = {name: weight.astype(np.float32) for name, weight in weights.items()}
    onnx.save(smollm2.build(config, float32, cache=True), path)
    return path


def inputs(tokens: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Ids of so many tokens behind a cache of three."""
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, CONFIG.vocabulary, (1, tokens)),
        "past_key_values.0.key": rng.standard_normal(PAST).astype(np.float32),
        "past_key_values.0.value": rng.standard_normal(PAST).astype(np.float32),
    }

"""An encoder as ONNX Runtime's tool for transformers writes it, and its attention by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx_models import build, rand, run_onnx, save

import apq_tvm
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

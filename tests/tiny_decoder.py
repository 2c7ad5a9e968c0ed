"""One layer of a language model as ONNX Runtime's tools write it: packed codes, grouped queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.onnx_models import build, rand, save

MS = {"com.microsoft": 1}
HEADS, KV, SIZE, HIDDEN = 4, 2, 16, 64


def nbits(
    rng: np.random.Generator, name: str, n: int, k: int, block: int = 32
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Weights, the words of the inputs and the attributes of a MatMulNBits of 4 bits."""
    weights = {
        f"{name}_q": rng.integers(0, 256, (n, k // block, block // 2)).astype(np.uint8),
        f"{name}_s": (rng.uniform(0.5, 1.5, n * k // block) / 8 / np.sqrt(k)).astype(np.float32),
    }
    attrs = {"N": n, "K": k, "bits": 4, "block_size": block}
    return weights, f"{name}_q {name}_s", attrs


def write(folder: Path) -> Path:
    """Write a model from ``input_ids`` [b, s], ``mask`` [b, t] and a past to ``logits``."""
    rng = np.random.default_rng(0)
    angles = np.outer(np.arange(32), 1 / 10 ** np.linspace(0, 1, SIZE // 2))
    weights: dict[str, Any] = {
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "table": rng.integers(0, 256, (HIDDEN, HIDDEN // 2)).astype(np.uint8),
        "table_s": rng.uniform(0.05, 0.1, (HIDDEN, HIDDEN // 32)).astype(np.float32),
        "one": np.array(1),
        "minus": np.array(1, np.int32),
        "axes": np.array([1]),
        **{f"g{i}": 1 + rand(HIDDEN, seed=i) / 10 for i in range(3)},
    }
    shapes = {"qkv": ((HEADS + 2 * KV) * SIZE, HIDDEN), "o": (HIDDEN, HIDDEN)}
    shapes |= dict.fromkeys(("up", "gate", "down", "head"), (HIDDEN, HIDDEN))
    made = {name: nbits(rng, name, *shape) for name, shape in shapes.items()}
    for part, _, _ in made.values():
        weights |= part

    def linear(name: str, x: str, y: str) -> tuple[Any, ...]:
        _, words, attrs = made[name]
        return ("com.microsoft.MatMulNBits", f"{x} {words}", y, attrs)

    skip = "com.microsoft.SkipSimplifiedLayerNormalization"
    gqa = {"num_heads": HEADS, "kv_num_heads": KV, "do_rotary": 1}
    nodes = [
        ("ReduceSum", "mask axes", "count", {"keepdims": 0}),
        ("Cast", "count", "count32", {"to": 6}),
        ("Sub", "count32 minus", "lengths"),
        ("Shape", "mask", "sizes"),
        ("Gather", "sizes one", "size"),
        ("Cast", "size", "total", {"to": 6}),
        (
            "com.microsoft.GatherBlockQuantized",
            "table input_ids table_s",
            "x",
            {"block_size": 32, "bits": 4},
        ),
        ("SimplifiedLayerNormalization", "x g0", "n0", {"epsilon": 1e-5}),
        linear("qkv", "n0", "p"),
        (
            "com.microsoft.GroupQueryAttention",
            "p _ _ pk pv lengths total cos sin",
            "a ok ov",
            gqa,
        ),
        linear("o", "a", "b"),
        (skip, "x b g1", "n1 _ _ r", {"epsilon": 1e-5}),
        linear("up", "n1", "u"),
        linear("gate", "n1", "t"),
        ("Sigmoid", "t", "sig"),
        ("Mul", "t sig", "act"),
        ("Mul", "u act", "f"),
        linear("down", "f", "d"),
        (skip, "r d g2", "n2", {"epsilon": 1e-5}),
        linear("head", "n2", "logits"),
    ]
    inputs = {
        "input_ids": ("int64", ["b", "s"]),
        "mask": ("int64", ["b", "t"]),
        "pk": ("float32", ["b", KV, "p", SIZE]),
        "pv": ("float32", ["b", KV, "p", SIZE]),
    }
    model = build(nodes, inputs, "logits ok ov", weights, opset=21, domains=MS)
    for node in model.graph.node:
        node.output[:] = ["" if name == "_" else name for name in node.output]
    return save(model, folder)


def feeds(batch: int, new: int, past: int, seed: int = 0) -> dict[str, Any]:
    """Inputs: `new` tokens behind `past` others."""
    cache = (batch, KV, past, SIZE)
    return {
        "input_ids": np.random.default_rng(seed).integers(0, 50, (batch, new)),
        "mask": np.ones((batch, past + new), np.int64),
        "pk": rand(*cache, seed=seed + 1),
        "pv": rand(*cache, seed=seed + 2),
    }


def whole(module: Any, ids: Any) -> Any:
    """Logits of a run without a past, of this model or another decoder."""
    given = {}
    for info in module.inputs:
        shape = [
            len(ids) if d in ("b", "batch") else 0 if isinstance(d, str) else d for d in info.shape
        ]
        given[info.name] = np.zeros(shape, np.float32)
    given["input_ids"] = ids
    if "mask" in given:
        given["mask"] = np.ones(ids.shape, np.int64)
    return module.run(given)["logits"]

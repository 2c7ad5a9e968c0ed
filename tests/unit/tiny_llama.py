"""A Llama of a few thousand weights, in the graph of examples/smollm2.py, and inputs for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import smollm2
from numpy.typing import NDArray

from apq_tvm.onnx_import import import_onnx
from apq_tvm.types import ImportedModel

CONFIG = smollm2.Config(
    layers=2,
    width=32,
    hidden=64,
    vocabulary=48,
    heads=4,
    kv_heads=2,
    rope_base=1e4,
    epsilon=1e-5,
)


def weights(c: smollm2.Config = CONFIG) -> dict[str, NDArray[np.float32]]:
    """The weights, by Hugging Face's names."""
    rng = np.random.default_rng(0)
    sizes = {
        "self_attn.q_proj": (c.width, c.width),
        "self_attn.k_proj": (c.kv_heads * c.head_width, c.width),
        "self_attn.v_proj": (c.kv_heads * c.head_width, c.width),
        "self_attn.o_proj": (c.width, c.width),
        "mlp.gate_proj": (c.hidden, c.width),
        "mlp.up_proj": (c.hidden, c.width),
        "mlp.down_proj": (c.width, c.hidden),
        "input_layernorm": (c.width,),
        "post_attention_layernorm": (c.width,),
    }

    def random(*shape: int) -> NDArray[np.float32]:
        scale = 0.2 if len(shape) == 2 else 0.5
        return (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)

    made = {"model.embed_tokens.weight": random(c.vocabulary, c.width)}
    made["model.norm.weight"] = random(c.width)
    for layer in range(c.layers):
        for name, shape in sizes.items():
            made[f"model.layers.{layer}.{name}.weight"] = random(*shape)
    return made


def write(folder: Path) -> Path:
    """Write the ONNX file."""
    path = folder / "tiny.onnx"
    path.write_bytes(smollm2.build(CONFIG, weights()).SerializeToString())
    return path


def load(folder: Path) -> ImportedModel:
    """The imported model."""
    return import_onnx(write(folder))


def ids(samples: int = 8, length: int = 16, seed: int = 1) -> NDArray[np.int64]:
    """Tokens [samples, length]; some are far more frequent than others."""
    rng = np.random.default_rng(seed)
    return (CONFIG.vocabulary * rng.random((samples, length)) ** 2).astype(np.int64)


def apart() -> NDArray[np.int64]:
    """Tokens [16, 16] of the same kind that nothing here was learned from."""
    return ids(16, 16, seed=7)


def calibrated(folder: Path, samples: int = 8) -> tuple[Path, Path, Path]:
    """The model, inputs for it, and its calibration, written to a folder."""
    from apq_tvm.calibrate import calibrate

    np.savez(folder / "data.npz", input_ids=ids(samples, 16))
    model = write(folder)
    calibrate(model, folder / "data.npz", folder / "calib")
    return model, folder / "data.npz", folder / "calib"

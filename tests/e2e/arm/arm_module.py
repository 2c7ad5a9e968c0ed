"""A model whose module runs under qemu-user."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from apq_tvm.bench.emulator import COMPILERS, EMULATORS, INSTALL
from apq_tvm.types import Array
from tests.onnx_models import build, rand, save

WIDTH, WORDS = 64, 40
"""Of the model `words_model`."""

_CC, _QEMU = COMPILERS["aarch64"], EMULATORS["aarch64"]
_lacking = [tool for tool in (_CC, _QEMU) if shutil.which(tool) is None]

needs_qemu = pytest.mark.skipif(
    bool(_lacking), reason=f"{', '.join(_lacking)} not on PATH: {INSTALL}"
)
"""For tests that compile and run aarch64 programs."""


def words_model(folder: Path) -> Path:
    """An ONNX file: words in, attention and a feed-forward layer with its residual out."""
    weights = {
        "table": rand(WORDS, WIDTH),
        "wq": rand(WIDTH, WIDTH, seed=1) / 8,
        "wk": rand(WIDTH, WIDTH, seed=2) / 8,
        "gain": 1 + rand(WIDTH, seed=3) / 4,
        "shift": rand(WIDTH, seed=4),
        "w1": rand(WIDTH, 2 * WIDTH, seed=5) / 8,
        "b1": rand(2 * WIDTH, seed=6),
        "w2": rand(2 * WIDTH, WIDTH, seed=7) / 11,
    }
    nodes = [
        ("Gather", "table ids", "x"),
        ("MatMul", "x wq", "q"),
        ("MatMul", "x wk", "k"),
        ("Transpose", "k", "kt", {"perm": [0, 2, 1]}),
        ("MatMul", "q kt", "scores"),
        ("Softmax", "scores", "p", {"axis": -1}),
        ("MatMul", "p x", "a"),
        ("Add", "a x", "r"),
        ("LayerNormalization", "r gain shift", "n", {"axis": -1}),
        ("MatMul", "n w1", "h"),
        ("Add", "h b1", "hb"),
        ("Relu", "hb", "g"),
        ("MatMul", "g w2", "m"),
        ("Add", "m n", "y"),
    ]
    inputs = {"ids": ("int64", ["batch", "length"])}
    return save(build(nodes, inputs, "y", weights), folder)


def cosine(a: Array, b: Array) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))

"""Functions that are no linear layers, at the edges of what a GPU's kernel can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx_models import build, run_onnx, save

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.module import load_module

MANY = 70


def test_many_tensors_and_padded_sums(gpu: None, tmp_path: Path) -> None:
    """A kernel that reads as many tensors as a document's fields, and one over ``n + 30`` rows."""
    fields = [f"x{i}" for i in range(MANY)]
    nodes: list[Any] = [
        ("Concat", " ".join(fields), "wide", {"axis": 1}),
        ("Split", "z", "left right", {"axis": 2}),
        ("Sigmoid", "right", "gate"),
        ("Mul", "left gate", "glu"),
        ("Pad", "glu pads", "padded"),
    ]
    inputs: dict[str, Any] = {name: ("float32", ["b", 3]) for name in fields}
    inputs["z"] = ("float32", ["b", "n", 64])
    pads = {"pads": np.array([0, 30, 0, 0, 0, 0])}
    path = save(build(nodes, inputs, "wide padded", pads), tmp_path)
    pipeline.compile(path, tmp_path / "edges", target="rtx-3090", images=Simulator())
    module = load_module(tmp_path / "edges")
    rng = np.random.default_rng(0)
    for b, n in ((1, 1), (2, 9)):
        feeds = {name: rng.standard_normal((b, 3)).astype(np.float32) for name in fields}
        feeds["z"] = rng.standard_normal((b, n, 64)).astype(np.float32)
        found = module.run(feeds)
        for name, wanted in run_onnx(path, feeds).items():
            np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-6)

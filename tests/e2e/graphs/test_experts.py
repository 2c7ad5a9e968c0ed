"""Mixtures of experts as modules, against ONNX Runtime: experts that nobody chose do not run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import apq_tvm
from apq_tvm.module import load_module
from tests.onnx_models import build, rand, save, session_of

EXPERTS, HIDDEN, INNER = 6, 32, 48


def test_mixture_of_experts(tmp_path: Path) -> None:
    weights = {
        "flat": np.array([-1, HIDDEN], np.int64),
        "router": rand(HIDDEN, EXPERTS, seed=1),
        "w1": 0.2 * rand(EXPERTS, 2 * INNER, HIDDEN, seed=2),
        "b1": rand(EXPERTS, 2 * INNER, seed=3),
        "w2": 0.2 * rand(EXPERTS, HIDDEN, INNER, seed=4),
    }
    attrs = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "swiglu_limit": 2.0}
    nodes = [
        ("Reshape", "x flat", "tokens"),
        ("MatMul", "tokens router", "scores"),
        ("com.microsoft.MoE", "x scores w1 b1 w2", "y", attrs),
    ]
    inputs = {"x": ("float32", ["batch", "length", HIDDEN])}
    path = save(build(nodes, inputs, "y", weights, domains={"com.microsoft": 1}), tmp_path)
    session = session_of(path)
    apq_tvm.compile(path, tmp_path / "float", scheme="float")
    module = load_module(tmp_path / "float")
    # One of each, whatever the number of experts.
    gathers = [f for f in module.manifest["functions"] if f["name"].startswith("gather")]
    assert len(gathers) < EXPERTS
    for shape in ((1, 1), (2, 1), (3, 7), (0, 4)):
        x = rand(*shape, HIDDEN, seed=sum(shape))
        (wanted,) = session.run(None, {"x": x})
        np.testing.assert_allclose(module.run({"x": x})["y"], wanted, atol=2e-5)
    # Everybody chooses the same two.
    x = np.repeat(rand(1, 1, HIDDEN), 5, axis=1)
    (wanted,) = session.run(None, {"x": x})
    np.testing.assert_allclose(module.run({"x": x})["y"], wanted, atol=2e-5)

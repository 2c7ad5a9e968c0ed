"""Stacks of constant matrices through the whole pipeline; `explain` says which stay float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.module import load_module
from tests.onnx_models import build, rand, run_onnx, save


@pytest.mark.parametrize(("scheme", "error"), [("float", 1e-5), ("W8A8", 0.02)])
def test_experts_against_onnx_runtime(tmp_path: Path, scheme: str, error: float) -> None:
    nodes = [("MatMul", "x up", "h"), ("Relu", "h", "r"), ("MatMul", "r down", "y")]
    nodes.append(("MatMul", "y few", "z"))
    weights = {"up": rand(3, 48, 16) / 7, "down": rand(3, 16, 8) / 4, "few": rand(3, 8, 4) / 3}
    model = build(nodes, {"x": ("float32", ["m", 48])}, "y z", weights)
    path = save(model, tmp_path)
    apq_tvm.compile(path, output=tmp_path / "m", target="host", scheme=scheme)
    for m in (1, 5):
        feeds = {"x": rand(m, 48)}
        made = load_module(tmp_path / "m").run(feeds)
        for name, want in run_onnx(path, feeds).items():
            np.testing.assert_allclose(made[name], want, atol=error * np.abs(want).max())
    report = explain(tmp_path / "m")
    schemes = {layer["name"]: layer["scheme"] for layer in report["layers"]}
    assert schemes == dict.fromkeys(["n_h", "n_y.0", "n_y.1", "n_y.2"], scheme)
    lines = "\n".join(explanation_lines(report))
    assert "float: K=8 is below 16, the smallest group\n  n_z" in lines

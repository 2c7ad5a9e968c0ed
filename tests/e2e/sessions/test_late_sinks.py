"""Attention with a sink whose kernel declines only when it is lowered: plain operators do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, run_onnx, save

import apq_tvm
import apq_tvm.lower.operators.attention as lowered
from apq_tvm.errors import NotApplicable
from apq_tvm.module import load_module


def declines(*_: Any, **__: Any) -> Any:
    raise NotApplicable("its shapes are only known to a run")


@pytest.mark.parametrize("tokens", ["t", pytest.param(37, marks=pytest.mark.all_cases)])
def test_a_sink_beside_scores_and_a_mask(
    tokens: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row sees nothing, so that all its weight goes to what has no value."""
    nodes = [
        ("Transpose", "k", "kt", {"perm": (0, 1, 3, 2)}),
        ("MatMul", "q kt", "a"),
        ("Mul", "a half", "c"),
        ("Add", "c bias", "d"),
        ("Concat", "d sinks", "e", {"axis": -1}),
        ("Softmax", "e", "f", {"axis": -1}),
        ("Slice", "f zero last axis", "p"),
        ("MatMul", "p v", "y"),
    ]
    rows = {"q": 5, "k": tokens, "v": tokens}
    inputs = {name: ("float32", [1, 3, n, 8]) for name, n in rows.items()}
    inputs["bias"] = ("float32", [5, tokens])
    bias = np.zeros((5, 37), np.float32)
    bias[0], bias[1, 4:] = -np.inf, -np.inf
    weights = {"half": np.float32(0.5), "zero": np.int64([0]), "last": np.int64([-1])}
    sinks = np.broadcast_to(np.float32([1, 0, 3])[:, None, None], (1, 3, 5, 1)).copy()
    weights |= {"sinks": sinks, "axis": np.int64([3])}
    path = save(build(nodes, inputs, "y", weights, 17, {}), tmp_path)
    feeds = {"q": rand(1, 3, 5, 8), "k": rand(1, 3, 37, 8, seed=1), "v": rand(1, 3, 37, 8, seed=2)}
    feeds["bias"] = bias
    every, asked = lowered.cached_operators, []

    def operators(profile: Any) -> Any:
        asked.append(profile)
        return {**every(profile), "apq.Attention": declines}

    monkeypatch.setattr(lowered, "cached_operators", operators)
    apq_tvm.compile(path, tmp_path / "late")
    assert asked  # it was one node until then
    got = load_module(tmp_path / "late").run(feeds)["y"]
    np.testing.assert_allclose(got, run_onnx(path, feeds)["y"], rtol=1e-4, atol=1e-5)
    assert not got[0, :, 0].any()

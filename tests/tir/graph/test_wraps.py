"""Loops whose indices wrap around: LLVM leaves them scalar, and every other one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx.reference import ReferenceEvaluator
from tvm import te, tirx

import apq_tvm
from apq_tvm.codegen.build.pipeline import build
from apq_tvm.module import load_module
from tests import onnx_models


def source(index: Any, core: str) -> str:
    """LLVM's code, as it leaves the optimizer, of ``o[i] = x[index(i)] * 2``."""
    x = te.placeholder((4096,), "float32", "x")
    y = te.compute((4096,), lambda i: x[index(i)] * tirx.const(2, "float32"), "y")
    func = te.create_prim_func([x, y])
    attrs = {"global_symbol": "f", "tirx.noalias": True, "tirx.is_scheduled": True}
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": core})
    return build(tvm.IRModule({"f": func.with_attrs(attrs)}), target, False).inspect_source("ll")


WRAPPED = {
    "remainder": lambda i: tirx.truncmod(i, tirx.const(8, "int32")),
    "of another": lambda i: tirx.floormod(i + 3, tirx.const(24, "int32")),
    "bits": lambda i: i & tirx.const(7, "int32"),
    "narrow": lambda i: tirx.Cast("int32", tirx.Cast("uint8", i)),
}


@pytest.mark.parametrize("core", ["znver5", "haswell"])
@pytest.mark.parametrize("index", WRAPPED)
def test_wrapping_loops_stay_scalar(index: str, core: str) -> None:
    text = source(WRAPPED[index], core)
    assert "llvm.fake.use" in text and " x float>" not in text


@pytest.mark.parametrize("core", ["znver5", "haswell"])
def test_other_loops_are_vectorized(core: str) -> None:
    text = source(lambda i: i, core)
    assert "llvm.fake.use" not in text and " x float>" in text


def test_rotary_positions(tmp_path: Path) -> None:
    """Whatever share of a vector a head's half is."""
    rng = np.random.default_rng(0)
    feeds, weights, nodes = {"at": rng.integers(0, 50, (2, 3))}, {}, []
    for half in (1, 2, 4, 8, 16):
        feeds[f"x{half}"] = rng.standard_normal((2, 3, 8 * half)).astype(np.float32)
        for name in (f"cos{half}", f"sin{half}"):
            weights[name] = rng.standard_normal((50, half)).astype(np.float32)
        words = f"x{half} cos{half} sin{half} at"
        nodes.append(("RotaryEmbedding", words, f"y{half}", {"num_heads": 4}))
    inputs = {name: (str(value.dtype), value.shape) for name, value in feeds.items()}
    outputs = [node[2] for node in nodes]
    model = onnx_models.build(nodes, inputs, " ".join(outputs), weights, opset=23)
    path = onnx_models.save(model, tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    got = load_module(tmp_path / "compiled").run(feeds)
    for name, wanted in zip(outputs, ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)

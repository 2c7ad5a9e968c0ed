"""``W2h``: what its codes mean, what they lose, and that modules compute it exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.errors import BadScheme
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.formats import bits_per_weight, dequantize, parse_scheme
from apq_tvm.module import load_module
from apq_tvm.quantizers import quantize_tensor
from tests.onnx_models import build, save


def test_codes_are_half_integers() -> None:
    scheme = parse_scheme("W2hA8g64")
    assert scheme is not None and str(scheme) == "W2hA8g64" and scheme.act_group == 64
    w = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    tensor = quantize_tensor(w, scheme)
    steps = np.repeat(tensor.scales.astype(np.float32), 64, axis=1)
    np.testing.assert_array_equal(dequantize(tensor), steps * (tensor.codes - np.float32(1.5)))
    assert bits_per_weight(tensor) == 2.25


@pytest.mark.parametrize("group", [64, 128])
def test_normal_weights_lose_less_than_as_integers(group: int) -> None:
    w = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    half, whole = (
        float(np.square(dequantize(quantize_tensor(w, parse_scheme(name))) - w).mean())
        for name in (f"W2hA8g{group}", f"W2A8g{group}")
    )
    assert 0.1 < half < 0.96 * whole < 0.13


@pytest.mark.parametrize("name", ["W2hA8g64", "W2hA8g32", "W2hA32g128"])
def test_modules_compute_what_the_codes_mean(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal((300, 70)).astype(np.float32)}
    model = build([("MatMul", "x w", "y")], {"x": ("float32", ["rows", 300])}, "y", weights)
    plan = pipeline.plan(save(model, tmp_path), target="host", scheme=name)
    pipeline.build(plan, tmp_path / "module")
    module, simulation = load_module(tmp_path / "module"), Simulation(plan.quantized)
    for rows in (1, 5, 33):
        x = rng.standard_normal((rows, 300)).astype(np.float32)
        wanted = simulation.run({"x": x})["y"]
        scale = float(np.abs(wanted).max())
        assert float(np.abs(module.run(x=x)["y"] - wanted).max()) < 2e-6 * scale


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("W2hA8", "without groups"),
        ("W3hA8g64", "half-integer weights of 3 bits"),
        ("W2hA8g16", "groups of 16"),
        ("W2hA9g64", "activations 'A9'"),
    ],
)
def test_what_does_not_exist_is_named(name: str, reason: str) -> None:
    with pytest.raises(BadScheme, match=reason):
        parse_scheme(name)

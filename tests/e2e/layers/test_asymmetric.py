"""Asymmetric activations: modules compute what the simulation says, on every CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.bench.module_program import ModuleProgram
from apq_tvm.evaluation.simulate import Simulation
from apq_tvm.explain import explain, explanation_lines
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx
from apq_tvm.quantizers import quantize
from apq_tvm.types import Array
from tests.e2e.arm.arm_module import needs_qemu
from tests.onnx_models import build, rand, save

K = 70
"""No multiple of a unit: columns past K are no zeros where rows have zero points."""

LAYERS = {
    "whole": ("W8A8", 50),
    "behind": ("W8A8", 33),
    "nibbles": ("W4A8", 33),
    "zeros": ("W4zA8", 16),
    "threes": ("W3A8", 24),
    "grouped": ("W4A8tg32", 20),
    "symmetric": ("W8A8g32", 8),
}
TYPES = {f"^n_y_{name}$": scheme for name, (scheme, _) in LAYERS.items()}

EXACT = ("whole", "behind", "symmetric")
"""Layers whose codes of activations Arm's kernels do not fold into each other."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    depth = dict.fromkeys(LAYERS, K) | {"behind": LAYERS["whole"][1]}
    weights = {f"w_{name}": rand(depth[name], n) / 8 for name, (_, n) in LAYERS.items()}
    weights["bias"] = rand(LAYERS["whole"][1])
    read = dict.fromkeys(LAYERS, "x") | {"behind": "relu"}
    nodes = [("MatMul", f"{read[name]} w_{name}", f"y_{name}") for name in LAYERS]
    nodes[1:1] = [("Add", "y_whole bias", "sum"), ("Relu", "sum", "relu")]
    outputs = " ".join(f"y_{name}" for name in LAYERS if name != "whole") + " relu"
    made = build(nodes, {"x": ("float32", ["m", K])}, outputs, weights)
    return save(made, tmp_path_factory.mktemp("model"))


def inputs(m: int) -> Array:
    """Rows with means of their own, one of them positive, and one of zeros."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, K)) + 3 * rng.standard_normal((m, 1))
    x[0] = np.abs(x[0])
    x[2:3] = 0
    return x.astype(np.float32)


def check(run: Callable[[Array], dict[str, Array]], model: Path, folds: bool) -> None:
    imported = import_onnx(model)
    simulation = Simulation(quantize(imported, "W8A8", TYPES))
    for m in (1, 2, 7, 40):
        x = inputs(m)
        wanted, got = simulation.run({"x": x}), run(x)
        for name, value in wanted.items():
            exact = not folds or name.removeprefix("y_") in (*EXACT, "relu")
            error = np.abs(got[name] - value).max() / np.abs(value).max()
            assert error < (2e-6 if exact else 2e-2), (m, name, error)


@pytest.mark.all_cases
def test_this_machine(model: Path, tmp_path: Path) -> None:
    apq_tvm.compile(model, tmp_path / "m", scheme="W8A8", tensor_types=TYPES)
    module = load_module(tmp_path / "m")
    check(lambda x: module.run({"x": x}), model, False)
    x = inputs(4)
    x[0, 3], x[1, 5], x[3, 1] = np.nan, np.inf, -np.inf
    found = module.run({"x": x})["y_nibbles"]
    assert not np.isfinite(found[[0, 1, 3]]).any() and (found[2] == 0).all()
    (entry,) = (e for e in explain(tmp_path / "m")["layers"] if e["name"] == "n_y_whole")
    assert entry["activations"] == "asymmetric int8 per token"
    text = "\n".join(explanation_lines(explain(tmp_path / "m")))
    assert "symmetric int8 per group of 32" in text


@needs_qemu
@pytest.mark.all_cases
@pytest.mark.parametrize(
    "target,cpu",
    (("graviton3", "max"), ("graviton2", "neoverse-n1"), ("cortex-a53", "cortex-a53")),
)
def test_under_qemu(target: str, cpu: str, model: Path, tmp_path: Path) -> None:
    apq_tvm.compile(model, tmp_path / "m", scheme="W8A8", tensor_types=TYPES, target=target)
    program = ModuleProgram(tmp_path / "m", tmp_path)
    check(lambda x: program.run({"x": x}, cpu), model, True)


LONG = 33200
"""Columns whose products of codes may exceed int32, so that activations stay floats."""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs, weights = {"x": ("float32", ["m", LONG])}, {"w": rand(LONG, 17) / 180}
    made = build([("MatMul", "x w", "y")], inputs, "y", weights)
    return save(made, tmp_path_factory.mktemp("long"))


def check_long(run: Callable[[Array], dict[str, Array]], model: Path) -> None:
    decoded = Simulation(quantize(import_onnx(model), "W8A8"), activations=False)
    for m in (1, 9):
        x = np.random.default_rng(m).random((m, LONG), np.float32)
        wanted = decoded.run({"x": x})["y"]
        np.testing.assert_allclose(run(x)["y"], wanted, rtol=1e-3, atol=1e-3)


def test_rows_too_long_for_codes(long_model: Path, tmp_path: Path) -> None:
    apq_tvm.compile(long_model, tmp_path / "m", scheme="W8A8")
    module = load_module(tmp_path / "m")
    check_long(lambda x: module.run({"x": x}), long_model)


@needs_qemu
@pytest.mark.all_cases
def test_rows_too_long_for_codes_on_arm(long_model: Path, tmp_path: Path) -> None:
    apq_tvm.compile(long_model, tmp_path / "m", scheme="W8A8", target="graviton2")
    program = ModuleProgram(tmp_path / "m", tmp_path)
    check_long(lambda x: program.run({"x": x}, "neoverse-n1"), long_model)

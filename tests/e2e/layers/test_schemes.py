"""One module whose layers each have a scheme of their own, against the simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.formats import dequantize
from apq_tvm.formats.scheme import parse_scheme
from apq_tvm.module import load_module
from tests.onnx_models import build, save
from tests.simulated import limit, product, relative

N, K = 70, 100  # neither divides by a vector, a unit of 32 or a group
SCHEMES = (
    "W1A8", "W2A8g16", "W3zA8g64", "W4A8g32", "W4zA8g32", "W4A8tg64", "W5A8g128", "W6zA8",
    "W7A8g32", "W8A8", "W8zA8g256", "W4A4g32", "W3zA5", "W2A2g64", "W8A6g32",
    "W3A16g64", "W4zA32g16", "W8A16", "float",
)  # fmt: skip
ROWS = (1, 2, 3, 4, 5, 9, 40)

FEW = ("W3zA8g64", "W4A8g32", "W4A8tg64", "W8A8", "W4A4g32", "W2A2g64", "W3A16g64", "float")
"""What `make test` compiles: of widths, groups, activations and zero points each kind."""


OTHERS = tuple(scheme for scheme in SCHEMES if scheme not in FEW)
SETS = [pytest.param(FEW, id="few"), pytest.param(OTHERS, id="others", marks=pytest.mark.all_cases)]


@pytest.fixture(scope="module", params=SETS)
def schemes(request: pytest.FixtureRequest) -> tuple[str, ...]:
    chosen: tuple[str, ...] = request.param
    return chosen


@pytest.fixture(scope="module")
def compiled(schemes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemes")
    rng = np.random.default_rng(1)
    weights, nodes, outputs = {}, [], []
    for i in range(len(schemes)):
        weights[f"w{i}"] = rng.standard_normal((K, N)).astype(np.float32)
        weights[f"b{i}"] = rng.standard_normal(N).astype(np.float32)
        nodes += [("MatMul", f"x w{i}", f"m{i}"), ("Add", f"m{i} b{i}", f"y{i}")]
        outputs.append(f"y{i}")
    inputs = {"x": ("float32", ["rows", K])}
    path = save(build(nodes, inputs, " ".join(outputs), weights), folder)
    types = {f"^n_m{i}$": scheme for i, scheme in enumerate(schemes)}
    plan = pipeline.plan(path, tensor_types=types)
    for i in range(len(schemes)):
        if name := plan.quantized.layers.get(f"n_m{i}"):
            weights[f"w{i}"] = dequantize(plan.quantized.tensors[name]).T
    np.savez(folder / "decoded.npz", **weights)
    pipeline.build(plan, folder / "mixed")
    return folder


def wrong_layers(
    compiled: Path, schemes: tuple[str, ...], rows: int, scales: float = 1.0
) -> list[str]:
    """Which layers leave the simulation's bounds, with their scales times something."""
    module = load_module(compiled / "mixed")
    decoded = np.load(compiled / "decoded.npz")
    x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
    outputs, wrong = module.run(x=x), []
    for i, name in enumerate(schemes):
        scheme = parse_scheme(name)
        found = scales * (outputs[f"y{i}"] - decoded[f"b{i}"])
        error = relative(found, product(x, decoded[f"w{i}"].T, scheme))
        if not error < limit(scheme):
            wrong.append(f"{name} at {rows} rows: {error}")
    return wrong


@pytest.mark.parametrize("rows", ROWS)
def test_every_layer_computes_what_is_simulated(
    compiled: Path, schemes: tuple[str, ...], rows: int
) -> None:
    assert not wrong_layers(compiled, schemes, rows)


def test_other_scales_are_seen(compiled: Path, schemes: tuple[str, ...]) -> None:
    """5 % more, and a module of zeros: what is computed is linear in the scales."""
    for scales in (1.05, 0.0):
        assert len(wrong_layers(compiled, schemes, 5, scales)) == len(schemes)


def test_manifest_says_which_scheme_each_layer_got(
    compiled: Path, schemes: tuple[str, ...]
) -> None:
    module = load_module(compiled / "mixed")
    layers = {layer["name"]: layer for layer in module.manifest["layers"]}
    assert [layers[f"n_m{i}"]["scheme"] for i in range(len(schemes))] == list(schemes)
    assert all(layer["kernels"][0]["m_min"] == 1 for layer in layers.values())
    assert all(layer["kernels"][-1]["m_max"] == -1 for layer in layers.values())

"""Every family of formats, from ONNX to a running module: here, with AVX2, on plain x86-64."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.formats import FAMILIES, dequantize, parse_scheme
from apq_tvm.module import load_module
from tests.onnx_models import build, save

N, K = 70, 336  # no vector, unit, group or super-block divides both
SCHEMES = tuple(name for family in FAMILIES if family.name != "int" for name in family.examples)
ROWS = (1, 2, 3, 5, 17)

# int8 activations are off by up to half a step of 1/127 of a token's maximum; tables in int8 add as
# much. The root mean square over K terms is well below that.
A8_ERROR, FLOAT_ERROR = 0.03, 1e-5


@pytest.fixture(scope="module", params=("host", "x86-64-v3", "x86-64"))
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One module with a layer for every scheme, and the decoded weights beside it."""
    if not SCHEMES:
        pytest.skip("there are no other families")
    folder = tmp_path_factory.mktemp(f"families_{request.param.replace('-', '_')}")
    rng = np.random.default_rng(1)
    weights, nodes, outputs = {}, [], []
    for i in range(len(SCHEMES)):
        weights[f"w{i}"] = rng.standard_normal((K, N)).astype(np.float32)
        weights[f"b{i}"] = rng.standard_normal(N).astype(np.float32)
        nodes += [("MatMul", f"x w{i}", f"m{i}"), ("Add", f"m{i} b{i}", f"y{i}")]
        outputs.append(f"y{i}")
    inputs = {"x": ("float32", ["rows", K])}
    path = save(build(nodes, inputs, " ".join(outputs), weights), folder)
    types = {f"^n_m{i}$": scheme for i, scheme in enumerate(SCHEMES)}
    plan = pipeline.plan(path, target=request.param, tensor_types=types)
    decoded = {}
    for i in range(len(SCHEMES)):
        tensor = plan.quantized.tensors[plan.quantized.layers[f"n_m{i}"]]
        for bits in tensor.scheme.widths:
            decoded[f"{i}@{bits}"] = dequantize(tensor, bits)
        decoded[f"b{i}"] = weights[f"b{i}"]
    np.savez(folder / "decoded.npz", **decoded)
    pipeline.build(plan, folder / "families")
    return folder


def run_layer(module: ModuleType, number: int, x: np.ndarray, bits: int) -> np.ndarray:
    """The output of one layer, at a width where it has several."""
    if bits:
        module.set_precision(bits, layers=f"^n_m{number}$")
    y: np.ndarray = module.run(x=x)[f"y{number}"]
    return y


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", SCHEMES)
def test_layer_computes_its_decoded_weights(compiled: Path, name: str, rows: int) -> None:
    module = load_module(compiled / "families")
    decoded = np.load(compiled / "decoded.npz")
    number = SCHEMES.index(name)
    x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
    scheme = parse_scheme(name)
    assert scheme is not None
    limit = FLOAT_ERROR
    if scheme.integer_acts:
        limit = A8_ERROR * 127 / (2 ** (scheme.act_bits - 1) - 1)
    for bits in scheme.widths:
        wanted = x.astype(np.float64) @ decoded[f"{number}@{bits}"].T.astype(np.float64)
        error = run_layer(module, number, x, bits) - decoded[f"b{number}"] - wanted
        relative = np.sqrt((error**2).mean() / (wanted**2).mean())
        assert relative < limit, f"{name} at {bits} bits"


def test_manifest_names_every_scheme(compiled: Path) -> None:
    manifest = load_module(compiled / "families").manifest
    layers = {layer["name"]: layer for layer in manifest["layers"]}
    for i, name in enumerate(SCHEMES):
        layer = layers[f"n_m{i}"]
        assert layer["scheme"] == str(parse_scheme(name))
        assert 1 <= layer["bits_per_weight"] < 32  # tables weigh much in so small a layer
        for width in parse_scheme(name).widths:  # type: ignore[union-attr]
            mine = [k for k in layer["kernels"] if k["bits"] == width]
            assert mine[0]["m_min"] == 1 and mine[-1]["m_max"] == -1

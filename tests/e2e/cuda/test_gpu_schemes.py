"""Layers of every kind of scheme on a simulated GPU, against what torch simulates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.formats import FAMILIES, dequantize
from apq_tvm.formats.scheme import parse_scheme
from apq_tvm.module import load_module
from tests.onnx_models import build, save
from tests.simulated import limit, product, relative, rounds

N, K = 70, 336  # neither divides by a fragment, a unit of 32 or a group
INTEGERS = (
    "W1A8", "W1zA8g64", "W2A8g32", "W3zA8g64", "W4A8g32", "W4A8g128", "W4zA8g32", "W4A8tg64",
    "W4A4g32", "W5A8g128", "W6zA8", "W7A8g32", "W8A8", "W8zA8g256",
)  # fmt: skip
"""By ``mma``."""
OTHERS = ("W2A8g16", "W4A1g32", "W3A16g64", "float")
FAMILY_EXAMPLES = tuple(f.examples[0] for f in FAMILIES if f.name not in ("int", "anyprec"))
ROWS = (1, 2, 8, 9, 33)

SCHEMES = {
    "rtx-3090": (*INTEGERS, *OTHERS, *FAMILY_EXAMPLES),
    "rtx-2080": ("W4A8g32", "W8A8"),  # whose mma is another one: by the generic kernel
}


@pytest.fixture(
    scope="module", params=["rtx-3090", pytest.param("rtx-2080", marks=pytest.mark.all_cases)]
)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, schemes = tmp_path_factory.mktemp("schemes"), SCHEMES[request.param]
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
    plan = pipeline.plan(path, target=request.param, tensor_types=types)
    for i in range(len(schemes)):
        if name := plan.quantized.layers.get(f"n_m{i}"):
            weights[f"w{i}"] = dequantize(plan.quantized.tensors[name]).T
    np.savez(folder / "decoded.npz", schemes=np.array(schemes), **weights)
    pipeline.build(plan, folder / "mixed", images=Simulator(checked=True))
    return folder


@pytest.mark.parametrize("rows", ROWS)
def test_every_layer_computes_what_is_simulated(
    compiled: Path, rows: int, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = np.load(compiled / "decoded.npz")
    manifest = json.loads((compiled / "mixed" / "manifest.json").read_text())
    monkeypatch.setenv("CUSIM_SM", str(manifest["library"]["gpu"]["sm"]))
    module = load_module(compiled / "mixed")
    x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
    outputs = module.run(x=x)
    wrong = []
    layers = {layer["name"]: layer for layer in manifest["layers"]}
    for i, name in enumerate(decoded["schemes"]):
        scheme = parse_scheme(str(name))
        entries = layers[f"n_m{i}"]["kernels"]
        kernel = next(k["kernel"] for k in entries[::-1] if k["m_min"] <= rows)
        wanted = product(x, decoded[f"w{i}"].T, scheme, rounds(kernel))
        error = relative(outputs[f"y{i}"] - decoded[f"b{i}"], wanted)
        if not error < limit(scheme, rounds(kernel)):
            wrong.append((str(name), kernel, error))
    assert not wrong

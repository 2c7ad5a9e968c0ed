"""Every family of formats, from ONNX to a running module: here, with AVX2, on plain x86-64.

`make test` takes plain x86-64: the kernels of others run in tests/conformance, modules with them in
test_schemes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.formats import FAMILIES, dequantize, parse_scheme
from apq_tvm.module import load_module
from apq_tvm.types import Array
from tests.onnx_models import build, save
from tests.simulated import limit, product, relative, rounds

N, K = 70, 336  # no vector, unit, group or super-block divides both
FORMATS = {family.name: family.examples for family in FAMILIES if family.name != "int"}
ROWS = (1, 2, 3, 5, 17)


def schemes(every: bool) -> tuple[str, ...]:
    """Every format, or of every family the first.

    Every width has kernels of its own to build, all of which tests/conformance runs: of
    any-precision one format has all its widths here, the others two.
    """
    found = [name for names in FORMATS.values() for name in (names if every else names[:1])]
    whole = "anyprec3-8" if every else ""
    narrow = r"anyprec(\d)-\d", lambda widths: f"anyprec{widths[1]}-{int(widths[1]) + 1}"
    return tuple(name if name == whole else re.sub(*narrow, name) for name in found)


@dataclass(frozen=True)
class Compiled:
    """A module with a layer for every scheme, and the weights that it should compute with."""

    path: Path
    schemes: tuple[str, ...]
    decoded: dict[tuple[int, int], Array]
    biases: list[Array]


TARGETS = (*(pytest.param(t, marks=pytest.mark.all_cases) for t in ("host", "x86-64-v3")), "x86-64")


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    names = schemes(request.param == "host")
    folder = tmp_path_factory.mktemp(f"families_{request.param.replace('-', '_')}")
    rng = np.random.default_rng(1)
    weights, biases, nodes = {}, [], []
    for i in range(len(names)):
        weights[f"w{i}"] = rng.standard_normal((K, N)).astype(np.float32)
        biases.append(rng.standard_normal(N).astype(np.float32))
        nodes += [("MatMul", f"x w{i}", f"m{i}"), ("Add", f"m{i} b{i}", f"y{i}")]
    weights |= {f"b{i}": bias for i, bias in enumerate(biases)}
    outputs = " ".join(f"y{i}" for i in range(len(names)))
    path = save(build(nodes, {"x": ("float32", ["rows", K])}, outputs, weights), folder)
    types = {f"^n_m{i}$": scheme for i, scheme in enumerate(names)}
    plan = pipeline.plan(path, target=request.param, tensor_types=types)
    decoded = {}
    for i in range(len(names)):
        tensor = plan.quantized.tensors[plan.quantized.layers[f"n_m{i}"]]
        for bits in tensor.scheme.widths:
            decoded[i, bits] = dequantize(tensor, bits)
    pipeline.build(plan, folder / "families")
    return Compiled(folder / "families", names, decoded, biases)


def run_layer(module: ModuleType, number: int, x: Array, bits: int) -> Array:
    """The output of one layer, at a width where it has several."""
    if bits:
        module.set_precision(bits, layers=f"^n_m{number}$")
    y: Array = module.run(x=x)[f"y{number}"]
    return y


def test_layers_compute_what_is_simulated(compiled: Compiled) -> None:
    """Every scheme at every width, for several rows; what is wrong is listed."""
    module, wrong = load_module(compiled.path), []
    layers = {layer["name"]: layer for layer in module.manifest["layers"]}
    for (number, bits), weight in compiled.decoded.items():
        scheme = parse_scheme(compiled.schemes[number])
        kernels = layers[f"n_m{number}"]["kernels"]
        for rows in ROWS:
            x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
            (kernel,) = (k["kernel"] for k in kernels if reads(k, bits, rows))
            found = run_layer(module, number, x, bits) - compiled.biases[number]
            most = limit(scheme, rounds(kernel))
            error = relative(found, product(x, weight, scheme, rounds(kernel)))
            assert not relative(1.05 * found, found) < most
            if not error < most:
                wrong.append(f"{scheme} at {bits} bits with {rows} rows: {error}")
    assert not wrong, "\n".join(wrong)


def reads(kernel: dict[str, Any], bits: int, rows: int) -> bool:
    """Whether the manifest's entry is of a width and a number of rows."""
    most = kernel["m_max"] if kernel["m_max"] >= 0 else rows
    return kernel["bits"] == bits and bool(kernel["m_min"] <= rows <= most)


def test_manifest_names_every_scheme(compiled: Compiled) -> None:
    manifest = load_module(compiled.path).manifest
    layers = {layer["name"]: layer for layer in manifest["layers"]}
    for i, name in enumerate(compiled.schemes):
        layer = layers[f"n_m{i}"]
        assert layer["scheme"] == str(parse_scheme(name))
        assert 1 <= layer["bits_per_weight"] < 32  # tables weigh much in so small a layer
        for width in parse_scheme(name).widths:  # type: ignore[union-attr]
            mine = [k for k in layer["kernels"] if k["bits"] == width]
            assert mine[0]["m_min"] == 1 and mine[-1]["m_max"] == -1

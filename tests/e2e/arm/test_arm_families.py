"""Every family of formats, from ONNX to a module for Arm that runs under qemu."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.bench.module_program import ModuleProgram
from apq_tvm.formats import FAMILIES, dequantize, parse_scheme
from tests.e2e.arm.arm_module import needs_qemu
from tests.onnx_models import build, save
from tests.simulated import limit, product, relative, rounds

N, K = 36, 336  # no unit, group or super-block divides both
INTEGERS = ("W2A8g64", "W3zA8g32", "W4A8g32", "W4zA8tg64", "W8A8", "W4A4g32", "W4A16g32", "float")
# Every width of any-precision has kernels of its own to build: a narrow range will do.
FEW = {f.name: (f.examples[0], f.examples[-1]) for f in FAMILIES} | {
    "anyprec": ("anyprec2-4", "anyprec4-4s")
}
PAIRS = [FEW[family.name] for family in FAMILIES if family.name != "int"]
ROWS = (1, 5, 9)

AT_ONE_ROW = re.compile(r"gemv_W[24]A8_smmla_\w+m1$")
FOLDED = 0.02
"""One row's activations are folded (`apq_tvm.ops.activations.fold`): rounded otherwise than in the
simulation. Found: 0.011."""

pytestmark = needs_qemu


@pytest.mark.all_cases
@pytest.mark.parametrize("target,cpu", (("graviton3", "max"), ("cortex-a53", "cortex-a53")))
def test_layers_compute_what_is_simulated(target: str, cpu: str, tmp_path: Path) -> None:
    schemes = (*INTEGERS, *(name for pair in PAIRS for name in pair))
    if target != "graviton3":  # kernels of other thirds have tests of their own
        schemes = schemes[1::3]
    rng = np.random.default_rng(1)
    weights = {f"w{i}": rng.standard_normal((K, N)).astype(np.float32) for i in range(len(schemes))}
    nodes = [("MatMul", f"x w{i}", f"y{i}") for i in range(len(schemes))]
    outputs = " ".join(f"y{i}" for i in range(len(schemes)))
    model = build(nodes, {"x": ("float32", ["rows", K])}, outputs, weights)
    types = {f"^n_y{i}$": scheme for i, scheme in enumerate(schemes)}
    plan = pipeline.plan(save(model, tmp_path), target=target, tensor_types=types, search=False)
    pipeline.build(plan, tmp_path / "families")
    module = ModuleProgram(tmp_path / "families", tmp_path)
    manifest = json.loads((tmp_path / "families" / "manifest.json").read_text())
    layers = {layer["name"]: layer for layer in manifest["layers"]}
    for rows in ROWS:
        x = rng.standard_normal((rows, K)).astype(np.float32)
        results = module.run({"x": x}, cpu)
        for i, name in enumerate(schemes):
            scheme = parse_scheme(name)
            decoded = weights[f"w{i}"].T
            if scheme is not None:
                decoded = dequantize(plan.quantized.tensors[plan.quantized.layers[f"n_y{i}"]], 0)
            entries = layers[f"n_y{i}"]["kernels"]
            kernel = next(k["kernel"] for k in entries[::-1] if k["m_min"] <= rows)
            error = relative(results[f"y{i}"], product(x, decoded, scheme, rounds(kernel)))
            most = FOLDED if AT_ONE_ROW.match(kernel) else limit(scheme, rounds(kernel))
            assert error < most, f"{name} with {rows} rows: {error}"

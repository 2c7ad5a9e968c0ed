"""Products of bits: layers agree with a processor of the same codes, and where they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from apq_tvm import pipeline
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.module import load_module
from tests.onnx_models import build, save

FEW = ("W2A8", "W3zA8", "W4zA3tg128", "W1A1", "W4A1g128", "W2*A8g128")
REST = (
    "W1A8", "W2zA8g256", "W3A8g128", "W2A4g128", "W4A4", "W2A6tg256", "W2A2", "W2*A8", "W2*A4tg256"
)  # fmt: skip
BUILDS = (
    (33, 2600, FEW),
    pytest.param((33, 2600, REST), marks=pytest.mark.all_cases),
    pytest.param((70, 336, (*FEW, *REST)), marks=pytest.mark.all_cases),
)
"""N and K: neither divides by a fragment or a unit; of the first, warps have rounds of units."""
ROWS = (1, 2, 3, 4, 5, 8, 9, 17)


def layers(folder: Path, n: int, k: int, schemes: Sequence[str]) -> Path:
    rng = np.random.default_rng(k)
    weights = {f"w{i}": rng.standard_normal((k, n)) / k**0.5 for i in range(len(schemes))}
    nodes = [("MatMul", f"x w{i}", f"y{i}") for i in range(len(schemes))]
    outputs = " ".join(f"y{i}" for i in range(len(schemes)))
    arrays = {name: w.astype(np.float32) for name, w in weights.items()}
    return save(build(nodes, {"x": ("float32", ["rows", k])}, outputs, arrays), folder)


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def modules(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, Sequence[str]]:
    """The folder of both modules, K, and the layers' schemes."""
    folder = tmp_path_factory.mktemp("bits")
    onnx = layers(folder, *request.param)
    types = {f"^n_y{i}$": scheme for i, scheme in enumerate(request.param[2])}
    for target, images in (("rtx-3090", Simulator(checked=True)), ("host", None)):
        plan = pipeline.plan(onnx, target=target, tensor_types=types, search=False)
        if images is not None:
            for name, choices in plan.choices.items():
                assert choices[0].kernel.startswith("bitserial_"), (name, choices)
        pipeline.build(plan, folder / target.replace("-", "_"), images=images)
    return folder, *request.param[1:]


@pytest.mark.parametrize("rows", ROWS)
def test_layers_agree_with_the_processor(
    modules: tuple[Path, int, Sequence[str]], rows: int, gpu: None
) -> None:
    """Sums of integers are exact; what remains is the order in which groups are added."""
    folder, k, schemes = modules
    here, there = load_module(folder / "host"), load_module(folder / "rtx_3090")
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    x[0, : k // 2] = 0
    wanted, found = here.run(x=x), there.run(x=x)
    wrong = {}
    for i, scheme in enumerate(schemes):
        y = wanted[f"y{i}"]
        worst = np.abs(found[f"y{i}"] - y).max() / np.abs(y).max()
        if not worst < 1e-5:
            wrong[scheme] = worst
    assert not wrong


@pytest.mark.parametrize(
    "target, scheme, kernel, reason",
    [
        ("rtx-2080", "W2A8", "gemv_W2A8_imma16832_r16m8", "7.5 counts xor alone"),
        ("rtx-5090", "W2*A8", "gemv_W2starA8_imma16832_r48m8", "12.0 emulates it by int8"),
        ("jetson-agx-thor", "W2A2", "gemv_W2A8_imma16832_r16m8", "11.0 emulates it by int8"),
        ("h200", "W2A8g32", "gemv_W2A8_imma16832_r16m8", "idle with groups of 32"),
        ("h200", "W4A8", "gemv_W4A8_imma16832_r16m8", "4 planes of weights by 8 of x"),
        ("h200", "W2A8", "bitserial_W2A8_bmma168256_r16m1", "is for 4 planes of activations"),
        ("h200", "W3A8g128", "bitserial_W3A8_bmma168256_r16m1", "scaled too often"),
    ],
)
def test_where_bits_are_multiplied(
    target: str, scheme: str, kernel: str, reason: str, tmp_path: Path
) -> None:
    """An instruction that is emulated is never chosen, and layers say why."""
    weights = {"w": np.ones((512, 64), np.float32)}
    inputs = {"x": ("float32", ["m", 512])}
    onnx = save(build([("MatMul", "x w", "y")], inputs, "y", weights), tmp_path)
    plan = pipeline.plan(onnx, target=target, scheme=scheme, search=False)
    (choices,) = plan.choices.values()
    assert choices[0].kernel == kernel
    reasons = [why for name, why in choices[0].rejected if name.startswith("bitserial_")]
    assert any(reason in why for why in reasons), reasons


def test_rows_that_each_kernel_is_for(tmp_path: Path) -> None:
    """As `tuning_logs/h200/thresholds.json` has it: tiles of rows, then int8 where it is less."""
    weights = {"w": np.ones((512, 64), np.float32)}
    inputs = {"x": ("float32", ["m", 512])}
    onnx = save(build([("MatMul", "x w", "y")], inputs, "y", weights), tmp_path)
    int8 = [("gemv", 8), ("gemm", 32), ("gemm", -1)]
    wanted = {
        "W2A8": [("bitserial", 1), ("bitserial", 4), *int8],
        "W1A8": [("bitserial", 1), ("bitserial", 4), *int8],
        "W4A4": [("bitserial", 2), ("bitserial", 8), *int8[1:]],
        "W2A2": [("bitserial", 4), ("bitserial", -1)],
        "W2A8g128": [("bitserial", 1), *int8],
    }
    for scheme, ranges in wanted.items():
        plan = pipeline.plan(onnx, target="a100", scheme=scheme, search=False)
        (choices,) = plan.choices.values()
        assert [(c.kernel.partition("_")[0], c.m_max) for c in choices] == ranges, scheme

"""Layers of one x as one layer: which are joined, and that nothing else changes, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm import launches
from apq_tvm.module import load_module
from apq_tvm.pipeline import plan
from tests.onnx_models import build, save

RNG = np.random.default_rng(5)
X = {"x": ("float32", ["b", "t", 64])}
ROTATED: list[Any] = [
    ("MatMul", "x q", "q_flat"),
    ("Add", "q_flat q_bias", "q_sum"),
    ("MatMul", "x k", "k_sum"),
    ("MatMul", "x v", "v_sum"),
    *[("Reshape", f"{n}_sum heads", f"{n}_heads") for n in "qkv"],
    *[("Transpose", f"{n}_heads", f"{n}_first", {"perm": [0, 2, 1, 3]}) for n in "qkv"],
    *[("Mul", f"{n}_first turn", f"{n}_turned") for n in "qkv"],
    ("Concat", "q_turned k_turned v_turned", "y", {"axis": 1}),
]
GATED: list[Any] = [
    ("MatMul", "x gate", "gate_flat"),
    ("Sigmoid", "gate_flat", "bent"),
    ("Mul", "gate_flat bent", "silu"),
    ("MatMul", "x up", "up_flat"),
    ("Mul", "silu up_flat", "gated"),
    ("MatMul", "gated down", "z"),
]
FLAT: list[Any] = [
    ("Reshape", "x rows", "flat"),
    *[(op, read.replace("x ", "flat "), made) for op, read, made in GATED],
]
"""Rows are a product of two sizes, as where experts read tokens."""


def weight(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


WEIGHTS = {
    "q": weight(64, 64), "q_bias": weight(64), "k": weight(64, 32), "v": weight(64, 32),
    "heads": np.array([0, 0, -1, 16]), "turn": weight(16), "gate": weight(64, 96),
    "up": weight(64, 96), "down": weight(96, 64), "rows": np.array([-1, 64]),
}  # fmt: skip


def layers(path: Path, **options: Any) -> list[str]:
    """Names of the linear layers of a plan."""
    chosen = plan(path, target="znver4", scheme="W4A8g32", search=False, **options)
    model = chosen.quantized.model
    assert {name for node in model.nodes for name in node.inputs} >= set(model.weights)
    return [node.name for node in model.nodes if node.op == "apq.Linear"]


def model(folder: Path, nodes: list[Any], outputs: str) -> Path:
    words = {word for _, read, *_ in nodes for word in read.split()}
    used = {name: array for name, array in WEIGHTS.items() if name in words}
    return save(build(nodes, X, outputs, used, opset=18), folder)


def test_layers_that_are_read_element_by_element_become_one(tmp_path: Path) -> None:
    path = model(tmp_path, [*ROTATED, *GATED], "y z")
    assert layers(path) == ["n_q_flat+n_k_sum+n_v_sum", "n_gate_flat+n_up_flat", "n_z"]


@pytest.mark.parametrize(
    ("nodes", "outputs", "options"),
    [
        (GATED, "z up_flat", {}),
        ([*GATED[:-2], ("MatMul", "silu up_flat_", "z")], "z", {}),
        (GATED, "z", {"tensor_types": {"up": "W8A8g32"}}),
        (GATED, "z", {"tensor_types": {"up": "float"}}),
    ],
    ids=["an output", "a product reads it", "another scheme", "float"],
)
def test_others_stay_apart(
    tmp_path: Path, nodes: list[Any], outputs: str, options: dict[str, Any]
) -> None:
    if nodes is not GATED:
        nodes = [*GATED[:4], ("Transpose", "up_flat", "up_flat_", {"perm": [0, 2, 1]}), nodes[-1]]
    path = model(tmp_path, nodes, outputs)
    assert all("+" not in name for name in layers(path, **options))


@pytest.mark.parametrize(
    ("nodes", "outputs", "scheme"),
    [
        (ROTATED, "y", "W4A8g32"),
        (GATED, "z", "W4A8g32"),
        (GATED, "z", "W5mA8g32"),
        (FLAT, "z", "W4A8g32"),
        *[
            pytest.param(GATED, "z", scheme, marks=pytest.mark.all_cases)
            for scheme in ("W8A8", "W4zA8g32", "W3sA8", "nl4")
        ],
    ],
)
def test_results_are_those_of_layers_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[Any], outputs: str, scheme: str
) -> None:
    path = model(tmp_path, nodes, outputs)
    apq_tvm.compile(path, tmp_path / "joined", scheme=scheme)
    with monkeypatch.context() as patched:
        patched.setattr(launches, "join_one_input", lambda quantized: quantized)
        apq_tvm.compile(path, tmp_path / "apart", scheme=scheme)
    joined, apart = (load_module(tmp_path / name) for name in ("joined", "apart"))
    assert len(joined.manifest["layers"]) < len(apart.manifest["layers"])
    for shape in ((1, 1, 64), (2, 3, 64), (1, 40, 64)):
        x = RNG.standard_normal(shape).astype(np.float32)
        got, wanted = joined.run(x=x), apart.run(x=x)
        np.testing.assert_array_equal(got[outputs], wanted[outputs])

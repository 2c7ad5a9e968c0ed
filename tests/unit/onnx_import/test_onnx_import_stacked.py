"""A MatMul with a stack of constant matrices becomes layers, or says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, check, ops, rand, save

from apq_tvm.onnx_import import import_onnx
from apq_tvm.onnx_import.passes.stacked import MOST_LAYERS
from apq_tvm.quantizers import quantize

SIZES = ({"b": 2, "m": 3}, {"b": 1, "m": 1})


@pytest.mark.parametrize(
    ("shape", "stack", "layers"),
    [
        ([4, "m", 32], (4, 32, 20), 4),
        (["b", 4, "m", 32], (4, 32, 20), 4),
        ([4, "b", "m", 32], (4, 1, 32, 20), 4),
        (["b", 2, 3, "m", 32], (2, 3, 32, 20), 6),
        (["m", 32], (4, 32, 20), 1),
        ([32], (4, 32, 20), 1),
        (["b", 1, "m", 32], (4, 32, 20), 1),
        (["m", 32], (2, 3, 32, 20), 1),
        ([3, "m", 32], (2, 3, 32, 20), 3),
        (["b", "m", 32], (2, 1, 3, 32, 20), 3),
    ],
)
def test_stacks_become_layers(
    tmp_path: Path, shape: list[Any], stack: tuple[int, ...], layers: int
) -> None:
    inputs = {"x": ("float32", [3 if d == "b" and stack[1] == 1 else d for d in shape])}
    path = save(build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(*stack)}), tmp_path)
    model = check(path, *SIZES)
    assert ops(model)["apq.Linear"] == layers
    assert not ops(model)["MatMul"]


@pytest.mark.parametrize("shape", [[32], [32, "m"], [4, 32, "m"], ["b", 4, 32, "m"]])
def test_stacks_on_the_left(tmp_path: Path, shape: list[Any]) -> None:
    inputs = {"x": ("float32", shape)}
    path = save(build([("MatMul", "w x", "y")], inputs, "y", {"w": rand(4, 20, 32)}), tmp_path)
    model = check(path, *SIZES)
    assert ops(model)["apq.Linear"] == (4 if 4 in shape else 1)


def test_layers_of_a_stack_are_named_by_their_places(tmp_path: Path) -> None:
    inputs = {"x": ("float32", [2, 2, "m", 32])}
    path = save(build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(2, 2, 32, 20)}), tmp_path)
    layers = [node.name for node in import_onnx(path).nodes if node.op == "apq.Linear"]
    assert layers == ["n_y.0.0", "n_y.0.1", "n_y.1.0", "n_y.1.1"]


@pytest.mark.parametrize(
    ("shape", "stack", "why"),
    [
        ([4, "m", 8], (4, 8, 20), "K=8 is below 16"),
        ([MOST_LAYERS + 1, "m", 16], (MOST_LAYERS + 1, 16, 4), "more than"),
        (["b", 1, 1, "m", 16], (2, 3, 16, 4), "several times"),
    ],
)
def test_stacks_that_stay_say_why(
    tmp_path: Path, shape: list[Any], stack: tuple[int, ...], why: str
) -> None:
    inputs = {"x": ("float32", shape)}
    path = save(build([("MatMul", "x w", "y")], inputs, "y", {"w": rand(*stack)}), tmp_path)
    model = check(path, *SIZES)
    assert ops(model) == {"MatMul": 1}
    assert why in model.notes["n_y"]


@pytest.mark.parametrize("shape", [[3, "m", 32], ["m", 32]])
@pytest.mark.parametrize("each", [False, True])
def test_codes_of_a_stack_are_kept(tmp_path: Path, shape: list[Any], each: bool) -> None:
    codes = np.arange(3 * 32 * 20, dtype=np.int64).reshape(3, 32, 20) * 7 % 255 - 127
    scale = np.asarray([0.5, 0.25, 0.125] if each else 0.5, np.float32)
    weights = {"q": codes.astype(np.int8), "s": scale, "z": np.zeros_like(scale, np.int8)}
    nodes = [("DequantizeLinear", "q s z", "w", {"axis": 0}), ("MatMul", "x w", "y")]
    path = save(build(nodes, {"x": ("float32", shape)}, "y", weights), tmp_path)
    tensors = list(quantize(import_onnx(path), "W8A8").tensors.values())
    found = np.concatenate([tensor.codes.astype(int) - 128 for tensor in tensors])
    np.testing.assert_array_equal(found, codes.swapaxes(1, 2).reshape(60, 32))
    scales = np.concatenate([tensor.scales for tensor in tensors]).reshape(3, 20)
    np.testing.assert_array_equal(scales, np.broadcast_to(scale.reshape(-1, 1), (3, 20)))

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

Array = np.ndarray[Any, Any]
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


def test_a_left_stack_that_stays_is_stored_once(tmp_path: Path) -> None:
    inputs = {"x": ("float32", [4, 8, "m"])}
    path = save(build([("MatMul", "w x", "y")], inputs, "y", {"w": rand(4, 20, 8)}), tmp_path)
    model = check(path, *SIZES)
    assert "K=8 is below 16" in model.notes["n_y"]
    assert list(model.weights) == ["w"]


CODES = (np.arange(3 * 32 * 20, dtype=np.int64).reshape(3, 32, 20) * 7 % 255 - 127).astype(np.int8)
COLUMNS = np.linspace(0.1, 2, 20).astype(np.float16).astype(np.float32)
BLOCKS = np.linspace(0.1, 2, 3 * 2 * 20).astype(np.float16).astype(np.float32).reshape(3, 2, 20)


@pytest.mark.parametrize(
    ("scale", "axis", "block"),
    [
        (np.float32(0.5), 0, 0),
        (np.asarray([0.5, 0.25, 0.125], np.float32), 0, 0),
        (COLUMNS, 2, 0),
        (COLUMNS, -1, 0),
        (BLOCKS, 1, 16),
    ],
    ids=["all", "matrix", "column", "last", "block"],
)
@pytest.mark.parametrize("form", ["each", "one x", "turned", "left"])
def test_codes_of_a_stack_are_kept(
    tmp_path: Path, scale: Array, axis: int, block: int, form: str
) -> None:
    """However they are scaled, and wherever the stack stands."""
    swap = {"perm": (0, 2, 1)}
    each = scale.reshape(-1, 1, 1) if axis == 0 else scale
    each = np.repeat(each, block, axis=1) if block else each
    weights = {"q": CODES, "s": scale, "z": np.zeros_like(scale, np.int8)}
    attrs = {"axis": axis, "block_size": block}
    nodes: list[Any] = [("DequantizeLinear", "q s z", "w", attrs), ("MatMul", "x w", "y")]
    if form == "turned":  # stored [E, N, K]
        attrs["axis"] = (0, 2, 1)[axis]
        weights = {k: v.swapaxes(1, 2) if v.ndim == 3 else v for k, v in weights.items()}
        nodes[:1] = [("DequantizeLinear", "q s z", "t", attrs), ("Transpose", "t", "w", swap)]
    elif form == "left":
        turned = [("Transpose", old, new, swap) for old, new in ("wl", "xr", "cy")]
        nodes[1:] = [*turned[:2], ("MatMul", "l r", "c"), turned[2]]
    shape: list[Any] = ["m", 32] if form == "one x" else [3, "m", 32]
    model = build(nodes, {"x": ("float32", shape)}, "y", weights, opset=21)
    quantized = quantize(import_onnx(save(model, tmp_path)), "W8A8")
    tensors = list(quantized.tensors.values())
    assert len(tensors) == (1 if form == "one x" else 3)
    assert all("codes of the file" in note for note in quantized.notes.values())
    found = np.concatenate([tensor.codes.astype(int) - 128 for tensor in tensors])
    np.testing.assert_array_equal(found, CODES.swapaxes(1, 2).reshape(60, 32))
    scales = np.concatenate([np.repeat(t.scales, 32 // t.scales.shape[1], 1) for t in tensors])
    wanted = np.broadcast_to(each, CODES.shape).swapaxes(1, 2)
    np.testing.assert_array_equal(scales, wanted.reshape(60, 32))


def test_codes_that_no_format_says_leave_a_stack_float(tmp_path: Path) -> None:
    weights = {"q": CODES, "s": np.linspace(0.1, 2, 32).astype(np.float32)}
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 1}), ("MatMul", "x w", "y")]
    path = save(build(nodes, {"x": ("float32", [3, "m", 32])}, "y", weights), tmp_path)
    quantized = quantize(import_onnx(path), "W8A8")
    assert not quantized.tensors
    assert all("groups of 1 along K=32" in note for note in quantized.notes.values())


def test_codes_of_a_matrix_of_three_axes_are_kept(tmp_path: Path) -> None:
    weights = {"q": CODES[:1], "s": COLUMNS}
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 2}), ("MatMul", "x w", "y")]
    path = save(build(nodes, {"x": ("float32", [3, "m", 32])}, "y", weights), tmp_path)
    (tensor,) = quantize(import_onnx(path), "W8A8").tensors.values()
    np.testing.assert_array_equal(tensor.codes.astype(int) - 128, CODES[0].T)


def test_scales_along_another_axis_of_a_convolution(tmp_path: Path) -> None:
    """Of a stack of matrices they would be kept; its weight is none."""
    weights = {"q": CODES[:, :, :3], "s": np.linspace(0.1, 2, 32).astype(np.float32)}
    nodes = [("DequantizeLinear", "q s", "w", {"axis": 1}), ("Conv", "x w", "y")]
    check(save(build(nodes, {"x": ("float32", [1, 32, 9])}, "y", weights), tmp_path), {})

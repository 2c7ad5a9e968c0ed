"""Safetensors of AutoGPTQ and AWQ: the codes of the model they are of, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from apq_tvm.codes import keep_codes
from apq_tvm.codes.match import read_codes
from apq_tvm.errors import BadInput
from apq_tvm.formats import dequantize
from apq_tvm.onnx_import import import_onnx
from apq_tvm.types import ImportedModel
from tests.onnx_models import build

N, K, SIZE = 64, 128, 32
NAME = "model.layers.0.mlp.up_proj"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Any, bits: int) -> Any:
    """Codes of the last axis as int32 words, the first in the lowest bits."""
    text = codes.astype(np.uint8)[..., None]
    digits = np.unpackbits(text, axis=-1, bitorder="little")[..., :bits]
    packed = np.packbits(digits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.int32)


class Case:
    """A matrix, and the arrays that say it."""

    def __init__(self, bits: int, awq: bool = False, less: int = 1, middle: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.codes = rng.integers(0, 1 << bits, (N, K))
        self.zeros = rng.integers(1, 1 << bits, (N, K // SIZE))
        if middle:
            self.zeros[:] = 1 << (bits - 1)
        self.scales = rng.uniform(0.01, 0.02, (N, K // SIZE)).astype(np.float16)
        spread = [np.repeat(a, SIZE, 1) for a in (self.zeros, self.scales.astype(np.float32))]
        self.weight = ((self.codes - spread[0]) * spread[1]).astype(np.float32)
        zeros = self.zeros.T - (0 if awq else less)
        if awq:
            codes = self.codes.T.reshape(K, -1, 8)[..., list(ORDER)].reshape(K, N)
            zeros = zeros.reshape(len(zeros), -1, 8)[..., list(ORDER)].reshape(zeros.shape)
            qweight = words(codes, bits)
        else:
            qweight = np.ascontiguousarray(words(self.codes, bits).T)
        self.arrays = {
            f"{NAME}.qweight": qweight,
            f"{NAME}.qzeros": words(np.ascontiguousarray(zeros), bits),
            f"{NAME}.scales": np.ascontiguousarray(self.scales.T),
        }
        if not awq:
            self.arrays[f"{NAME}.g_idx"] = (np.arange(K) // SIZE).astype(np.int32)

    def model(self, folder: Path) -> ImportedModel:
        inputs = {"x": ("float32", ["rows", K])}
        weight = {f"{NAME}.weight": np.ascontiguousarray(self.weight.T)}
        made = build([("MatMul", f"x {NAME}.weight", "y")], inputs, "y", weight)
        onnx.save(made, folder / "one.onnx")
        return import_onnx(folder / "one.onnx")


@pytest.mark.parametrize(
    "case",
    [(4, False, 1), (4, False, 0), (2, False, 1), (3, False, 1), (8, False, 1), (4, True, 0)],
)
def test_codes_are_kept(case: tuple[int, bool, int], tmp_path: Path) -> None:
    made = Case(*case)
    save_file(made.arrays, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path):
        (tensor,) = keep_codes(made.model(tmp_path), path).model.quantized.values()
        assert str(tensor.scheme) == f"W{case[0]}zA8g32"
        np.testing.assert_array_equal(tensor.codes, made.codes)
        assert tensor.zeros is not None
        np.testing.assert_array_equal(tensor.zeros, made.zeros)
        np.testing.assert_array_equal(dequantize(tensor), made.weight)


def test_symmetric_codes_need_no_zero_points(tmp_path: Path) -> None:
    made = Case(4, middle=True)
    save_file(made.arrays, tmp_path / "model.safetensors")
    (tensor,) = keep_codes(made.model(tmp_path), tmp_path).model.quantized.values()
    assert str(tensor.scheme) == "W4A8g32" and tensor.zeros is None
    np.testing.assert_array_equal(dequantize(tensor), made.weight)


def test_groups_out_of_order_sort_the_columns(tmp_path: Path) -> None:
    """``desc_act``: the module gathers its input, and means what the file means."""
    made = Case(4)
    groups = np.random.default_rng(1).permutation(K) // SIZE
    made.arrays[f"{NAME}.g_idx"] = groups.astype(np.int32)
    spread = [a[:, groups].astype(np.float32) for a in (made.zeros, made.scales)]
    made.weight = ((made.codes - spread[0]) * spread[1]).astype(np.float32)
    save_file(made.arrays, tmp_path / "model.safetensors")
    model = keep_codes(made.model(tmp_path), tmp_path / "model.safetensors").model
    gather, layer = model.nodes
    assert (gather.op, layer.op, layer.inputs[0]) == ("Gather", "apq.Linear", gather.outputs[0])
    order = model.weights[gather.inputs[1]]
    (tensor,) = model.quantized.values()
    np.testing.assert_array_equal(tensor.codes, made.codes[:, order])
    np.testing.assert_array_equal(dequantize(tensor), made.weight[:, order])


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (np.zeros(K, np.int32), "g_idx does not put 32 columns"),
        (np.arange(K - 1, dtype=np.int32), r"g_idx is int32 \[127\]"),
        (np.zeros(K, np.float32), "g_idx is float32"),
    ],
)
def test_groups_that_are_none_are_refused(groups: Any, match: str, tmp_path: Path) -> None:
    made = Case(4)
    made.arrays[f"{NAME}.g_idx"] = groups
    save_file(made.arrays, tmp_path / "model.safetensors")
    model = made.model(tmp_path)
    with pytest.raises(BadInput, match=match):
        keep_codes(model, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "array", "match"),
    [
        ("qzeros", np.zeros((3, 5), np.int32), "arrays contradict each other"),
        ("scales", np.ones((4, N), np.float32), "scales are F32"),
        ("qweight", np.zeros((16, N), np.float32), "F32.*matrix of int32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    part: str, array: Any, match: str, tmp_path: Path
) -> None:
    made = Case(4)
    made.arrays[f"{NAME}.{part}"] = array
    save_file(made.arrays, tmp_path / "model.safetensors")
    model = made.model(tmp_path)
    with pytest.raises(BadInput, match=match):
        keep_codes(model, tmp_path / "model.safetensors")


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no \*\.safetensors"):
        read_codes(tmp_path)
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    save_file(Case(4).arrays, away / "model.safetensors")
    os.symlink(away / "model.safetensors", home / "model.safetensors")
    with pytest.raises(BadInput, match=r"is a link to .*, out of its folder"):
        read_codes(home)
    save_file({"a.weight": np.ones(3, np.float32)}, away / "model.safetensors")
    with pytest.raises(BadInput, match="no file of AutoGPTQ or AWQ"):
        read_codes(away)

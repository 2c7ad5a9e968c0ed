"""Loops that collect what they cut to a size: as torchvision's Mask R-CNN pastes its masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx_models import build, protos, rand, run_onnx, save

import apq_tvm
from apq_tvm.module import load_module


def body() -> Any:
    """A row of so many numbers, zeros behind them, cut to 8: appended to a state, and collected."""
    steps: list[Any] = [
        ("Gather", "sizes i", "n0"),
        ("Unsqueeze", "n0 zero", "n"),
        ("Slice", "x zero n zero", "part"),
        ("Sub", "total n", "left"),
        ("ConstantOfShape", "left", "zeros"),
        ("Concat", "part zeros", "padded", {"axis": 0}),
        ("Slice", "padded zero eight zero", "row"),
        ("Unsqueeze", "row zero", "entry"),
        ("Cast", "rows", "same", {"to": 1}),
        ("Concat", "same entry", "more", {"axis": 0}),
        ("Mul", "row two", "doubled"),
        ("Identity", "going", "on"),
    ]
    inputs = [("i", 7, []), ("going", 9, []), ("rows", 1, None)]
    outputs = [("on", 9, []), ("more", 1, None), ("doubled", 1, None)]
    given, made = (
        [helper.make_tensor_value_info(*each) for each in some] for some in (inputs, outputs)
    )
    return helper.make_graph(protos(steps), "round", given, made)


def test_rows_of_one_size(tmp_path: Path) -> None:
    nodes = [
        ("Size", "sizes", "count"),
        ("Loop", "count yes none", "rows_end doubled_all", {"body": body()}),
    ]
    inputs: dict[str, Any] = {"sizes": ("int64", ["k"]), "total": ("int64", [1])}
    inputs["x"] = ("float32", [8])
    weights: dict[str, Any] = {"yes": np.bool_(True), "none": np.zeros((0, 8), np.float32)}
    weights |= {"zero": np.array([0]), "eight": np.array([8]), "two": np.float32(2)}
    path = save(build(nodes, inputs, "rows_end doubled_all", weights, opset=17), tmp_path)
    apq_tvm.compile(path, tmp_path / "module", scheme="float")
    module = load_module(tmp_path / "module")
    for total in (8, 11):
        feeds = {"sizes": np.array([3, 0, 8, 5]), "total": np.array([total]), "x": rand(8)}
        got, want = module.run(feeds), run_onnx(path, feeds)
        for name, expected in want.items():
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
    with pytest.raises(module.InputError, match="do not fit"):
        module.run({**feeds, "total": np.array([7]), "sizes": np.array([3, 0])})

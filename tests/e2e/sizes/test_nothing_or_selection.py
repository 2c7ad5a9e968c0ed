"""Branches that select by data, or give nothing: as torchvision's detectors are exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx_models import build, protos, rand, run_onnx, save

import apq_tvm
from apq_tvm.module import load_module

CLASSES = 12
NOTHING = numpy_helper.from_array(np.zeros(0, np.int64), "nothing")


def branches(swapped: bool) -> dict[str, Any]:
    """Suppress overlapping boxes, each class apart; nothing where there are none."""
    constant = helper.make_node("Constant", [], ["nothing"], value=NOTHING)
    output = [helper.make_tensor_value_info(name, 7, None) for name in ("nothing", "kept")]
    empty = helper.make_graph([constant], "empty", [], output[:1])
    steps: list[Any] = [
        ("ReduceMax", "boxes", "far", {"keepdims": 0}),
        ("Add", "far oneF", "step"),
        ("Cast", "classes", "offsets", {"to": 1}),
        ("Mul", "offsets step", "moved"),
        ("Unsqueeze", "moved last", "column"),
        ("Add", "boxes column", "apart"),
        ("Unsqueeze", "apart zero", "corners"),
        ("Unsqueeze", "scores zero2", "by_class"),
        ("NonMaxSuppression", "corners by_class most overlap", "rows"),
        ("Gather", "rows two", "ids", {"axis": 1}),
        ("Squeeze", "ids last", "kept"),
    ]
    some = helper.make_graph(protos(steps), "some", [], output[1:])
    then, other = (some, empty) if swapped else (empty, some)
    return {"then_branch": then, "else_branch": other}


@pytest.mark.parametrize("swapped", [False, True])
def test_boxes_of_many_classes(tmp_path: Path, swapped: bool) -> None:
    """Twelve selections by score, one behind the other; what overlaps goes, if any is left."""
    picks: list[Any] = []
    for i in range(CLASSES):
        picks += [
            ("Gather", f"given c{i}", f"s{i}", {"axis": 1}),
            ("Greater", f"s{i} least", f"b{i}"),
            ("NonZero", f"b{i}", f"r{i}"),
            ("Reshape", f"r{i} flat", f"n{i}"),
            ("Gather", f"s{i} n{i}", f"k{i}"),
            ("Gather", f"places n{i}", f"p{i}"),
            ("Mul", f"n{i} zeros", f"z{i}"),
            ("Add", f"z{i} c{i}", f"l{i}"),
        ]
    every = range(CLASSES)
    nodes = [
        *picks,
        ("Concat", " ".join(f"p{i}" for i in every), "boxes", {"axis": 0}),
        ("Concat", " ".join(f"k{i}" for i in every), "scores", {"axis": 0}),
        ("Concat", " ".join(f"l{i}" for i in every), "classes", {"axis": 0}),
        ("Size", "scores", "count"),
        ("Greater" if swapped else "Equal", "count none", "empty"),
        ("If", "empty", "kept", branches(swapped)),
        ("Gather", "boxes kept", "y"),
        ("Gather", "classes kept", "label"),
    ]
    weights: dict[str, Any] = {f"c{i}": np.int64(i) for i in every}
    weights |= {"least": np.float32(0.9), "flat": np.array([-1]), "zeros": np.int64(0)}
    weights |= {"none": np.int64(0), "oneF": np.float32(1), "last": np.array([1])}
    weights |= {"zero": np.array([0]), "zero2": np.array([0, 1]), "most": np.array([1000])}
    weights |= {"overlap": np.array([0.3], np.float32), "two": np.array([2])}
    inputs = {"given": ("float32", [40, CLASSES]), "places": ("float32", [40, 4])}
    path = save(build(nodes, inputs, "y label kept", weights, opset=17), tmp_path)
    apq_tvm.compile(path, tmp_path / "module", scheme="float")
    module = load_module(tmp_path / "module")
    corner = np.abs(rand(40, 2)) * 20
    places = np.concatenate([corner, corner + 1 + np.abs(rand(40, 2, seed=1)) * 9], 1)
    given = np.random.default_rng(2).random((40, CLASSES)).astype(np.float32)
    for scores in (given, given * 0.5, given):
        feeds = {"given": scores, "places": places.astype(np.float32)}
        got, want = module.run(feeds), run_onnx(path, feeds)
        assert (len(want["y"]) > 0) == (scores is given)
        for name, expected in want.items():
            np.testing.assert_array_equal(got[name], expected, err_msg=name)

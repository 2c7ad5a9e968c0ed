"""Along which dimension a run may be cut into parts: what is proved, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, rand, save

from apq_tvm.onnx_import import import_onnx
from apq_tvm.types import ImportedModel

IMAGE = {"x": ("float32", ["b", 8, 6, 6])}
CONV = ("Conv", "x w", "c", {"pads": [1] * 4})
WEIGHTS = {
    "w": rand(8, 8, 3, 3),
    "m": rand(288, 5),
    "flat": np.array([0, -1]),
    "pairs": np.array([-1, 2, 288]),
    "twos": np.array([-1, 2, 8, 6, 6]),
    "zero": np.array([0]),
    "one": np.array([1]),
    "minus": np.array([-1]),
    "least": np.array([-(2**31)]),
}

APART: dict[str, list[Any]] = {
    "gate": [
        ("GlobalAveragePool", "c", "p"),
        ("Sigmoid", "p", "s"),
        ("Mul", "c s", "y"),
    ],
    "classify": [("Reshape", "c flat", "r"), ("MatMul", "r m", "z"), ("Softmax", "z", "y")],
    "turned": [("Transpose", "c", "t", {"perm": [1, 2, 0, 3]}), ("Relu", "t", "u"),
               ("Transpose", "u", "y", {"perm": [2, 0, 1, 3]})],
    "products": [("Transpose", "c", "t", {"perm": [0, 1, 3, 2]}), ("MatMul", "c t", "y")],
    "joined": [("Concat", "c x", "y", {"axis": 1})],
    "cut": [("Slice", "c zero one one", "y")],
}  # fmt: skip

MIXED: dict[str, list[Any]] = {
    "mean of all": [("ReduceMean", "c zero", "p"), ("Sub", "c p", "y")],
    "softmax": [("Softmax", "c", "y", {"axis": 0})],
    "best of all": [("ArgMax", "c", "i", {"axis": 0}), ("Cast", "i", "f", {"to": 1}),
                    ("Add", "c f", "y")],
    "one scale for all": [("DynamicQuantizeLinear", "c", "q s z"),
                          ("DequantizeLinear", "q s z", "y")],
    "products of images": [("Reshape", "c flat", "r"), ("Transpose", "r", "t"),
                           ("MatMul", "r t", "p"), ("MatMul", "p r", "y")],
    "two a row": [("Reshape", "c pairs", "y")],
    "turned round": [("Slice", "c minus least zero minus", "y")],
    "half": [("Split", "c", "y z", {"axis": 0, "num_outputs": 2})],
    "joined": [("Concat", "c x", "j", {"axis": 0}), ("Reshape", "j twos", "y")],
    "counted": [("Shape", "c", "s", {"end": 1}), ("Cast", "s", "n", {"to": 1}),
                ("Div", "c n", "y")],
    "summed": [("CumSum", "c zero_", "y")],
    "behind": [("Transpose", "c", "y", {"perm": [1, 0, 2, 3]})],
    "trained": [("BatchNormalization", "c g g g g", "y m_ v_", {"training_mode": 1})],
}  # fmt: skip
MORE = {"zero_": np.array(0), "g": rand(8) ** 2}


def imported(tmp_path: Path, nodes: Any, inputs: Any = IMAGE, outputs: str = "y") -> ImportedModel:
    weights = {**WEIGHTS, **MORE}
    used = {word for _, read, *_ in nodes for word in read.split()}
    mine = {name: array for name, array in weights.items() if name in used}
    return import_onnx(save(build(nodes, inputs, outputs, mine, opset=18), tmp_path))


@pytest.mark.parametrize("name", APART)
def test_images_that_stay_apart(tmp_path: Path, name: str) -> None:
    model = imported(tmp_path, [CONV, *APART[name]])
    assert (model.batch, model.mixed) == ("b", "")


@pytest.mark.parametrize("name", MIXED)
def test_images_that_are_mixed(tmp_path: Path, name: str) -> None:
    """Each has a reason, which explain shows."""
    model = imported(tmp_path, [CONV, *MIXED[name]])
    assert model.batch == "" and model.mixed


def attends(tmp_path: Path, mask: str) -> ImportedModel:
    """Words looked up, and each a mean of those that a mask [b, 1, t] shows, or one [b, b, t]."""
    inputs = {"ids": ("int64", ["b", "t"]), "mask": ("float32", ["b", "n", "t"])}
    nodes: list[Any] = [
        ("Gather", "table ids", "x"),
        ("Transpose", "x", "keys", {"perm": [0, 2, 1]}),
        ("MatMul", "x keys", "products"),
        ("Add", f"products {mask}", "scores"),
        ("Softmax", "scores", "weights", {"axis": -1}),
        ("MatMul", "weights x", "y"),
    ]
    if mask == "turned":
        nodes.insert(0, ("Transpose", "mask", "turned", {"perm": [1, 0, 2]}))
    weights = {"table": rand(50, 16)}
    return import_onnx(save(build(nodes, inputs, "y", weights, opset=18), tmp_path))


def test_sentences_stay_apart(tmp_path: Path) -> None:
    """Attention of encoders, unless what masks a sentence is another's."""
    assert attends(tmp_path, "mask").batch == "b"
    assert attends(tmp_path, "turned").mixed


def test_a_batch_is_the_first_axis_of_everything_and_may_be_1(tmp_path: Path) -> None:
    """Neither of two inputs alone, nor one of a least size, nor a net without windows."""
    two = {**IMAGE, "u": ("float32", ["n", 8, 6, 6])}
    assert "not led by 'b'" in imported(tmp_path, [CONV, ("Relu", "u", "v")], two, "c v").mixed
    held = {**IMAGE, "u": ("float32", [8, "b"])}
    assert "'u'" in imported(tmp_path, [CONV, ("Relu", "u", "v")], held, "c").mixed
    path = save(build([CONV], IMAGE, "c", {"w": WEIGHTS["w"]}), tmp_path)
    assert "bounded" in import_onnx(path, {"b": (4, 8)}).mixed
    assert "windows" in imported(tmp_path, [("Relu", "x", "y")]).mixed
    fixed = {"x": ("float32", [4, 8, 6, 6])}
    assert "unknown size" in imported(tmp_path, [CONV], fixed, "c").mixed

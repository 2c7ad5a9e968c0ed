"""Images of any size, channels first: pooling, resizing, padding, slices, and sizes made of sizes.

One model of many small graphs, run at two sizes against ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import apq_tvm
from apq_tvm.errors import BadInput
from apq_tvm.module import load_module
from tests.onnx_models import build, save, session_of

RNG = np.random.default_rng(0)
POOLS = {
    "max": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max_ceil": ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 3], "ceil_mode": 1}),
    "max_apart": ("MaxPool", {"kernel_shape": [3, 3], "dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    "max_same": ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "max_lower": ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "mean": ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 1]}),
    "mean_all": (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    "mean_same": ("AveragePool", {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}),
    "lp": ("LpPool", {"kernel_shape": [2, 2], "strides": [2, 2], "p": 2}),
    "whole": ("GlobalMaxPool", {}),
}
WAY = "coordinate_transformation_mode"
RESIZES = {
    "twice": ([1, 1, 2, 2], {WAY: "asymmetric", "nearest_mode": "floor"}),
    "less": ([1, 1, 0.6, 0.5], {"nearest_mode": "round_prefer_ceil"}),
    "linear": ([1, 1, 1.5, 2], {"mode": "linear"}),
    "torch": ([1, 1, 2, 0.5], {"mode": "linear", WAY: "pytorch_half_pixel"}),
    "corners": ([1, 1, 2, 3], {"mode": "linear", WAY: "align_corners"}),
    "cubic": ([1, 1, 2, 1.5], {"mode": "cubic"}),
    "inside": ([1, 1, 0.7, 2], {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}),
}
PADS = {"constant": [0, 0, 2, -1, 0, 0, 1, 3], "edge": [0, 0, 2, 1, 0, 1, 1, 3]}
PADS |= {"reflect": [0, 0, 2, 1, 0, 0, 1, 3], "wrap": [0, 0, 2, 1, 0, 0, 1, 3]}


class _Model:
    """Nodes, weights and outputs as they come."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.outputs: list[str] = []

    def add(self, op: str, inputs: str, out: str, keep: bool = True, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs.split(" "), [out], **attrs))
        self.outputs += [out] if keep else []
        return out

    def weight(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        self.weights[name] = np.asarray(value, dtype)
        return name

    def save(self, path: Path, opset: int = 19) -> Path:
        image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "height", "width"])
        outs = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in self.outputs]
        weights = [numpy_helper.from_array(w, n) for n, w in self.weights.items()]
        graph = helper.make_graph(self.nodes, "sizes", [image], outs, weights)
        opsets = [helper.make_opsetid("", opset)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
        return path


def _every_operator() -> _Model:
    model = _Model()
    for name, (op, attrs) in POOLS.items():
        model.add(op, "x", f"pool_{name}", **attrs)
    for name, (scales, attrs) in RESIZES.items():
        model.weight(f"scales_{name}", scales, np.float32)
        model.add("Resize", f"x  scales_{name}", f"resize_{name}", **attrs)
    for name, pads in PADS.items():
        model.add("Pad", f"x {model.weight(f'pads_{name}', pads)}", f"pad_{name}", mode=name)
    for name, value in {"from": [-1], "to": [-(2**31)], "axis": [3], "step": [-2]}.items():
        model.weight(name, value)
    model.add("Slice", "x from to axis step", "back")
    _computed_sizes(model)
    _rolled(model)
    _led(model)
    return model


def _rolled(model: _Model) -> None:
    """torch's roll, then positions by the width of that: a sum of two derived sizes."""
    for name, value in {"begin": [0], "last": [-1], "threes": [3], "none": 0, "unit": 1}.items():
        model.weight(name, value)
    model.add("Gather", "shape threes", "wide", keep=False)
    model.add("Mod", "last wide", "at", keep=False)
    model.add("Slice", "x begin at axis", "left", keep=False)
    model.add("Slice", "x at wide axis", "right", keep=False)
    model.add("Concat", "right left", "rolled", axis=3)
    model.add("Shape", "rolled", "rolled_shape", keep=False)
    model.add("Gather", "rolled_shape three", "width", keep=False)
    model.add("Range", "none width unit", "places", keep=False)
    model.add("Unsqueeze", "places second", "down", keep=False)
    model.add("Add", f"down {model.weight('four', [0, 1, 2, 3])}", "windows", keep=False)
    model.add("Cast", "windows", "window_places", to=TensorProto.FLOAT)


def _led(model: _Model) -> None:
    """A class token before the others, a residual sum, and the token taken out of it."""
    token = model.weight("token", [[1], [2], [3]], np.float32)
    model.add("Concat", f"{token} column", "led", keep=False, axis=0)
    model.add("Cos", "led", "turned", keep=False)
    model.add("Add", "led turned", "summed", keep=False)
    model.add("Gather", "summed none", "taken", axis=0)


def _computed_sizes(model: _Model) -> None:
    """What exporters write: sizes through floats, a grid of positions, parts of an axis."""
    model.add("Shape", "x", "shape", keep=False)
    for name, index in {"two": 2, "three": 3}.items():
        model.weight(name, index)
    model.add("Gather", "shape two", "h", keep=False)
    model.add("Gather", "shape three", "w", keep=False)
    for side in "hw":
        model.add("Cast", side, f"{side}f", keep=False, to=TensorProto.FLOAT)
        model.weight("half", 0.5, np.float32)
        model.add("Mul", f"{side}f half", f"{side}2", keep=False)
        model.add("Floor", f"{side}2", f"{side}3", keep=False)
        model.add("Cast", f"{side}3", f"{side}4", keep=False, to=TensorProto.INT64)
        model.add("Unsqueeze", f"{side}4 {model.weight('first', [0])}", f"{side}5", keep=False)
    model.add("Concat", f"{model.weight('lead', [1, 3])} h5 w5", "sizes", keep=False, axis=0)
    model.weight("zero", 0.0, np.float32)
    model.weight("one", 1.0, np.float32)
    model.weight("n3", [0, 3])
    model.add("Slice", "shape first two_ first", "nc", keep=False)
    model.weight("two_", [2])
    model.add("Concat", "nc h5 w5", "target", keep=False, axis=0)
    model.add("Resize", "x   target", "resized", mode="linear")
    model.add("Range", "zero w3 one", "grid")
    model.add("Range", "zero hf one", "rows", keep=False)
    model.add("Unsqueeze", f"rows {model.weight('second', [1])}", "column", keep=False)
    model.add("Add", "column wf", "positions")


def test_any_size(tmp_path: Path) -> None:
    path = _every_operator().save(tmp_path / "sizes.onnx")
    apq_tvm.compile(path, tmp_path / "sizes", scheme="float")
    module, session = load_module(tmp_path / "sizes"), session_of(path)
    names = [o.name for o in session.get_outputs()]
    for shape in ((1, 3, 9, 12), (2, 3, 12, 7)):
        feeds = {"x": RNG.standard_normal(shape).astype(np.float32)}
        ours = module.run(feeds)
        for name, theirs in zip(names, session.run(None, feeds), strict=True):
            np.testing.assert_allclose(ours[name], theirs, rtol=1e-4, atol=1e-5, err_msg=name)


def _halved_and_doubled() -> _Model:
    model = _Model()
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}
    model.add("MaxPool", "x", "small", keep=False, **attrs)
    model.weight("scales", [1, 1, 2, 2], np.float32)
    model.add("Resize", "small  scales", "large", keep=False)
    model.add("Add", "x large", "y")
    return model


def test_sizes_that_must_be_equal_are_checked(tmp_path: Path) -> None:
    path = _halved_and_doubled().save(tmp_path / "sum.onnx")
    apq_tvm.compile(path, tmp_path / "sum", scheme="float", dims={"n": 1, "width": (2, 8)})
    module, session = load_module(tmp_path / "sum"), session_of(path)
    feeds = {"x": RNG.standard_normal((1, 3, 4, 6)).astype(np.float32)}
    np.testing.assert_allclose(module.run(feeds)["y"], session.run(None, feeds)[0], rtol=1e-6)
    for shape, words in {
        (1, 3, 5, 6): "do not fit together: at",
        (1, 3, 4, 10): "width is 10, this model allows at most 8",
        (1, 3, 4, 1): "width is 1, this model needs at least 2",
        (2, 3, 4, 6): "x",
    }.items():
        with pytest.raises(module.InputError, match=words):
            module.run({"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize("opset", [11, 17])
def test_squeezed_sizes_must_be_one(opset: int, tmp_path: Path) -> None:
    """Lines of text that pooling brings to one row: PP-OCRv2's recognizer."""
    axes = {"axes": [2]} if opset < 13 else {}
    pool = {"kernel_shape": [4, 1], "strides": [4, 1]}
    nodes = [("MaxPool", "x", "row", pool), ("Squeeze", "row" if axes else "row axes", "y", axes)]
    weights = {} if axes else {"axes": np.array([-2])}
    given = {"x": ("float32", ["n", 3, "height", "width"])}
    path = save(build(nodes, given, "y", weights, opset), tmp_path)
    apq_tvm.compile(path, tmp_path / "lines", scheme="float")
    module, session = load_module(tmp_path / "lines"), session_of(path)
    for shape in ((1, 3, 4, 9), (2, 3, 7, 5)):
        feeds = {"x": RNG.standard_normal(shape).astype(np.float32)}
        np.testing.assert_array_equal(module.run(feeds)["y"], session.run(None, feeds)[0])
    with pytest.raises(module.InputError, match=r"y_assumehere.* to be 1"):
        module.run({"x": np.zeros((1, 3, 8, 9), np.float32)})


def test_dims_are_refused_by_name(tmp_path: Path) -> None:
    path = _halved_and_doubled().save(tmp_path / "sum.onnx")
    with pytest.raises(BadInput, match="no input has a dimension 'hight'; there are 'height', 'n'"):
        apq_tvm.import_onnx(path, {"hight": 4})
    with pytest.raises(BadInput, match="'n': 1000000000 is no size"):
        apq_tvm.import_onnx(path, {"n": 10**9})
    bounded = apq_tvm.import_onnx(path, {"n": (0, 4), "height": (0, 8)})
    assert dict(bounded.least) == {"n": 0, "height": 0}
    fixed = apq_tvm.import_onnx(path, {"n": 2, "height": 4, "width": 6})
    assert fixed.outputs[0].shape == (2, 3, 4, 6)
    assert not any(node.op == "apq.Assume" for node in fixed.nodes)

"""Indices that only a run knows, pointing anywhere: refused, clipped or wrapped as ONNX says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.codegen.cuda.simulator import Simulator
from apq_tvm.module import load_module
from tests.onnx_models import build, save

RNG = np.random.default_rng(11)
X = RNG.standard_normal((5, 6)).astype(np.float32)
HUGE, LEAST = np.iinfo(np.int64).max, np.iinfo(np.int64).min
OUTSIDE = (5, -6, 1 << 40, HUGE, LEAST)
"""Of an axis of five: -5 to 4 are in it."""

# node: (its operator, what it reads, attributes); "i" is int64 of the shape that stands behind.
NODES: dict[str, tuple[str, str, dict[str, Any], list[Any]]] = {
    "gather": ("Gather", "x i", {}, [2]),
    "elements": ("GatherElements", "x i", {"axis": 0}, [2, 6]),
    "nd": ("GatherND", "x i", {}, [3, 1]),
    "scatter": ("ScatterElements", "x i u26", {"axis": 0}, [2, 6]),
    "added": ("ScatterElements", "x i u26", {"axis": 0, "reduction": "add"}, [2, 6]),
    "scatter_nd": ("ScatterND", "x i u36", {}, [3, 1]),
    "table": ("Gather", "table i", {}, [2, 2]),
    "reverse": ("ReverseSequence", "x i", {"time_axis": 0, "batch_axis": 1}, [6]),
    "hot": ("OneHot", "i depth values", {}, [3]),
    "slice": ("Slice", "x i end axis", {}, [1]),
    "slice_back": ("Slice", "x i front axis back", {}, [1]),
    "slice_end": ("Slice", "x zero i axis", {}, [1]),
    "boxes": ("Gather", "x chosen", {}, [1]),
    "best": ("TopK", "x i", {"axis": 0}, [1]),
    "tile": ("Tile", "x i", {}, [2]),
    "range": ("Range", "none i one", {}, []),
    "ones": ("ConstantOfShape", "i", {}, [1]),
    "shape": ("Reshape", "x i", {}, [2]),
    "grown": ("Expand", "row i", {}, [2]),
    "pad": ("Pad", "x i", {}, [4]),
    "rotary": ("com.microsoft.RotaryEmbedding", "heads i cos sin", {}, [1, 3]),
}
WEIGHTS: dict[str, Any] = {
    "u26": X[:2],
    "u36": X[:3],
    "table": RNG.standard_normal((5, 16)).astype(np.float32),
    "depth": np.int64(5),
    "values": np.array([0, 1], np.float32),
    "end": np.array([HUGE]),
    "front": np.array([LEAST]),
    "axis": np.array([0]),
    "back": np.array([-1]),
    "zero": np.array([0]),
    "none": np.int64(0),
    "one": np.int64(1),
    "row": X[:1],
    "cos": RNG.standard_normal((5, 4)).astype(np.float32),
    "sin": RNG.standard_normal((5, 4)).astype(np.float32),
    "thousand": np.array([1 << 40]),
    "thresholds": np.array([0.5], np.float32),
    "columns": np.array([2]),
    "flat": np.array([-1]),
    "heads": RNG.standard_normal((1, 3, 16)).astype(np.float32),
}
SANE: dict[str, Any] = {
    "best": [2],
    "tile": [1, 2],
    "range": 3,
    "ones": [4],
    "shape": [6, 5],
    "grown": [4, 1],
    "pad": [1, 0, 0, 2],
}


FIXED = ("gather", "elements", "nd", "scatter", "added", "scatter_nd", "table", "reverse", "hot")
"""Whose results have one size, whatever the indices: what GPUs run."""


def model(folder: Path, names: Sequence[str] = tuple(NODES)) -> tuple[Path, list[str]]:
    """Some of `NODES` side by side; boxes are chosen by scores that are an input."""
    nodes: list[Any] = []
    inputs: dict[str, Any] = {"x": ("float32", [5, 6])}
    if "boxes" in names:
        nodes = [
            ("NonMaxSuppression", "corners scores thousand thresholds", "selected"),
            ("Gather", "selected columns", "column", {"axis": 1}),
            ("Reshape", "column flat", "places"),
            ("Add", "places boxes.i", "chosen"),
        ]
        inputs |= {"corners": ("float32", [1, 3, 4]), "scores": ("float32", [1, 1, 3])}
    for name in names:
        op, read, attrs, shape = NODES[name]
        inputs[f"{name}.i"] = ("int64", shape)
        own = " ".join(f"{name}.i" if word == "i" else word for word in read.split())
        out = f"{name}.y {name}.k" if op == "TopK" else f"{name}.y"
        nodes.append((op, own, out, attrs))
    outputs = [f"{name}.y" for name in names]
    return save(build(nodes, inputs, " ".join(outputs), WEIGHTS, opset=18), folder), outputs


def sane() -> dict[str, Any]:
    """Inputs that every node takes."""
    feeds: dict[str, Any] = {
        "x": X,
        "corners": np.array([[[0, 0, 1, 1], [0, 0, 9, 9], [5, 5, 6, 6]]], np.float32),
        "scores": np.array([[[0.9, 0.8, 0.7]]], np.float32),
    }
    for name, (_, _, _, shape) in NODES.items():
        value = np.full(shape, 1, np.int64)
        feeds[f"{name}.i"] = np.asarray(SANE.get(name, value), np.int64).reshape(shape)
    return feeds


def hostile() -> Iterator[tuple[str, Any, str]]:
    """Node, its integers, and what its result is: ``"refused"`` or an expression of numpy."""
    for name in ("gather", "elements", "nd", "scatter", "added", "scatter_nd", "table", "rotary"):
        shape = NODES[name][3]
        for bad in OUTSIDE:
            yield name, np.full(shape, bad), "refused"
            last = np.zeros(shape, np.int64)
            last.reshape(-1)[-1] = bad
            yield name, last, "refused"
    yield "gather", np.array([-1, -5]), "x[[-1, -5]]"
    yield "nd", np.array([[-1], [0], [-5]]), "x[[-1, 0, -5]]"
    for bad in (-1, 6, HUGE, LEAST):
        yield "reverse", np.full(6, bad), "refused"
    for bad in (5, -6, HUGE, LEAST):
        yield "hot", np.full(3, bad), "np.zeros((3, 5), np.float32)"
        yield "slice", np.array([bad]), f"x[{bad}:]"
        yield "slice_back", np.array([bad]), f"x[{bad}::-1]"
        yield "slice_end", np.array([bad]), f"x[:{bad}]"
    for bad in (4, 100, HUGE, LEAST):
        yield "boxes", np.array([bad]), "refused"
    for bad in (6, -1, HUGE, LEAST):
        yield "best", np.array([bad]), "refused"
    for bad in ([-1, 2], [HUGE, 1], [1 << 33, 1 << 33], [LEAST, 1]):
        yield "tile", np.array(bad), "refused"
        yield "grown", np.array(bad), "refused"
    for bad in (1 << 40, HUGE):
        yield "range", np.array(bad), "refused"
    yield "range", np.array(LEAST), "np.zeros(0, np.int64)"
    for bad in (-1, 1 << 40, HUGE, LEAST):
        yield "ones", np.array([bad]), "refused"
    for wrong in ([-1, -1], [7, 5], [0, HUGE], [HUGE, HUGE], [-2, -15], [1 << 62, 4]):
        yield "shape", np.array(wrong), "refused"
    for wrong in ([-9, 0, 0, 0], [HUGE, 0, HUGE, 0], [LEAST, 0, 0, 0], [1 << 62, 0, 1 << 62, 0]):
        yield "pad", np.array(wrong), "refused"


def judge(module: Any, names: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Each node in turn is told nonsense, and the module goes on as before; what went wrong."""
    given = {key: value for key, value in sane().items() if key in {i.name for i in module.inputs}}
    first, wrong = module.run(given), list[str]()
    for name, value, meant in hostile():
        if name not in names:
            continue
        feeds = {**given, f"{name}.i": np.asarray(value, np.int64)}
        try:
            got = module.run(feeds)[f"{name}.y"]
        except module.InputError:
            if meant != "refused":
                wrong.append(f"{name} {value.tolist()}: refused")
            continue
        want = None if meant == "refused" else eval(meant, {"np": np, "x": X})
        if want is None or got.shape != want.shape or not np.array_equal(got, want):
            wrong.append(f"{name} {value.tolist()}: {got.shape} {got.ravel()[:4]}, {meant}")
    again = module.run(given)
    return wrong + [out for out in outputs if not np.array_equal(first[out], again[out])]


@pytest.mark.slow
def test_no_index_leaves_its_tensor(tmp_path: Path) -> None:
    path, outputs = model(tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    wrong = judge(load_module(tmp_path / "compiled"), tuple(NODES), outputs)
    assert not wrong, "\n".join(wrong)


def test_no_index_leaves_its_tensor_on_a_gpu(gpu: None, tmp_path: Path) -> None:
    """Kernels run before the host hears of it: the simulated GPU faults where one reads outside."""
    path, outputs = model(tmp_path, FIXED)
    output = tmp_path / "on_gpu"
    apq_tvm.compile(path, output, target="rtx-3090", scheme="float", images=Simulator())
    wrong = judge(load_module(output), FIXED, outputs)
    assert not wrong, "\n".join(wrong)

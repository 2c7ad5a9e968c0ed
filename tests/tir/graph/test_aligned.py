"""Reshapes of symbolic sizes: axes that stay or are split need no division by what a run knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import build, save
from tvm import tirx

import apq_tvm
from apq_tvm.lower.aligned import alike, places
from apq_tvm.module import load_module
from apq_tvm.schedules.graph.exprs import collect
from apq_tvm.tensorize.exprs import i64

N, H, W, D = (tirx.Var(name, "int64") for name in "nhwd")
HALF = tirx.floordiv(H, i64(2))


@pytest.mark.parametrize(
    ("given", "wanted", "divided"),
    [
        ((N, 12, H, W), (N, 2, 2, 3, H, W), 0),  # a split
        ((N, 3, H, 2, W, 2), (N, 3, H * 2, W * 2), 2),  # by numbers
        ((N, 1, H, W), (N, H, 1, W, 1), 0),
        ((N, H, W, 8), (N, H * W, 8), 1),  # of two that a run knows
        ((N, H * W, 64), (N, H, W, 4, 16), 0),
        ((N, 6, D), (N, 6, HALF, 2), 0),  # D stands for an expression
        ((H, 4), (4, H), None),
    ],
)
def test_places(given: Any, wanted: Any, divided: int | None) -> None:
    given, wanted = ([i64(e) if isinstance(e, int) else e for e in of] for of in (given, wanted))
    groups = alike(given, wanted, {"d": HALF * 2})
    if divided is None:
        assert groups is None
        return
    assert groups is not None
    index = [tirx.Var(f"i{number}", "int64") for number in range(len(wanted))]
    found = places(index, groups, len(given))
    assert sum(len(collect(place, tirx.FloorMod)) for place in found) == divided
    sizes = {"n": 2, "h": 4, "w": 5, "d": 4}
    shapes = [[_at(extent, sizes) for extent in extents] for extents in (given, wanted)]
    for flat in range(int(np.prod(shapes[1]))):
        at = [int(i) for i in np.unravel_index(flat, shapes[1])]
        values = sizes | {f"i{number}": i for number, i in enumerate(at)}
        here = [_at(place, values) for place in found]
        assert np.ravel_multi_index(here, shapes[0]) == flat


def _at(expr: Any, values: dict[str, int]) -> int:
    """An expression's value."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var):
        return values[expr.name]
    a, b = _at(expr.a, values), _at(expr.b, values)
    kinds = {tirx.Add: a + b, tirx.Mul: a * b}
    return kinds[type(expr)] if type(expr) in kinds else divmod(a, b)[_KINDS[type(expr)]]


_KINDS = {tirx.FloorDiv: 0, tirx.FloorMod: 1}


def test_what_is_not_fused_is_a_view(tmp_path: Path) -> None:
    """No kernel copies it, also where it is the result or reads an input."""
    nodes = [
        ("Reshape", "x rows", "r"),
        ("Softmax", "r", "s", {"axis": -1}),
        ("Reshape", "s four", "y"),
        ("Reshape", "x flat", "z"),
    ]
    weights = {"rows": np.array([0, 0, -1]), "four": np.array([0, 3, 2, -1]), "flat": [-1]}
    path = save(build(nodes, {"x": ("float32", ["n", 6, "h", "w"])}, "y z", weights), tmp_path)
    apq_tvm.compile(path, tmp_path / "views", scheme="float")
    module = load_module(tmp_path / "views")
    assert not [f for f in module.manifest["functions"] if f["name"].startswith("reshape")]
    x = np.random.default_rng(0).standard_normal((2, 6, 3, 5)).astype(np.float32)
    got = module.run({"x": x})
    power = np.exp(x.reshape(2, 6, 15))
    wanted = (power / power.sum(-1, keepdims=True)).reshape(2, 3, 2, 15)
    np.testing.assert_allclose(got["y"], wanted, rtol=1e-5)
    assert np.array_equal(got["z"], x.reshape(-1))


@pytest.mark.parametrize("opset", [18, 21])
def test_groups_are_normalized_as_rows(tmp_path: Path, opset: int) -> None:
    count = {18: 3, 21: 12}[opset]
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(count).astype(np.float32) for name in "sb"}
    nodes = [("GroupNormalization", "x s b", "y", {"num_groups": 3, "epsilon": 1e-3})]
    image = {"x": ("float32", ["n", 12, "h", "w"])}
    path = save(build(nodes, image, "y", weights, opset=opset), tmp_path)
    apq_tvm.compile(path, tmp_path / "groups", scheme="float")
    x = rng.standard_normal((2, 12, 5, 4)).astype(np.float32)
    rows = x.reshape(2, 3, -1)
    normal = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-3)
    each = {
        name: np.repeat(value, 12 // count).reshape(12, 1, 1) for name, value in weights.items()
    }
    wanted = normal.reshape(x.shape) * each["s"] + each["b"]
    got = load_module(tmp_path / "groups").run({"x": x})["y"]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

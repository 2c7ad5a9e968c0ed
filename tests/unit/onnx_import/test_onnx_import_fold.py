"""Constants are computed, copies and dead nodes dropped, equal nodes merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, check, ops, rand, save, well_formed

from apq_tvm.errors import ImportFailed, UnsupportedModel
from apq_tvm.onnx_import import import_onnx

INT = np.int64
X = {"x": ("float32", ["b", "s", 12])}
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 5})


def test_constants_of_any_kind_are_folded(tmp_path: Path) -> None:
    nodes = [
        ("Constant", "", "c1", {"value": rand(8)}),
        ("Constant", "", "c2", {"value_float": 2.0}),
        ("Constant", "", "c3", {"value_ints": [1, 8]}),
        ("Constant", "", "c4", {"value_floats": [1.0] * 8}),
        ("Constant", "", "c5", {"value_int": 3}),
        ("Cast", "c5", "f5", {"to": 1}),
        ("Mul", "c1 c2", "m"),
        ("Reshape", "m c3", "r"),
        ("Add", "r c4", "a"),
        ("CumSum", "a last", "s"),  # an axis [1], which onnx's reference refuses
        ("Pow", "s f5", "p"),
        ("Add", "x p", "y"),
    ]
    inputs = {"x": ("float32", ["b", 8])}
    path = save(build(nodes, inputs, "y", {"last": np.array([1])}), tmp_path)
    model = check(path, {"b": 3})
    assert ops(model) == {"Add": 1}


@pytest.mark.parametrize("axis", [1, -2, 0])
def test_elements_of_long_axes_are_gathered(tmp_path: Path, axis: int) -> None:
    """Types of tokens by 512 places, as torch exports encoders: onnx's reference has 64 at most."""
    rng = np.random.default_rng(0)
    shape = (3, 512, 7) if axis else (512, 3, 7)
    at = rng.integers(-512, 512, (2, 9, 7) if axis else (9, 2, 7))
    nodes = [("GatherElements", "table at", "rows", {"axis": axis}), ("Add", "x rows", "y")]
    inputs = {"x": ("float32", ["b", *at.shape])}
    model = check(save(build(nodes, inputs, "y", {"table": rand(*shape), "at": at}), tmp_path),
                  {"b": 2})  # fmt: skip
    assert ops(model) == {"Add": 1}


def test_constants_that_cannot_be_computed_are_refused(tmp_path: Path) -> None:
    nodes = [("Gather", "table at", "row"), ("Add", "x row", "y")]
    weights = {"table": rand(3, 4), "at": np.array([7])}
    path = save(build(nodes, {"x": ("float32", [1, 4])}, "y", weights), tmp_path)
    with pytest.raises(ImportFailed, match="Gather 'n_row' cannot be computed: index 7"):
        import_onnx(path)


def test_folding_does_not_blow_up_weights(tmp_path: Path) -> None:
    nodes = [("Expand", "row t", "wide"), ("MatMul", "x wide", "h"), ("Add", "h wide", "y")]
    inputs = {"x": ("float32", ["b", 512, 512])}
    weights = {"row": rand(1, 512), "t": np.array([512, 512], INT)}
    path = save(build(nodes, inputs, "y", weights), tmp_path)
    model = check(path, {"b": 1})
    assert sum(array.nbytes for array in model.weights.values()) < 2**14


def test_dropout_and_identity_are_removed(tmp_path: Path) -> None:
    nodes = [
        ("Identity", "x", "a"),
        ("Dropout", "a ratio", "d mask"),
        ("Relu", "d", "r"),
        ("Cast", "r", "c", {"to": 1}),
        ("Identity", "c", "y"),
    ]
    path = save(build(nodes, X, "y", {"ratio": np.array(0.5, np.float32)}), tmp_path)
    assert ops(check(path, *SIZES)) == {"Relu": 1}


def test_equal_nodes_are_computed_once(tmp_path: Path) -> None:
    nodes = [
        ("Relu", "x", "a"),
        ("Relu", "x", "c"),
        ("Exp", "a", "e"),
        ("Exp", "c", "f"),
        ("Add", "e f", "y"),
    ]
    assert ops(check(save(build(nodes, X, "y"), tmp_path), *SIZES)) == {
        "Relu": 1,
        "Exp": 1,
        "Add": 1,
    }


def test_dead_nodes_and_weights_are_dropped(tmp_path: Path) -> None:
    nodes = [("Relu", "x", "y"), ("Add", "x w", "unused")]
    model = check(save(build(nodes, X, "y", {"w": rand(12)}), tmp_path), *SIZES)
    assert ops(model) == {"Relu": 1}
    assert not model.weights


def test_nodes_in_any_order_are_sorted(tmp_path: Path) -> None:
    nodes = [("Neg", "r", "y"), ("Relu", "h", "r"), ("Exp", "x", "h")]
    model = import_onnx(save(build(nodes, X, "y"), tmp_path))
    well_formed(model)
    assert [node.op for node in model.nodes] == ["Exp", "Relu", "Neg"]


@pytest.mark.parametrize(
    ("op", "read", "number"),
    [
        ("Add", "x n", 0),
        ("Add", "n x", 0),
        ("Sub", "x n", 0),
        ("Mul", "n x", 1),
        ("Div", "x n", 1),
        ("Pow", "x n", 1),
    ],
)
def test_neutral_numbers_are_dropped(tmp_path: Path, op: str, read: str, number: int) -> None:
    nodes = [(op, read, "h"), ("Relu", "h", "y")]
    path = save(build(nodes, X, "y", {"n": np.array(number, np.float32)}), tmp_path)
    assert ops(check(path, *SIZES)) == {"Relu": 1}


@pytest.mark.parametrize(("op", "read", "number"), [("Sub", "n x", 0), ("Div", "n x", 1)])
def test_numbers_on_the_other_side_are_not(tmp_path: Path, op: str, read: str, number: int) -> None:
    nodes = [(op, read, "h"), ("Relu", "h", "y")]
    path = save(build(nodes, X, "y", {"n": np.array(number, np.float32)}), tmp_path)
    assert ops(check(path, *SIZES))[op] == 1


def test_a_neutral_number_that_broadcasts_stays(tmp_path: Path) -> None:
    nodes = [("Add", "x n", "h"), ("Relu", "h", "y")]
    weights = {"n": np.zeros((1, 1, 1, 1), np.float32)}
    assert ops(check(save(build(nodes, X, "y", weights), tmp_path), *SIZES))["Add"] == 1


@pytest.mark.parametrize("mode", [False, True])
def test_dropout_drops_nothing_but_in_training_mode(tmp_path: Path, mode: bool) -> None:
    nodes = [("Dropout", "x ratio mode", "d"), ("Relu", "d", "y")]
    weights = {"ratio": np.array(0.5, np.float32), "mode": np.array(mode)}
    path = save(build(nodes, X, "y", weights), tmp_path)
    if not mode:
        assert ops(import_onnx(path)) == {"Relu": 1}
        return
    with pytest.raises(UnsupportedModel, match="Dropout 'n_d': it is in training mode"):
        import_onnx(path)

"""Models of scikit-learn and its kin through the whole pipeline, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx, old_opsets
from tests import classical_models
from tests.onnx_models import build, save, session_of


@pytest.mark.parametrize("opset", [17, 10])  # 10 goes through ONNX's converter
def test_trees(opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forests of every kind and a linear classifier, whose layers stay float."""
    monkeypatch.setattr(old_opsets, "LARGEST_WEIGHT", 100)  # attributes and weights are set aside
    wanted = ("targets", "chances_SOFTMAX", "kind_SOFTMAX", "margin_LOGISTIC", "votes_kind_NONE")
    outputs = (*wanted, "scores_LOGISTIC", "norm_L2", "numbered")
    path = save(classical_models.joined(outputs, opset), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    # Forests of one kind share their kernel, whatever their sizes.
    forests = [node for node in import_onnx(path).nodes if node.op == "apq.Trees"]
    shared = [f for f in module.manifest["functions"] if f["name"].startswith("trees")]
    assert 0 < len(shared) < len(forests)
    for rows in (1, 9):
        given = classical_models.feeds(rows)
        given = {spec.name: given[spec.name] for spec in session.get_inputs()}
        got = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            np.testing.assert_allclose(got[name], value, atol=2e-6, err_msg=name)


def _grown(rng: np.random.Generator, trees: int, columns: int, modes: list[str]) -> dict[str, Any]:
    """Attributes of a forest of uneven trees, half of whose nodes lead NaN to a yes."""
    keys = ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    made: dict[str, list[Any]] = {key: [] for key in (*keys, "missing_value_tracks_true")}
    leaves: dict[str, list[Any]] = {key: [] for key in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(trees):
        level, count = [0], 1
        while level:
            at = level.pop(rng.integers(len(level)))
            inner = count < rng.integers(2, 60)
            ways = (count, count + 1) if inner else (0, 0)
            told = (rng.integers(columns), rng.normal(), rng.choice(modes) if inner else "LEAF")
            for key, value in zip(keys, (tree, at, *told, *ways), strict=True):
                made[key].append(value)
            made["missing_value_tracks_true"].append(int(rng.random() < 0.5))
            if inner:
                level += ways
                count += 2
            else:
                for target in rng.choice(3, rng.integers(1, 3), replace=False):
                    for key, value in zip(leaves, (tree, at, target, rng.normal()), strict=True):
                        leaves[key].append(value)
    nodes = {f"nodes_{key}": values for key, values in made.items()}
    return {**nodes, **{f"target_{key}": values for key, values in leaves.items()}}


@pytest.mark.parametrize(
    ("modes", "columns"),
    [(["BRANCH_LEQ"], 5), (["BRANCH_LEQ"], "f"), (["BRANCH_GT", "BRANCH_LEQ", "BRANCH_NEQ"], 5)],
)
def test_uneven_forests(modes: list[str], columns: int | str, tmp_path: Path) -> None:
    """Trees that fill no group, rows that fill no task, and features that are missing."""
    rng = np.random.default_rng(5)
    attrs = {"n_targets": 3, **_grown(rng, 29, 5, modes)}
    node = ("ai.onnx.ml.TreeEnsembleRegressor", "x", "y", attrs)
    model = build([node], {"x": ("float32", ["n", columns])}, "y", domains={"ai.onnx.ml": 3})
    path = save(model, tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    for rows in (1, 16, 37):
        x = rng.normal(size=(rows, 5)).astype(np.float32)
        x[rng.random(x.shape) < 0.2] = np.nan
        np.testing.assert_allclose(
            module.run({"x": x})["y"], session.run(None, {"x": x})[0], atol=2e-6
        )
    if columns == "f":
        with pytest.raises(module.InputError, match="trees wants 5 entries"):
            module.run({"x": np.zeros((1, 4), np.float32)})

"""Models of scikit-learn and its kin through the whole pipeline, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import apq_tvm
from apq_tvm.module import load_module
from apq_tvm.onnx_import import import_onnx, old_opsets
from tests import classical_models
from tests.onnx_models import save, session_of


@pytest.mark.parametrize("opset", [17, 10])  # 10 goes through ONNX's converter
def test_trees(opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forests of every kind and a linear classifier, whose layers stay float."""
    monkeypatch.setattr(old_opsets, "LARGEST_WEIGHT", 100)  # attributes and weights are set aside
    wanted = ("targets", "chances_SOFTMAX", "kind_SOFTMAX", "margin_LOGISTIC", "votes_kind_NONE")
    outputs = (*wanted, "scores_LOGISTIC", "norm_L2", "numbered")
    path = save(classical_models.joined(outputs, opset), tmp_path)
    apq_tvm.compile(path, tmp_path / "compiled", scheme="float")
    module, session = load_module(tmp_path / "compiled"), session_of(path)
    # Levels of trees, and trees of nearly one size, share their kernels.
    looked_up = [node for node in import_onnx(path).nodes if node.op == "Gather"]
    shared = [f for f in module.manifest["functions"] if f["name"].startswith("gather")]
    assert 0 < len(shared) < len(looked_up) / 3
    for rows in (1, 9):
        given = classical_models.feeds(rows)
        given = {spec.name: given[spec.name] for spec in session.get_inputs()}
        got = module.run(given)
        for name, value in zip(outputs, session.run(outputs, given), strict=True):
            np.testing.assert_allclose(got[name], value, atol=2e-6, err_msg=name)

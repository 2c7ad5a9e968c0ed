"""``ai.onnx.ml``: what converters of scikit-learn and its kin write, right and wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import build, run_node, save, session_of
from onnx_reference import run_reference

from apq_tvm.errors import ApqError
from apq_tvm.onnx_import import import_onnx
from tests import classical_models


@pytest.mark.parametrize("opset", [11, 17])
def test_operators(tmp_path: Path, opset: int) -> None:
    """By the numpy meaning of the graph, beside ONNX Runtime; leaves are no layer to quantize."""
    path = save(classical_models.joined(opset=opset), tmp_path)
    model, session = import_onnx(path), session_of(path)
    assert not any(node.op == "apq.Embedding" for node in model.nodes)
    names = list(classical_models.OUTPUTS)
    for rows in (1, 9):
        given = classical_models.feeds(rows)
        got = run_reference(model, given)
        for name, value in zip(names, session.run(names, given), strict=True):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
            np.testing.assert_allclose(got[name], value, atol=2e-6, err_msg=name)


LEAF_LAST = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [1, 0, 0],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [0, 0],
    "target_nodeids": [1, 2],
    "target_ids": [0, 0],
    "target_weights": [1.0, 2.0],
    "n_targets": 1,
}


@pytest.mark.parametrize(
    ("attrs", "text"),
    [
        ({"nodes_falsenodeids": [0, 0, 0]}, "circle"),
        ({"nodes_falsenodeids": [7, 0, 0]}, "no node 7"),
        ({"nodes_featureids": [9, 0, 0]}, "column 9"),
        ({"nodes_featureids": [-1, 0, 0]}, "not there"),
        ({"nodes_nodeids": [0, 1, 1]}, "one number"),
        ({"target_ids": [0, 4]}, "target 4"),
        ({"n_targets": 1 << 40}, "targets, of at most"),
        ({"nodes_values": [0.5]}, "different lengths"),
        ({"nodes_modes": ["BRANCH_MEMBER", "LEAF", "LEAF"]}, "BRANCH_MEMBER"),
        ({"post_transform": "PROBIT"}, "PROBIT"),
    ],
)
def test_wrong_trees(tmp_path: Path, attrs: dict[str, Any], text: str) -> None:
    """Refused by the operator's name, before anything follows where they point."""
    node = ("ai.onnx.ml.TreeEnsembleRegressor", "x", "y", LEAF_LAST | attrs)
    model = build([node], {"x": ("float32", ["n", 2])}, "y", domains={"ai.onnx.ml": 3})
    with pytest.raises(ApqError, match=rf"TreeEnsembleRegressor 'n_y'.*{text}"):
        import_onnx(save(model, tmp_path))


@pytest.mark.parametrize(
    ("op", "attrs", "text"),
    [
        ("SVMRegressor", {"n_supports": 3}, "not 3 support vectors"),
        ("SVMRegressor", {"kernel_params": [1.0]}, "1 parameters"),
        ("SVMRegressor", {"kernel_type": "COSINE"}, "COSINE"),
        ("SVMRegressor", {"rho": [1.0, 2.0]}, "2 numbers rho"),
        ("SVMClassifier", {"prob_a": [1.0], "prob_b": [0.0]}, "probability=False"),
        ("SVMClassifier", {"vectors_per_class": [-1, 3]}, "at least two classes"),
        ("SVMClassifier", {"vectors_per_class": [2, 2]}, "2 coefficients are not 1 x 4"),
    ],
)
def test_wrong_vectors(tmp_path: Path, op: str, attrs: dict[str, Any], text: str) -> None:
    """Refused by the operator's name."""
    given = {"support_vectors": [1.0, 2.0, 3.0, 4.0], "coefficients": [1.0, -1.0], "rho": [0.5]}
    given |= {"kernel_type": "RBF", "kernel_params": [0.5, 0.0, 3.0]}
    if op == "SVMRegressor":
        given["n_supports"] = 2
    else:
        given |= {"classlabels_ints": [0, 1], "vectors_per_class": [1, 1]}
    node = (f"ai.onnx.ml.{op}", "x", "y" if op == "SVMRegressor" else "y z", given | attrs)
    model = build([node], {"x": ("float32", ["n", 2])}, "y", domains={"ai.onnx.ml": 3})
    with pytest.raises(ApqError, match=rf"{op} 'n_y'.*{text}"):
        import_onnx(save(model, tmp_path))


def test_leaves_apart(tmp_path: Path) -> None:
    """TreeEnsemble, whose leaves have a table of their own; one may lead back."""
    attrs = {
        "n_targets": 2,
        "aggregate_function": 1,
        "nodes_featureids": [0, 1],
        "nodes_splits": np.array([0.5, -0.25], np.float32),
        "nodes_modes": np.array([0, 3], np.uint8),
        "nodes_truenodeids": [1, 1],
        "nodes_trueleafs": [0, 1],
        "nodes_falsenodeids": [0, 2],
        "nodes_falseleafs": [1, 1],
        "leaf_targetids": [0, 1, 0],
        "leaf_weights": np.array([1, 2, 4], np.float32),
        "tree_roots": [0],
    }
    node = ("ai.onnx.ml.TreeEnsemble", "x", "y", attrs)
    model = build([node], {"x": ("float32", ["n", 2])}, "y", domains={"ai.onnx.ml": 5})
    path = save(model, tmp_path)
    x = np.array([[1, 0], [0, 0], [0, -1], [0.5, -0.25]], np.float32)
    got = run_reference(import_onnx(path), {"x": x})["y"]
    np.testing.assert_array_equal(got, session_of(path).run(None, {"x": x})[0])
    node = (node[0], "x", "y", attrs | {"nodes_trueleafs": [0, 0]})
    model = build([node], {"x": ("float32", ["n", 2])}, "y", domains={"ai.onnx.ml": 5})
    with pytest.raises(ApqError, match="circle"):
        import_onnx(save(model, tmp_path))


def test_refused(tmp_path: Path) -> None:
    """What is not compiled is listed with its nodes and what to do."""
    nodes = [("ai.onnx.ml.CastMap", "x", "m"), ("ai.onnx.ml.ZipMap", "x", "z"), ("Abs", "z", "y")]
    given = {"x": ("float32", ["n", 2])}
    model = build(nodes, given, "m y", domains={"ai.onnx.ml": 3})
    with pytest.raises(ApqError, match=r"CastMap \(.*before.*'n_m'.*zipmap"):
        import_onnx(save(model, tmp_path))


def test_maps_of_classes_are_columns(tmp_path: Path) -> None:
    """What skl2onnx makes of probabilities by default, a map for each row."""
    nodes = [
        ("Softmax", "x", "p"),
        ("ai.onnx.ml.ZipMap", "p", "maps", {"classlabels_int64s": [4, 7, 9]}),
    ]
    given = {"x": ("float32", ["n", 3])}
    model = build(nodes, given, "maps", domains={"ai.onnx.ml": 1})
    kind = onnx.helper.make_map_type_proto(7, onnx.helper.make_tensor_type_proto(1, None))
    model.graph.output[0].type.CopyFrom(onnx.helper.make_sequence_type_proto(kind))
    path = save(model, tmp_path)
    x = np.random.default_rng(3).standard_normal((5, 3)).astype(np.float32)
    got = run_reference(import_onnx(path), {"x": x}, run_node)["maps"]
    rows = session_of(path).run(None, {"x": x})[0]
    np.testing.assert_allclose(got, [[row[k] for k in (4, 7, 9)] for row in rows], rtol=1e-6)


def test_strings(tmp_path: Path) -> None:
    """Labels that are strings; the message says what to do about inputs and outputs."""
    attrs = {"cats_strings": ["a", "b"]}
    text = [("ai.onnx.ml.OneHotEncoder", "x", "y", attrs)]
    model = build(text, {"x": ("int64", ["n"])}, "y", domains={"ai.onnx.ml": 3})
    with pytest.raises(ApqError, match=r"OneHotEncoder 'n_y'.*before the model"):
        import_onnx(save(model, tmp_path))
    spoken = helper.make_tensor_value_info("x", TensorProto.STRING, ["n"])
    model.graph.input[0].CopyFrom(spoken)
    with pytest.raises(ApqError, match=r"input 'x' holds strings.*before the model"):
        import_onnx(save(model, tmp_path))

"""Branches, loops and recurrent layers: the flat graph means what the file means."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import build, save, session_of
from onnx_reference import run_reference

from apq_tvm.errors import UnsupportedModel
from apq_tvm.onnx_import import import_onnx
from tests import control_models, recurrent_models

node = helper.make_node


def branch(nodes: list[Any], output: str) -> Any:
    return helper.make_graph(nodes, "branch", [], [helper.make_empty_tensor_value_info(output)])


def test_recurrent_layers(tmp_path: Path) -> None:
    """Every form, by the numpy meaning of the flat graph, beside ONNX Runtime."""
    path = save(recurrent_models.joined(list(recurrent_models.VARIANTS)), tmp_path)
    model, session = import_onnx(path), session_of(path)
    layers = Counter(n.name.rpartition(".")[2] for n in model.nodes if n.op == "apq.Linear")
    directions = sum(n.op == "apq.Loop" for n in model.nodes)
    assert layers["input"] == layers["recurrent"] == directions
    names = [spec.name for spec in model.outputs]
    for sizes in ((1, 2), (5, 3)):
        given = recurrent_models.feeds(*sizes)
        got = run_reference(model, given)
        for name, value in zip(names, session.run(names, given), strict=True):
            np.testing.assert_allclose(got[name], value, atol=2e-5, err_msg=name)


def test_control_flow(tmp_path: Path) -> None:
    path = save(control_models.joined(), tmp_path)
    model, session = import_onnx(path), session_of(path)
    assert Counter(n.op for n in model.nodes)["apq.Then"] == 7  # what is known is inlined
    for given in control_models.feeds():
        got = run_reference(model, given)
        for name, value in zip(
            control_models.OUTPUTS, session.run(control_models.OUTPUTS, given), strict=True
        ):
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_squeeze_of_a_dynamic_dimension(tmp_path: Path) -> None:
    """torch's ``x.squeeze(1)``: the dimension is taken as 1."""
    model = build(
        [
            ("Shape", "x", "s"),
            ("Gather", "s one", "d"),
            ("Equal", "d one", "c"),
            ("Relu", "x", "r"),
        ],
        {"x": ("float32", ["n", "m", 8])},
        "y",
        {"one": np.array(1), "axes": np.array([1])},
    )
    squeeze = branch([node("Squeeze", ["r", "axes"], ["a"])], "a")
    keep = branch([node("Identity", ["r"], ["b"])], "b")
    model.graph.node.append(node("If", ["c"], ["y"], then_branch=squeeze, else_branch=keep))
    imported = import_onnx(save(model, tmp_path))
    assert imported.outputs[0].shape == ("n", 8)
    x = np.ones((3, 1, 8), np.float32)
    assert run_reference(imported, {"x": x})["y"].shape == (3, 8)


def test_branches_of_different_ranks(tmp_path: Path) -> None:
    model = build([("Relu", "x", "r")], {"x": ("float32", ["n", 8]), "c": ("bool", [])}, "y")
    flat = branch([node("ReduceMax", ["r"], ["a"], axes=[0], keepdims=0)], "a")
    keep = branch([node("Identity", ["r"], ["b"])], "b")
    pick = node("If", ["c"], ["y"], name="pick", then_branch=flat, else_branch=keep)
    model.graph.node.append(pick)
    with pytest.raises(UnsupportedModel, match=r"If 'pick'.*1 and 2 dimensions.*--dim"):
        import_onnx(save(model, tmp_path))


@pytest.mark.parametrize("rounds", ["k", "n"])
def test_loops_that_grow(rounds: str, tmp_path: Path) -> None:
    """As often as data says, and collecting; as often as there are rows, and growing."""
    model = build(
        [("Shape", "x", "s"), ("Gather", "s zero", "n")],
        {"x": ("float32", ["rows", 8]), "k": ("int64", [])},
        "last all",
        {"zero": np.array(0)},
    )
    scalar = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
    ]
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["on"]),
            node("Concat", ["v", "x"], ["w"], axis=0),
            node("ReduceMax", ["v"], ["m"], keepdims=0),
        ],
        "body",
        scalar,
        [helper.make_empty_tensor_value_info(name) for name in ("on", "w", "m")],
    )
    grow = node("Loop", [rounds, "", "x"], ["last", "all"], name="grow", body=body)
    model.graph.node.append(grow)
    with pytest.raises(UnsupportedModel, match=r"grow.*must keep its shape"):
        import_onnx(save(model, tmp_path))


def test_pieces_at_known_places(tmp_path: Path) -> None:
    """torch's ``x.tensor_split((1, 3))``: a loop whose condition is a constant around it, and whose
    round is declared as a list of one number."""
    model = build(
        [("Add", "x x", "twice")],
        {"x": ("float32", ["rows", 8])},
        "y",
        {
            "bounds": np.array([0, 1, 3]), "axis": np.array([1]), "rounds": np.array(2),
            "always": np.array(True), "end": np.array([8]), "last": np.array([3]),
            "first": np.array(0), "second": np.array(1), "one": np.array(1),
        },
    )  # fmt: skip
    body = helper.make_graph(
        [
            node("Gather", ["bounds", "i"], ["start"], axis=0),
            node("Add", ["i", "one"], ["next"]),
            node("Gather", ["bounds", "next"], ["stop"], axis=0),
            node("Slice", ["twice", "start", "stop", "axis"], ["piece"]),
            node("SequenceInsert", ["pieces", "piece"], ["more"]),
            node("Identity", ["always"], ["on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, [1]),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_sequence_value_info("pieces", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_sequence_value_info("more", TensorProto.FLOAT, None),
        ],
    )
    model.graph.node.extend(
        [
            node("SequenceEmpty", [], ["nothing"]),
            node("Loop", ["rounds", "always", "nothing"], ["cut"], name="split", body=body),
            node("Slice", ["twice", "last", "end", "axis"], ["rest"]),
            node("SequenceInsert", ["cut", "rest"], ["all"]),
            node("SequenceAt", ["all", "first"], ["a"]),
            node("SequenceAt", ["all", "second"], ["b"]),
            node("Concat", ["b", "rest", "a"], ["y"], axis=1),
        ]
    )
    path = save(model, tmp_path)
    imported, x = import_onnx(path), np.arange(24, dtype=np.float32).reshape(3, 8)
    assert not any(n.op == "apq.Loop" for n in imported.nodes)
    (wanted,) = session_of(path).run(None, {"x": x})
    np.testing.assert_array_equal(run_reference(imported, {"x": x})["y"], wanted)

"""Attention: products with their transposes, softmax with scale and mask."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from onnx_models import build, check, only, ops, rand, save

X = {"x": ("float32", ["b", "s", 8])}
SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 5})
OPSETS = (11, 13, 17, 21)
CONSTANTS = {
    "half": np.array(0.5, np.float32),
    "two": np.array(2, np.float32),
    "inv_root2": np.array(sqrt(0.5), np.float32),
}


def used(nodes: list[tuple], weights: dict) -> dict:
    read = {word for node in nodes for word in node[1].split()}
    return {name: array for name, array in weights.items() if name in read}


HEADS = {
    "q": ("float32", ["b", "s", 2, 4]),
    "k": ("float32", ["b", "s", 2, 4]),
    "v": ("float32", ["b", "s", 2, 4]),
}
MASK = {"mask": ("float32", ["b", 1, 1, "s"])}


def attention(scale: list[tuple], scores: str) -> list[tuple]:
    return [
        ("Transpose", "q", "qt", {"perm": [0, 2, 1, 3]}),
        ("Transpose", "k", "kt", {"perm": [0, 2, 3, 1]}),
        ("Transpose", "v", "vt", {"perm": [0, 2, 1, 3]}),
        ("MatMul", "qt kt", "qk"),
        *scale,
        ("Softmax", scores, "p", {"axis": -1}),
        ("MatMul", "p vt", "o"),
        ("Transpose", "o", "y", {"perm": [0, 2, 1, 3]}),
    ]


@pytest.mark.parametrize(
    ("middle", "scores", "masked", "scale"),
    [
        ([], "qk", False, 1.0),
        ([("Div", "qk two", "d")], "d", False, 0.5),
        ([("Mul", "half qk", "d"), ("Add", "d mask", "e")], "e", True, 0.5),
        ([("Div", "qk two", "d"), ("Add", "mask d", "e")], "e", True, 0.5),
        ([("Mul", "qk half", "c"), ("Div", "c two", "d")], "d", False, 0.25),
        ([("Add", "qk mask", "e")], "e", True, 1.0),
    ],
)
@pytest.mark.parametrize("opset", OPSETS)
def test_attention(
    tmp_path: Path, middle: list[tuple], scores: str, masked: bool, scale: float, opset: int
) -> None:
    nodes = attention(middle, scores)
    if opset < 13:
        nodes = [(*n[:3], {"axis": 3}) if n[0] == "Softmax" else n for n in nodes]
    inputs = {**HEADS, **(MASK if masked else {})}
    path = save(build(nodes, inputs, "y", used(nodes, CONSTANTS), opset), tmp_path)
    model = check(path, *SIZES)
    assert ops(model) == {"apq.MatMul": 2, "apq.Softmax": 1}
    softmax = only(model, "apq.Softmax")
    assert bool(softmax.inputs[1]) == masked
    assert softmax.attrs["scale"] == scale
    first, second = (n for n in model.nodes if n.op == "apq.MatMul")
    assert first.inputs == ("q", "k")
    assert dict(first.attrs) == {
        "perm_a": (0, 2, 1, 3),
        "perm_b": (0, 2, 3, 1),
        "perm_out": (0, 1, 2, 3),
    }
    assert second.attrs["perm_out"] == (0, 2, 1, 3)


def test_scales_on_queries_and_keys_move_into_the_softmax(tmp_path: Path) -> None:
    nodes = [
        ("Mul", "q inv_root2", "q2"),
        ("Transpose", "q2", "qt", {"perm": [0, 2, 1, 3]}),
        ("Transpose", "k", "kt", {"perm": [0, 2, 3, 1]}),
        ("Mul", "kt inv_root2", "k2"),
        ("MatMul", "qt k2", "qk"),
        ("Softmax", "qk", "y"),
    ]
    inputs = {name: HEADS[name] for name in "qk"}
    path = save(build(nodes, inputs, "y", used(nodes, CONSTANTS)), tmp_path)
    model = check(path, *SIZES)
    assert ops(model) == {"apq.MatMul": 1, "apq.Softmax": 1}
    assert only(model, "apq.Softmax").attrs["scale"] == pytest.approx(0.5)
    assert only(model, "apq.MatMul").inputs == ("q", "k")


def test_a_mask_of_the_whole_shape(tmp_path: Path) -> None:
    for order in ("d mask", "mask d"):
        nodes = attention([("Div", "qk two", "d"), ("Add", order, "e")], "e")
        inputs = {**HEADS, "mask": ("float32", ["b", 2, "s", "s"])}
        path = save(build(nodes, inputs, "y", used(nodes, CONSTANTS)), tmp_path)
        softmax = only(check(path, *SIZES), "apq.Softmax")
        assert (softmax.inputs[1], softmax.attrs["scale"]) == ("mask", 0.5)


def test_softmax_over_another_axis_stays(tmp_path: Path) -> None:
    model = check(save(build([("Softmax", "x", "y", {"axis": 1})], X, "y"), tmp_path), *SIZES)
    assert ops(model) == {"Softmax": 1}


def test_softmax_before_opset_13_flattens(tmp_path: Path) -> None:
    """axis=1 by default, over everything from there on."""
    model = check(save(build([("Softmax", "x", "y")], X, "y", opset=11), tmp_path), *SIZES)
    assert ops(model) == {"Softmax": 1}
    inputs = {"x": ("float32", ["b", 8])}
    model = check(save(build([("Softmax", "x", "y")], inputs, "y", opset=11), tmp_path), {"b": 2})
    assert ops(model) == {"apq.Softmax": 1}


def test_a_transpose_that_others_read_is_still_folded(tmp_path: Path) -> None:
    nodes = [
        ("Transpose", "x", "t", {"perm": [0, 2, 1]}),
        ("MatMul", "x t", "y"),
        ("Neg", "t", "z"),
    ]
    model = check(save(build(nodes, X, "y z"), tmp_path), *SIZES)
    assert only(model, "apq.MatMul").inputs == ("x", "x")
    assert ops(model)["Transpose"] == 1


def test_products_of_different_rank_broadcast(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["b", 3, "s", 8]), "z": ("float32", [8, "n"])}
    path = save(build([("MatMul", "x z", "y")], inputs, "y"), tmp_path)
    model = check(path, {"b": 2, "s": 3, "n": 5})
    attrs = only(model, "apq.MatMul").attrs
    assert (attrs["perm_b"], attrs["perm_out"]) == ((0, 1), (0, 1, 2, 3))


def test_transposes_in_a_row_become_one_or_none(tmp_path: Path) -> None:
    nodes = [
        ("Transpose", "x", "a", {"perm": [1, 2, 0]}),
        ("Transpose", "a", "c", {"perm": [1, 2, 0]}),
        ("Transpose", "c", "d", {"perm": [1, 2, 0]}),
        ("Relu", "d", "y"),
        ("Neg", "c", "z"),
    ]
    model = check(save(build(nodes, X, "y z"), tmp_path), *SIZES)
    assert ops(model) == {"Relu": 1, "Transpose": 1, "Neg": 1}


def test_keys_transposed_in_a_batch(tmp_path: Path) -> None:
    """torch.export merges batch and heads, swaps the last two axes, and splits them again."""
    nodes = [
        ("Transpose", "q", "qt", {"perm": [0, 2, 1, 3]}),
        ("Transpose", "k", "k1", {"perm": [0, 2, 1, 3]}),
        ("Shape", "k1", "shape"),
        ("Slice", "shape zero one", "batch"),
        ("Slice", "shape two1 three", "length"),
        ("Concat", "minus length four", "flat", {"axis": 0}),
        ("Reshape", "k1 flat", "k2"),
        ("Transpose", "k2", "k3", {"perm": [0, 2, 1]}),
        ("Concat", "batch two1 four length", "split", {"axis": 0}),
        ("Reshape", "k3 split", "k4"),
        ("MatMul", "qt k4", "y"),
    ]
    weights = {
        "zero": np.array([0], np.int64),
        "one": np.array([1], np.int64),
        "two1": np.array([2], np.int64),
        "three": np.array([3], np.int64),
        "four": np.array([4], np.int64),
        "minus": np.array([-1], np.int64),
    }
    inputs = {name: HEADS[name] for name in "qk"}
    model = check(save(build(nodes, inputs, "y", weights), tmp_path), *SIZES)
    assert ops(model) == {"apq.MatMul": 1}
    assert only(model, "apq.MatMul").attrs["perm_b"] == (0, 2, 3, 1)


GUARD = [("IsNaN", "p", "bad"), ("Where", "bad zero p", "y")]


def guarded(tmp_path: Path, after: list[tuple], outputs: str = "y"):
    inputs = {**X, "keep": ("bool", ["b", 1, 8])}
    nodes = [
        ("Where", "keep zero low", "mask"),
        ("Add", "x mask", "scores"),
        ("Softmax", "scores", "p", {"axis": -1}),
        *after,
    ]
    weights = {"zero": np.array(0, np.float32), "low": np.array(-np.inf, np.float32)}
    keep = np.random.default_rng(0).random((2, 1, 8)) < 0.5
    keep[1] = False
    feeds = {"x": rand(2, 3, 8), "keep": keep}
    path = save(build(nodes, inputs, outputs, weights), tmp_path)
    return check(path, {"b": 2, "s": 3}, feeds=feeds)


def test_probabilities_of_rows_that_are_all_masked_are_zero(tmp_path: Path) -> None:
    """torch's scaled_dot_product_attention: where(isnan(p), 0, p)."""
    model = guarded(tmp_path, GUARD)
    assert ops(model) == {"Where": 1, "apq.Softmax": 1}
    assert only(model, "apq.Softmax").attrs["zero_masked"]


def test_probabilities_that_are_read_elsewhere_stay_nan(tmp_path: Path) -> None:
    for outputs, after in (("y p", GUARD), ("y z", [*GUARD, ("Neg", "p", "z")])):
        model = guarded(tmp_path, after, outputs)
        assert not only(model, "apq.Softmax").attrs["zero_masked"]
        assert ops(model)["IsNaN"] == 1


def test_positions_are_never_negative(tmp_path: Path) -> None:
    """torch's mask functions ask ``position >= 0``; the mask then needs no row per query."""
    inputs = {**HEADS, "keep": ("bool", ["b", "s"])}
    nodes = [
        ("Shape", "keep", "shape"),
        ("Gather", "shape one", "n"),
        ("Range", "zero_i n one", "positions"),
        ("Unsqueeze", "positions last", "rows"),
        ("GreaterOrEqual", "rows zero_i", "always"),
        ("Unsqueeze", "keep middle", "keep4"),
        ("And", "always keep4", "allowed"),
        ("Where", "allowed zero low", "mask"),
        *attention([("Add", "qk mask", "e")], "e"),
    ]
    weights = {
        "one": np.array(1, np.int64),
        "zero_i": np.array(0, np.int64),
        "last": np.array([1], np.int64),
        "middle": np.array([1, 2], np.int64),
        "zero": np.array(0, np.float32),
        "low": np.array(-1e9, np.float32),
    }
    model = check(save(build(nodes, inputs, "y", weights), tmp_path), *SIZES)
    mask = only(model, "apq.Softmax").inputs[1]
    assert model.value_specs[mask].shape == ("b", 1, 1, "s")
    assert not {"apq.Range", "apq.Expand", "And"} & set(ops(model))
